"""The benchmark ``jitter``: planted samples are judged, the load is counted, the control really copies."""

import copy
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from benchmarks import jitter as bench
from benchmarks.frame.registry import UnfitError
from benchmarks.frame.rounds import rounds
from benchmarks.jittering import vocabulary as words
from benchmarks.jittering.engine_child import DueCopies, Gaps
from benchmarks.jittering.load import Load
from benchmarks.jittering.plain_copies import PlainCopies, PlainSettings
from benchmarks.jittering.vocabulary import Moved

STEPS = 43
NOISE = (1.00, 0.99, 1.01, 1.02, 0.98, 1.00, 1.01, 0.99, 1.00, 1.00)
KIB = 1024

Samples = list[dict[str, Any]]


def planted(
    prefill: Callable[[int], float] = lambda index: 1.0, decode: float = 1.0, count: int = 11
) -> Samples:
    """Rounds in which kvtide's steps with prefill, a third, and those without take so many times as long."""
    samples = []
    for index, order in rounds(words.ARMS, count):
        for place, arm in enumerate(order):
            ours = arm == words.OURS
            factors = (prefill(index), decode) if ours else (1.0, 1.0)
            steps_us = [
                round(NOISE[index % len(NOISE)] * ((42_000 + 10 * step) * factors[0] if step % 3 == 0
                      else (17_000 + 10 * step) * factors[1]))
                for step in range(STEPS)
            ]  # fmt: skip
            samples.append(
                {
                    "round": index,
                    "place": place,
                    "arm": arm,
                    "gaps_us": [gap_us for gap_us in steps_us for _ in range(words.RUNNERS)],
                    "step_count": STEPS,
                    "wall_s": sum(steps_us) / 1e6,
                    "cpu_s": 2 * sum(steps_us) / 1e6,
                    "computed_tokens": 1152,
                    "cached_tokens": 5760,
                    "output_tokens": 296,
                    "loaded_bytes": 132_710_400,
                    "stored_bytes": 35_389_440,
                    "written_bytes": 35_389_440,
                    "evicted_chunks": 48.0 if ours else 0.0,
                    "others_cores": 0.02,
                    "stolen_cores": 0.0,
                }
            )
    return samples


def ratio(samples: Samples) -> float:
    return bench.judge(samples).bars[0].ratio


def test_equal_arms_have_a_ratio_of_one_and_the_bar_is_the_promised_one() -> None:
    (bar,) = bench.judge(planted()).bars
    assert (bar.ratio, bar.bar, bar.sense.value, bar.met) == (pytest.approx(1), 1.05, "at most", True)


def test_four_percent_are_met_and_six_are_missed() -> None:
    assert bench.judge(planted(lambda index: 1.04)).bars[0].met
    assert not bench.judge(planted(lambda index: 1.06)).bars[0].met


def test_the_known_ratio_comes_out() -> None:
    assert ratio(planted(lambda index: 1.25)) == pytest.approx(1.25, rel=1e-3)


def test_what_the_median_step_costs_is_no_matter_of_the_bar_and_is_told() -> None:
    verdict = bench.judge(planted(decode=1.2))
    assert verdict.bars[0].ratio == pytest.approx(1)
    told = {arm: next(note for note in verdict.notes if note.startswith(f"{arm}: ")) for arm in words.ARMS}
    assert "p50 17.32 " in told[words.CONTROL]
    assert "p50 20.78 " in told[words.OURS]


def test_a_stall_in_every_tenth_step_is_missed_and_in_one_of_a_turn_is_told_as_the_worst() -> None:
    def stalled(every: int) -> Samples:
        samples = planted()
        for sample in samples:
            if sample["arm"] == words.OURS:
                for index in range(0, len(sample["gaps_us"]), every * words.RUNNERS):
                    for runner in range(words.RUNNERS):
                        sample["gaps_us"][index + runner] = 250_000
        return samples

    assert not bench.judge(stalled(10)).bars[0].met
    verdict = bench.judge(stalled(STEPS))
    assert verdict.bars[0].met
    assert any(note.startswith("kvtide: ") and "worst 250" in note for note in verdict.notes)


def test_a_disturbed_round_does_not_count_whatever_it_says() -> None:
    samples = planted(lambda index: 3.0 if index == 4 else 1.0)
    for sample in samples:
        if sample["round"] == 4 and sample["arm"] == words.CONTROL:
            sample["others_cores"] = 0.5
    verdict = bench.judge(samples)
    assert verdict.bars[0].ratio == pytest.approx(1)
    assert verdict.notes[0] == "10 of 11 rounds were undisturbed and count"


def test_without_enough_quiet_rounds_all_count_and_the_reader_is_told() -> None:
    samples = planted(lambda index: 1.2)
    for sample in samples:
        sample["stolen_cores"] = 0.5
    verdict = bench.judge(samples)
    assert verdict.bars[0].ratio == pytest.approx(1.2, rel=1e-3)
    assert verdict.notes[0].startswith("NOT A QUIET MACHINE: only 0 of 11")


def test_the_verdict_on_the_same_samples_is_the_same_and_they_are_left_as_they_were() -> None:
    samples = planted(lambda index: 1.03)
    before = copy.deepcopy(samples)
    assert bench.judge(samples) == bench.judge(samples)
    assert samples == before


def every(arm: str, **factors: float) -> Callable[[Samples], None]:
    def apply(samples: Samples) -> None:
        for sample in samples:
            if sample["arm"] == arm:
                sample.update({name: sample[name] * factor for name, factor in factors.items()})

    return apply


def first(**values: Any) -> Callable[[Samples], None]:
    return lambda samples: samples[0].update(values)


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (every(words.OURS, loaded_bytes=0.9), "loaded_bytes: .* not the same work"),
        (every(words.OURS, stored_bytes=0.95), "stored_bytes: .* not the same work"),
        (every(words.OURS, written_bytes=0.5), "written_bytes: .* not the same work"),
        (every(words.CONTROL, computed_tokens=1.1), "computed_tokens: .* not the same work"),
        (every(words.CONTROL, cached_tokens=0.0), "cached_tokens: .* nothing is compared"),
        (every(words.CONTROL, written_bytes=0.0), "written_bytes: .* nothing is compared"),
        (every(words.OURS, evicted_chunks=0.0), "did not evict"),
        (first(step_count=STEPS + 1), "a runner was held up"),
        (first(gaps_us=[]), "a runner was held up"),
        (first(gaps_us=None), "a sample is damaged"),
        (first(gaps_us=["slow"] * STEPS * words.RUNNERS), "a sample is damaged"),
        (first(gaps_us=[float("nan")] * STEPS * words.RUNNERS), "a sample is damaged"),
        (first(loaded_bytes=None), "a sample is damaged"),
        (lambda samples: samples[0].pop("wall_s"), "a sample is damaged"),
        (first(arm=words.CONTROL), "a sample of control too many"),
        (list.pop, "no sample of"),
        (lambda samples: samples.__delitem__(slice(6, None)), "3 rounds; 10 are needed"),
        (list.clear, "0 rounds; 10 are needed"),
    ],
)
def test_samples_of_something_else_are_not_judged(plant: Callable[[Samples], None], said: str) -> None:
    samples = planted()
    plant(samples)
    with pytest.raises(UnfitError, match=said):
        bench.judge(samples)


# -- the load ---------------------------------------------------------------------------------------

VOCABULARY = 49_152
KV_BYTES_PER_TOKEN = 23_040  # 30 layers x 3 heads x 64 numbers x (key and value) x 2 bytes
BLOCK_BYTES = words.TOKENS_PER_BLOCK * KV_BYTES_PER_TOKEN
SHARED_BLOCKS = words.SHARED_TOKENS // words.TOKENS_PER_BLOCK


def blocks_of(tokens: int) -> int:
    return -(-tokens // words.TOKENS_PER_BLOCK)


OTHER_BLOCKS = blocks_of(words.SHARED_TOKENS + words.NEW_TOKENS + words.OTHER_TOKENS)
RUNNERS_BLOCKS = words.RUNNERS * blocks_of(words.RUNNER_PROMPT_TOKENS + words.RUNNER_TOKENS)


def test_a_beginning_has_left_the_engines_own_cache_with_kvtide_and_not_in_the_control() -> None:
    """What is counted is blocks that are used between two prompts of the same beginning."""
    ours = bench.BEGINNINGS[words.OURS]
    control = bench.BEGINNINGS[words.CONTROL]
    # Every block but the null one is used in turn, the one that was free for longest first.
    assert (ours - 1) * OTHER_BLOCKS >= bench.BLOCKS - 1
    # In the control only what is new is taken anew; at most two turns begin in between, and others overlap.
    new_blocks = OTHER_BLOCKS - SHARED_BLOCKS
    taken = control * new_blocks + 2 * RUNNERS_BLOCKS
    assert control * SHARED_BLOCKS + taken + 2 * OTHER_BLOCKS <= bench.BLOCKS - 1


def test_all_that_runs_together_fits_the_engines_cache() -> None:
    """Otherwise preemptions would be measured."""
    together = bench.ENGINE["max_num_seqs"] - words.RUNNERS
    assert RUNNERS_BLOCKS + together * OTHER_BLOCKS <= bench.BLOCKS - 1


def test_host_memory_holds_the_beginnings_between_their_uses_but_not_all_that_is_new() -> None:
    slots = bench.HOST_BYTES // BLOCK_BYTES
    ours = bench.BEGINNINGS[words.OURS]
    stored_of_other = (words.NEW_TOKENS + words.OTHER_TOKENS - 1) // words.TOKENS_PER_BLOCK
    runner_tokens = words.RUNNER_PROMPT_TOKENS + words.RUNNER_TOKENS - 1  # of the last there is no KV yet
    stored_of_runners = words.RUNNERS * (runner_tokens // words.TOKENS_PER_BLOCK)
    turn_ends = -(-ours // words.OTHERS)
    assert ours * (SHARED_BLOCKS + stored_of_other) + turn_ends * stored_of_runners < slots
    stored_of_turn = words.OTHERS * stored_of_other + stored_of_runners
    # In the first turn that is measured something leaves already.
    assert ours * SHARED_BLOCKS + (bench.WARM_UP_ROUNDS + 1) * stored_of_turn > slots


def test_what_is_new_of_the_last_other_is_computed_while_the_runners_run() -> None:
    steps = 2 + words.NEW_TOKENS // words.PREFILL_TOKENS  # with kvtide it waits up to two for its load
    last = Load(VOCABULARY, 3, 0).turn().others[-1]
    assert last.at_token + steps < words.RUNNER_TOKENS


def test_prefill_is_in_far_more_than_five_percent_of_the_steps() -> None:
    """At the edge between steps with and without prefill a p95 would jump from one to the other."""
    prefill = words.OTHERS * words.NEW_TOKENS // words.PREFILL_TOKENS
    assert 0.2 < prefill / (words.RUNNER_TOKENS - 1) < 0.6


def test_others_take_the_beginnings_in_turn_across_turns_and_end_differently() -> None:
    load = Load(VOCABULARY, 4, 1)
    known = [other.prompt[: words.SHARED_TOKENS] for other in load.introduction().others]
    others = [other for _ in range(4) for other in load.turn().others]
    begun = [other.prompt[: other.shared_tokens] for other in others]
    assert begun == [known[index % 4] for index in range(len(others))]
    endings = Counter(other.prompt[words.SHARED_TOKENS :][: words.TOKENS_PER_BLOCK] for other in others)
    assert set(endings.values()) == {1}
    assert {len(other.prompt) for other in others} == {words.SHARED_TOKENS + words.NEW_TOKENS}


def test_the_same_seed_asks_the_same_and_another_does_not() -> None:
    assert Load(VOCABULARY, 3, 5).turn() == Load(VOCABULARY, 3, 5).turn()
    assert Load(VOCABULARY, 3, 5).turn() != Load(VOCABULARY, 3, 6).turn()


def test_a_model_with_too_few_tokens_is_refused_by_their_number() -> None:
    with pytest.raises(UnfitError, match=r"the model has 512 token ids.*--model"):
        Load(512, 3, 0)


# -- what is due, and the gaps ----------------------------------------------------------------------


@dataclass
class StandIn:
    """What of a vLLM request is looked at."""

    num_computed_tokens: int = 0
    finished: bool = False
    num_prompt_tokens: int = 768

    def is_finished(self) -> bool:
        return self.finished


def test_a_known_prefix_is_loaded_once_and_each_full_block_is_stored_once() -> None:
    copies = DueCopies(BLOCK_BYTES, None)
    other = StandIn()
    copies.load(640)
    assert (copies.due, copies.is_loading) == (Moved(loaded_bytes=20 * BLOCK_BYTES), False)
    copies.follow(other, 640)  # type: ignore[arg-type]
    seen = []
    for computed in (0, 704, 768, 769, 775):
        other.num_computed_tokens = computed
        copies.end_step()
        seen.append((copies.due.loaded_bytes // BLOCK_BYTES, copies.due.stored_bytes // BLOCK_BYTES))
    assert seen == [(20, 0), (20, 2), (20, 4), (20, 4), (20, 4)]
    assert copies.due.written_bytes == copies.due.stored_bytes


def test_what_is_due_is_what_the_control_copies(tmp_path: Path) -> None:
    copies = DueCopies(32 * KIB, plain(tmp_path, 32 * KIB))
    other = StandIn(num_prompt_tokens=128)
    copies.load(96)
    copies.load(0)
    copies.follow(other, 96)  # type: ignore[arg-type]
    for other.num_computed_tokens, other.finished in ((128, False), (159, False), (160, True)):
        copies.end_step()
    assert copies._plain is not None
    assert copies._plain.finish() == copies.due == Moved(96 * KIB, 64 * KIB, 64 * KIB)
    assert not copies.is_loading


def test_what_is_generated_is_stored_when_the_request_has_ended_and_once() -> None:
    copies = DueCopies(BLOCK_BYTES, None)
    runner = StandIn(num_prompt_tokens=64)
    copies.follow(runner, 0)  # type: ignore[arg-type]
    seen = []
    for computed, finished in ((64, False), (96, False), (113, True), (320, True)):
        runner.num_computed_tokens, runner.finished = computed, finished
        copies.end_step()
        seen.append(copies.due.stored_bytes // BLOCK_BYTES)
    assert seen == [2, 2, 3, 3]


@dataclass
class Said:
    """What of a vLLM output is looked at."""

    request_id: str
    token_ids: tuple[int, ...] = (7,)

    @property
    def outputs(self) -> "list[Said]":
        return [self]


@dataclass
class Steps:
    """Feeds steps to ``Gaps``."""

    gaps: Gaps = field(default_factory=lambda: Gaps(("a", "b")))

    def step(self, now_s: float, *said: Said) -> None:
        self.gaps.end_step(list(said), now_s)  # type: ignore[arg-type]


def test_gaps_are_taken_from_when_every_runner_has_its_first_token() -> None:
    steps = Steps()
    steps.step(1.0, Said("a"))
    steps.step(2.0, Said("a"), Said("b"))
    assert (steps.gaps.begun, steps.gaps.gaps_us, steps.gaps.tokens_each) == (True, [], 1)
    steps.step(2.5, Said("a"), Said("b"), Said("other"))
    assert (steps.gaps.gaps_us, steps.gaps.tokens_each) == ([500_000, 500_000], 2)


def test_a_step_in_which_a_runner_gets_nothing_is_part_of_its_next_gap() -> None:
    steps = Steps()
    steps.step(1.0, Said("a"), Said("b"))
    steps.step(1.2, Said("a"), Said("b", ()))
    steps.step(1.5, Said("a"), Said("b"))
    assert steps.gaps.gaps_us == [200_000, 300_000, 500_000]


def test_steps_after_the_last_token_are_not_counted() -> None:
    steps = Steps()
    steps.step(1.0, Said("a"), Said("b"))
    steps.step(1.2, Said("a"), Said("b"))
    steps.step(9.0, Said("other"))
    assert (steps.gaps.step_count, steps.gaps.ended_s - steps.gaps.began_s) == (1, pytest.approx(0.2))


def test_without_runners_others_come_at_once() -> None:
    gaps = Gaps(())
    assert (gaps.begun, gaps.tokens_each) == (True, 1)


# -- the control's copies ---------------------------------------------------------------------------


def plain(folder: Path, piece_bytes: int = 64 * KIB) -> PlainCopies:
    settings = PlainSettings(folder, 512 * KIB, 1024 * KIB, 3)
    return PlainCopies(settings, piece_bytes, 256 * KIB, os.sched_getaffinity(0))


def test_plain_copies_really_copy_what_they_say(tmp_path: Path) -> None:
    copies = plain(tmp_path)
    device, host = copies._device.view, copies._host.view
    device[:] = bytes([1]) * len(device)
    host[:] = bytes([2]) * len(host)
    copies.store(3)
    assert copies.finish() == Moved(0, 192 * KIB, 192 * KIB)
    assert bytes(host) == bytes([1]) * (192 * KIB) + bytes([2]) * (320 * KIB)
    file = Path(f"/proc/self/fd/{copies._file}").read_bytes()
    assert file == bytes([1]) * (192 * KIB) + bytes(832 * KIB)
    device[:] = bytes([3]) * len(device)
    copies.load(2)
    assert copies.finish() == Moved(128 * KIB, 192 * KIB, 192 * KIB)
    assert bytes(device) == bytes([1]) * (128 * KIB) + bytes([3]) * (128 * KIB)


def test_they_go_around_and_around_and_leave_no_file(tmp_path: Path) -> None:
    copies = plain(tmp_path)
    for _ in range(20):
        copies.store(3)
        copies.load(2)
    assert copies.finish() == Moved(40 * 64 * KIB, 60 * 64 * KIB, 60 * 64 * KIB)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_is_not_passed_over(tmp_path: Path) -> None:
    copies = plain(tmp_path, piece_bytes=1000)  # no address of it is aligned: direct I/O refuses
    copies._file = -1
    copies.store(1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        copies.finish()


def test_more_pieces_at_once_than_there_is_room_for_are_not_passed_over(tmp_path: Path) -> None:
    copies = plain(tmp_path)
    copies.load(5)
    with pytest.raises(ValueError, match="262144 bytes have no room for 327680"):
        copies.finish()


def test_the_place_that_a_copy_does_not_fit_into_is_left_out(tmp_path: Path) -> None:
    copies = plain(tmp_path)
    copies.load(3)
    copies.finish()
    host, device = bytes(copies._host.view), bytes(copies._device.view)
    assert device[: 192 * KIB] == host[: 192 * KIB]
    copies.load(2)  # one place is left behind the last copy: it begins anew
    copies.finish()
    moved = bytes(copies._device.view)
    assert moved[: 128 * KIB] == host[192 * KIB : 320 * KIB]
    assert moved[128 * KIB :] == device[128 * KIB :]


def test_a_piece_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="262144 bytes have no room for a piece of 300000"):
        plain(tmp_path, piece_bytes=300_000)


def test_work_of_both_arms_is_due_alike() -> None:
    """What a turn gives reason to copy depends on the load alone, not on where the beginnings are."""
    turns = [Load(VOCABULARY, bench.BEGINNINGS[arm], 3).turn() for arm in words.ARMS]
    shapes = [
        (
            [len(prompt) for prompt in turn.runners],
            turn.runner_tokens,
            [(other.at_token, other.shared_tokens, len(other.prompt)) for other in turn.others],
            turn.other_tokens,
        )
        for turn in turns
    ]
    assert shapes[0] == shapes[1]
