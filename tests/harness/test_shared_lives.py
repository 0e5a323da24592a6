"""Lives of chunks in a tier that others use too, with vLLM's real schedulers and a store in memory."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.config import KVTideConfig
from kvtide.manager.shared import CONFIRMED_FOR_S
from kvtide.testing import VirtualClock
from kvtide.testing.shared_memory_tier import Store, is_private
from kvtide.tiers.records import DOUBTFUL
from kvtide.tiers.shared import SharedTier
from kvtide.vllm.testing.below import check_below, is_settled, lower_of, shared_of, store_of
from kvtide.vllm.testing.copies import Copies
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.groups import GroupShape, Kind
from kvtide.vllm.testing.lanes import Lanes
from kvtide.vllm.testing.model import PatternModel
from kvtide.vllm.testing.neighbours import Neighbours
from kvtide.vllm.testing.promises import HangError, LeakError, WrongBytesError
from kvtide.vllm.testing.questions import Questions
from kvtide.vllm.testing.rest import check_rest
from kvtide.vllm.testing.shape import EngineShape

WAIT_S = KVTideConfig.model_fields["probe_wait_s"].default
PROMPT = list(range(1, 31))  # 7 whole blocks of 4 tokens, and 2 tokens
CHUNKS = 7
NO_WRITE = {"extra_args": {"kv_transfer_params": {"no_write": True}}}


class Rig:
    """An engine with a shared tier alone below little host memory, in virtual time."""

    def __init__(self, folder: Path, ranks: int = 1, kind: Kind = Kind.FULL, **settings: object) -> None:
        shared = {
            "class": "kvtide.testing.shared_memory_tier.SharedMemoryTier",
            "name": "shared",
            "options": {"store": str(folder), "run_chunks": 4},
        }
        settings = {
            "defer_limit_s": 1.0,
            "self_test": False,
            "store_queue": 1 << 20,
            "tiers": [shared],
            **settings,
        }
        shape = EngineShape(
            groups=(GroupShape(("layers.0", "layers.1"), 4, kind),), rank_count=ranks, settings=settings
        )
        self.store: Store = store_of(settings)
        self.clock = VirtualClock()
        self.copies = Copies(random.Random(1), self.clock, 0.02)
        self.copies.go_like({})
        self.lanes = Lanes(random.Random(2), self.clock)
        self.engine = ModelEngine(
            folder,
            shape,
            self.copies.copier,
            self.clock,
            random.Random(3),
            self.lanes.lane,
            self.lanes.prober,
        )
        self.engine.runner.between = self.between
        self.happened: Counter[str] = Counter()
        self.questions = Questions(self.engine, self.clock, self.happened)
        self.questions.watch()
        self.rest()

    def between(self) -> None:
        self.clock.advance(0.0001)
        self.copies.progress()
        self.lanes.progress()

    def rest(self) -> None:
        """Run until neither the engine nor its tiers have anything to do."""
        for _ in range(400):
            if not self.engine.busy and self.lanes.are_idle and is_settled(self.engine):
                check_rest(self.engine)
                return
            self.turns(1)
        raise AssertionError(f"not at rest: {self.lanes.describe()}, {self.engine.describe()}")

    def turns(self, count: int) -> None:
        """Let time pass, and the engine step."""
        for _ in range(count):
            self.clock.advance(0.002)
            self.engine.step()
            self.engine.update()

    def ask(self, name: str, prompt: list[int] = PROMPT) -> None:
        """Ask with an empty device, and wait for the answer."""
        self.engine.scheduler.reset_prefix_cache()
        self.engine.add(name, prompt, 1)
        self.rest()
        assert self.engine.outputs[name] == PatternModel.answer(prompt, 1)

    def restart(self, life: str = "another", weights: int = 0) -> None:
        self.lanes.kill()
        self.copies.forget()
        self.clock.advance(5.0)
        self.engine.restart(weights, life)
        self.lanes.forget_closed()
        self.questions.watch()
        self.rest()

    def count(self, name: str) -> int:
        return int(self.engine.counted.data.get(name, 0))

    def check(self) -> int:
        return check_below(self.engine, random.Random(4), self.lanes.harmed)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.engine.close()


def test_a_server_that_knows_nothing_finds_what_is_there_and_loads_it(rig: Rig) -> None:
    rig.ask("writes")
    assert len(rig.store.records) == CHUNKS
    rig.restart()
    rig.ask("reads")
    assert rig.count("tier_found_chunks|shared") == CHUNKS
    assert rig.count("tier_hit_chunks|shared") == CHUNKS
    assert rig.count("hit_tokens|host") == 4 * CHUNKS
    assert rig.check() > 0


def test_what_vanished_behind_our_back_is_computed_and_leaves_the_books(rig: Rig) -> None:
    rig.ask("writes")
    rig.restart()
    rig.lanes.questions.weights = {"stale": 1.0}  # looked up at once, told when all has gone
    rig.engine.add("asks", PROMPT, 1, **NO_WRITE)
    for name in list(rig.store.records):
        rig.store.take(name)
    rig.turns(20)
    rig.lanes.release()
    rig.rest()
    assert rig.count("tier_found_chunks|shared") == CHUNKS
    rig.engine.scheduler.reset_prefix_cache()
    rig.engine.add("believes it", PROMPT, 1, **NO_WRITE)
    rig.rest()
    assert rig.engine.outputs["believes it"] == PatternModel.answer(PROMPT, 1)
    assert rig.count("tier_hit_chunks|shared") == 0
    assert rig.count("tier_lost_chunks|shared") == CHUNKS
    rig.check()


@pytest.mark.parametrize("kept", [False, True], ids=["other weights", "the same weights"])
def test_after_a_reset_nothing_of_before_is_served_unless_tiers_are_kept(tmp_path: Path, kept: bool) -> None:
    rig = Rig(tmp_path, reset_keeps_tiers=kept)
    rig.ask("before")
    assert rig.engine.scheduler.reset_prefix_cache(reset_connector=True)
    if not kept:
        rig.engine.oracle.new_weights()
    rig.rest()
    asked = rig.count("tier_probes|shared")
    rig.ask("after")
    assert rig.count("tier_hit_chunks|shared") == (CHUNKS if kept else 0)
    assert rig.count("tier_probes|shared") == asked + kept
    assert sum(map(is_private, rig.store.records)) == (0 if kept else CHUNKS)
    assert rig.check() > 0
    rig.engine.close()


def test_a_name_of_an_earlier_life_brings_nothing_back_of_it(rig: Rig) -> None:
    for weights in range(2):  # each life puts other weights into memory, and is called the same
        assert rig.engine.scheduler.reset_prefix_cache(reset_connector=True)
        rig.engine.oracle.new_weights()
        rig.rest()
        rig.ask(f"life {weights}")
        rig.ask(f"life {weights} again")
        rig.check()
        rig.restart("one name for all")


def test_an_engine_that_was_idle_takes_no_old_answer_for_a_new_one(rig: Rig) -> None:
    rig.ask("writes")
    rig.restart()
    rig.ask("finds")
    asked = rig.count("tier_probes|shared")
    rig.engine.scheduler.reset_prefix_cache(reset_connector=False)
    rig.clock.advance(CONFIRMED_FOR_S + 3.0)
    # Host memory has it all: only who wants more than that asks.
    rig.ask("asks for more", [*PROMPT, *range(40, 60)])
    assert rig.count("tier_probes|shared") == asked + 1
    assert rig.happened["asked again after a while"] == CHUNKS


def test_a_request_is_held_back_for_an_answer_and_no_longer_than_it_may_be(rig: Rig) -> None:
    rig.ask("writes")
    rig.restart()
    rig.lanes.questions.weights = {"very late": 1.0}
    rig.engine.scheduler.reset_prefix_cache()
    began_s = rig.clock.monotonic()
    rig.engine.add("waits", PROMPT, 1)
    while not rig.engine.outputs["waits"]:
        rig.turns(1)
    assert WAIT_S <= rig.clock.monotonic() - began_s < 2 * WAIT_S
    assert rig.happened["held back for an answer"] > 0
    assert rig.count("tier_probes_late|shared") == 1
    lower = lower_of(rig.engine)
    assert lower is not None
    assert lower._probes is not None
    assert lower._probes.open_count == 1
    rig.lanes.release()
    rig.rest()


def test_what_ranks_have_alike_is_written_by_one_and_read_by_all(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ranks=2, kind=Kind.MLA)
    rig.ask("writes")
    assert len(rig.store.records) == CHUNKS
    rig.restart()
    rig.ask("reads")
    assert rig.count("tier_hit_chunks|shared") == CHUNKS
    assert rig.store.mistakes == []
    assert len(shared_of(rig.engine)) == 2
    rig.engine.close()


def test_a_chunk_of_which_one_rank_lacks_its_part_is_put_right(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ranks=2, defer_limit_s=0.0)
    rig.ask("writes")
    rig.restart()
    # Who is asked knows of rank 0 alone; the promotion it makes begin is under way when the request stores.
    rig.store.take(next(name for name in rig.store.records if name.endswith(".1of2")))
    assert len(rig.store.records) == 2 * CHUNKS - 1
    for name in ("is told", "computes", "hits"):
        before = rig.count("hit_tokens|host")
        rig.ask(name)
    assert rig.count("hit_tokens|host") - before == 4 * CHUNKS
    assert len(rig.store.records) == 2 * CHUNKS
    rig.check()
    rig.engine.close()


# -- whether the watch can fail -------------------------------------------------------------------------


def test_names_that_two_servers_share_after_their_resets_are_noticed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(self: SharedTier, trusted: bool = False) -> None:
        self.generation = DOUBTFUL | 1

    monkeypatch.setattr(SharedTier, "begin_generation", begin)
    neighbours = Neighbours(rig.store, rig.happened, random.Random(6))
    neighbours.move_in(shared_of(rig.engine))
    rig.ask("before")
    assert rig.engine.scheduler.reset_prefix_cache(reset_connector=True)
    rig.engine.oracle.new_weights()
    rig.rest()
    neighbours.keep_their_own()
    rig.ask("after")
    with pytest.raises(WrongBytesError):
        rig.check()


def test_books_that_name_what_nobody_ever_wrote_are_noticed(rig: Rig) -> None:
    rig.ask("writes")
    for name in list(rig.store.records)[:2]:
        rig.store.take(name)
    with pytest.raises(LeakError, match="nobody has said that they are"):
        rig.check()


def test_a_request_that_is_held_back_for_too_long_is_noticed(rig: Rig) -> None:
    lower = lower_of(rig.engine)
    assert lower is not None
    assert lower._probes is not None
    lower._probes._wait_s = 10 * WAIT_S
    rig.lanes.questions.weights = {"very late": 1.0}
    rig.engine.add("waits", PROMPT, 1)
    with pytest.raises(HangError, match="held back"):
        rig.turns(200)
