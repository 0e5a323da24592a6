"""The judge of ``copies`` on planted samples, and the arms on a few blocks."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from benchmarks import copies as bench
from benchmarks.copying import child, vocabulary
from benchmarks.copying.ground import Ground, PieceCopy, in_runs, scattered
from benchmarks.copying.vocabulary import DIRECTIONS, KIB, LOAD, MIB, OURS, PIECE_BYTES, PLAIN, STORE, SUBMIT
from benchmarks.frame.registry import UnfitError
from benchmarks.frame.rounds import rounds

from kvtide.transfer.cores import CopyCores

Samples = list[dict[str, Any]]
NOISE = (1.00, 1.02, 0.99, 1.01, 0.98, 1.00, 1.01)


def planted(slowdown: float = 1.0, count: int = 14) -> Samples:
    """Samples in which kvtide takes ``slowdown`` times as long as the yardstick."""
    samples: Samples = []
    for direction, size in itertools.product(DIRECTIONS, PIECE_BYTES):
        for index, order in rounds(vocabulary.arms_of(size), count):
            samples += [
                {
                    "what": direction,
                    "piece_bytes": size,
                    "threads": 1,
                    "byte_count": vocabulary.byte_count(size),
                    "round": index,
                    "arm": arm,
                    "wall_s": 0.02 * NOISE[index % len(NOISE)] * (1.0 if arm == PLAIN else slowdown),
                    "others_cores": 0.02,
                    "stolen_cores": 0.0,
                }
                for arm in order
            ]
    shape = {"chunks": vocabulary.SUBMIT_CHUNKS, "layers": vocabulary.SUBMIT_LAYERS}
    samples += [{"what": SUBMIT, "round": index, "wall_s": 0.0002, **shape} for index in range(3)]
    return samples


def test_the_bars_are_those_that_were_promised() -> None:
    bars = {bar.name: (bar.bar, bar.sense.value) for bar in bench.judge(planted()).bars}
    large = ("64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB")
    assert bars == {
        f"{way} pieces of {size}: kvtide / memcpy": (0.65 if size == "12 KiB" else 0.90, "at least")
        for way in ("storing", "loading")
        for size in ("12 KiB", *large)
    }


@pytest.mark.parametrize(
    ("slowdown", "large", "small"), [(1.1, True, True), (1.2, False, True), (1.6, False, False)]
)
def test_a_bar_is_the_yardsticks_time_over_ours(slowdown: float, large: bool, small: bool) -> None:
    for bar in bench.judge(planted(slowdown)).bars:
        assert bar.ratio == pytest.approx(1 / slowdown)
        assert bar.met is (small if "12 KiB" in bar.name else large)


def test_a_row_is_judged_by_its_own_samples() -> None:
    samples = planted()
    for one in samples:
        if (one["what"], one.get("piece_bytes"), one.get("arm")) == (LOAD, 256 * KIB, OURS):
            one["wall_s"] *= 2
    missed = [bar.name for bar in bench.judge(samples).bars if not bar.met]
    assert missed == ["loading pieces of 256 KiB: kvtide / memcpy"]


def test_the_sizes_without_a_bar_are_shown_and_so_is_what_merging_brings() -> None:
    verdict = bench.judge(planted(2.0))
    text = "\n".join(verdict.notes)
    assert "storing pieces of 4 KiB" in text
    assert "loading pieces of 12 KiB that come 64 in a row" in text
    assert "245760 pieces, costs the engine's step 0.20 ms" in text
    (plot,) = verdict.plots
    assert [len(line.x) for line in plot.lines] == [9] * 4


def test_disturbed_rounds_do_not_count_while_there_are_enough_others() -> None:
    samples = planted(count=21)
    for one in samples:
        if one["what"] == STORE and one["round"] < 7:
            one.update(others_cores=0.6, wall_s=one["wall_s"] * (3 if one["arm"] == OURS else 1))
    verdict = bench.judge(samples)
    assert all(bar.met for bar in verdict.bars)
    assert verdict.notes[0] == f"{18 * 21 - 9 * 7} of {18 * 21} rounds were undisturbed and count"


def test_on_a_busy_machine_all_count_and_the_reader_is_told() -> None:
    samples = planted()
    for one in samples:
        if one["what"] == STORE:
            one["others_cores"] = 0.6
    assert bench.judge(samples).notes[0].startswith("NOT A QUIET MACHINE: only 126 of 252")


def change(**values: Any) -> Callable[[Samples], None]:
    return lambda samples: samples[0].update(values)


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (change(byte_count=1), "1 bytes are another amount of work"),
        (change(threads=2), r"by \[1, 2\] threads cannot be compared"),
        (change(arm="other"), "a sample of other too many"),
        (change(wall_s=0.0), "a sample is damaged"),
        (lambda samples: samples[0].pop("wall_s"), "a sample is damaged"),
        (lambda samples: samples[0].pop("what"), "a sample is damaged"),
        (lambda samples: samples.pop(0), "no sample of"),
        (lambda samples: samples[-1].update(chunks=5), "5 chunks of 30 layers are another submission"),
        (list.clear, "threads cannot be compared"),
        (lambda samples: samples.__setitem__(slice(None), planted(count=13)), "13 rounds; 14 are needed"),
        (lambda samples: [samples.pop() for _ in range(3)], "a sample is damaged"),
    ],
)
def test_samples_of_something_else_are_not_judged(plant: Callable[[Samples], object], said: str) -> None:
    samples = planted()
    plant(samples)
    with pytest.raises(UnfitError, match=said):
        bench.judge(samples)


def test_scattered_places_have_no_neighbours_and_runs_are_as_long_as_they_say() -> None:
    for side in (scattered(100, 1).on_device, scattered(100, 1).on_host):
        assert sorted(side) == list(range(1, 201, 2))
    places = in_runs(256, 1)
    neighbours = (places.on_device[1:] == places.on_device[:-1] + 1) & (
        places.on_host[1:] == places.on_host[:-1] + 1
    )
    assert int(neighbours.sum()) == 4 * 63


def test_every_arm_moves_the_bytes_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "WAIT_LIMIT_S", 0.0)
    told: list[str] = []
    sizes = (4 * KIB, 12 * KIB, MIB)
    samples = child.measure_copies(told.append, sizes, 4 * MIB, 1, 2, 0.0)
    assert len(told) == 3
    assert len(samples) == 2 * 2 * (2 + 3 + 2)
    assert {one["arm"] for one in samples} == {"kvtide", "memcpy", "kvtide_merged"}
    assert len(child.measure_submission(told.append, 64, 3, 2)) == 2


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_byte_in_the_wrong_place_is_seen(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ground = Ground(2 * MIB, CopyCores(1, frozenset()))
    copy = PieceCopy(ground, direction, 16 * KIB, 4, scattered(32, 3))
    assert copy.wrong_bytes(3) == 0
    run = copy.run

    def spoil(at: int) -> Callable[[], None]:
        def spoilt() -> None:
            run()
            (ground.host if direction == STORE else ground.device)[at] ^= 0xFF

        return spoilt

    # Block 0 is not asked for, on either side; block 1 is.
    for at in (5, 64 * KIB + 5 if direction == STORE else 16 * KIB + 5):
        monkeypatch.setattr(copy, "run", spoil(at))
        assert copy.wrong_bytes(3) == 1
    copy.close()
    ground.close()
