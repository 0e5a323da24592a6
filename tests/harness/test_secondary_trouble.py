"""kvtide's tiers under vLLM's own tiering: media that fail, freeze or are full."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from secondary_tiering import (
    FAULTY,
    HELD,
    PATIENCE_S,
    ROW_BYTES,
    ROWS,
    SHARED_FULL,
    SharedMemory,
    Tiering,
    keys_of,
    tierings,
    wait_until,
)

from kvtide.errors import TierFullError, TierUnavailableError
from kvtide.testing.faulty_tiers import TierCall
from kvtide.testing.memory_tier import MemoryTier
from kvtide.tiers.records import HEADER_BYTES


@pytest.fixture
def tiering() -> Iterator[Callable[..., Tiering]]:
    with tierings() as make:
        yield make


ALWAYS = range(1 << 30)


@pytest.mark.parametrize("call", ["read", "write", "contains"])
@pytest.mark.parametrize("error", [None, ZeroDivisionError], ids=["foreseen", "unforeseen"])
def test_a_tier_that_raises_costs_hits_and_nothing_else(
    call: str, error: type[Exception] | None, tiering: Callable[..., Tiering]
) -> None:
    raising = {"error": error} if error is not None else {}
    one, keys = tiering({**FAULTY, "failing": {}, **raising}), keys_of(13, 4)
    if call != "write":
        one.kept(keys)
        one.pushed_out()
    one.inner.failing = {TierCall(call): ALWAYS}
    if call == "write":
        one.kept(keys)
        one.pushed_out()
    assert one.load(keys) == 0
    one.settle()


def test_a_tier_that_recovers_serves_again(tiering: Callable[..., Tiering]) -> None:
    one, keys = tiering({**FAULTY, "failing": {"read": list(range(4))}}), keys_of(14, 4)
    one.kept(keys)
    one.pushed_out()
    one.until(lambda: one.load(keys) == 4)


def test_a_read_that_does_not_return_ends_at_its_deadline_and_writes_no_row_afterwards(
    tiering: Callable[..., Tiering], tmp_path: Path
) -> None:
    switch = tmp_path / "hold"
    one = tiering({**HELD, "switch": str(switch), "holding": ["read"], "deadline_s": 1.0})
    keys = keys_of(15, 4)
    one.kept(keys)
    one.pushed_out()
    switch.touch()
    assert one.load(keys[:1]) == 0
    assert one.inner.held_count(TierCall.READ) == 1  # who was promised it once is not promised it again
    assert one.load(keys) == 0
    # vLLM gives the rows to others now; what the calls find out later must not come near them.
    others = keys_of(16, ROWS)
    assert one.store(others) == others
    switch.unlink()
    one.until(lambda: one.tier._lane.state().late_count == 0)
    assert one.load(others) == ROWS


def test_a_write_that_does_not_return_gives_its_rows_back(
    tiering: Callable[..., Tiering], tmp_path: Path
) -> None:
    switch = tmp_path / "hold"
    one = tiering({**HELD, "switch": str(switch), "holding": ["write"], "deadline_s": 1.0})
    keys = keys_of(17, 3)
    switch.touch()
    one.store(keys)
    wait_until(lambda: one.inner.held_count(TierCall.WRITE) == 3)
    one.settle()  # until vLLM has no job open
    one.kept(keys_of(18, ROWS))  # which needs every row
    switch.unlink()
    one.until(lambda: one.tier._lane.state().late_count == 0)
    # What was written in the end is what was to be written, not what is in the rows by then.
    one.until(lambda: one.load(keys) == 3)


def test_a_lookup_that_is_not_answered_is_a_miss_after_a_bounded_time(
    tiering: Callable[..., Tiering], tmp_path: Path
) -> None:
    switch = tmp_path / "hold"
    one = tiering({**HELD, "switch": str(switch), "holding": ["contains"], "deadline_s": 1.0})
    keys = keys_of(19, 3)
    one.kept(keys)
    one.pushed_out()
    switch.touch()
    assert one.load(keys) == 0
    switch.unlink()
    one.until(lambda: one.load(keys) == 3)


def test_a_full_tier_skips_stores_and_serves_what_it_has(tiering: Callable[..., Tiering]) -> None:
    limit = 4 * (ROW_BYTES + HEADER_BYTES)
    one, keys = tiering({**SHARED_FULL, "limit": limit}), keys_of(20, 4)
    one.kept(keys)
    one.kept(keys_of(21, 4))
    one.pushed_out()
    assert one.load(keys) == 4


def test_a_private_tier_that_is_full_before_its_limit_makes_room(tiering: Callable[..., Tiering]) -> None:
    full = {"failing": {"write": [4]}, "error": lambda: TierFullError("full"), "threads": 1}
    one = tiering({**FAULTY, **full})
    first, second, third = keys_of(37, 4), keys_of(38, 4), keys_of(39, 4)
    for keys in (first, second, third):
        one.kept(keys)
    there = set(one.inner.inner.records)
    assert there >= set(third)
    assert not there >= set(first)


def test_stores_beyond_the_queue_are_skipped(tiering: Callable[..., Tiering], tmp_path: Path) -> None:
    switch = tmp_path / "hold"
    entry = {**HELD, "switch": str(switch), "holding": ["write"], "queue": 4 * ROW_BYTES}
    one = tiering(entry)
    switch.touch()
    one.store(keys_of(22, 4))
    one.store(keys_of(23, 4))
    one.until(lambda: len(one.manager._jobs) == 1)
    switch.unlink()
    one.settle()
    assert set(one.inner.inner.records) == set(keys_of(22, 4))
    one.pushed_out()
    one.kept(keys_of(23, 4))  # offered anew
    assert set(one.inner.inner.records) >= set(keys_of(23, 4))


class Unopened(SharedMemory):
    """Cannot be reached."""

    def open(self) -> None:
        raise TierUnavailableError("nobody answers")


@pytest.mark.parametrize(
    "entry",
    [
        {**FAULTY, "failing": {"open": list(range(1000))}},
        {"type": "kvtide-tier", "class": f"{__name__}.Unopened"},
    ],
    ids=["private", "shared"],
)
def test_a_tier_that_cannot_be_opened_takes_and_promises_nothing(
    entry: dict[str, Any], tiering: Callable[..., Tiering]
) -> None:
    one = tiering(entry, opens=False)
    one.kept(keys_of(24, 4))
    one.pushed_out()
    assert one.load(keys_of(24, 4)) == 0


class Noting(MemoryTier):
    """Notes who calls."""

    callers: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in {"open", "read_into", "write", "contains", "discard", "begin_generation", "inventory"}:
            Noting.callers.add(threading.current_thread().name)
        return super().__getattribute__(name)


def test_no_call_to_a_tier_is_made_by_vllm_s_own_thread(tiering: Callable[..., Tiering]) -> None:
    Noting.callers.clear()
    entry = {"type": "kvtide-tier", "class": f"{__name__}.Noting", "limit": 12 * (ROW_BYTES + HEADER_BYTES)}
    one, keys = tiering(entry), keys_of(30, 4)
    one.kept(keys)
    one.pushed_out()
    assert one.load(keys) == 4
    one.kept(keys_of(31, 4))
    one.manager.reset_cache()
    one.until(lambda: one.tier._serves)
    assert Noting.callers == {"kvtide-tier", "kvtide-tier-lookups", "kvtide-tier-survey"}


def test_a_reset_that_a_medium_refuses_leaves_it_out_until_it_has_taken_it(
    tiering: Callable[..., Tiering],
) -> None:
    one, keys, later = tiering({**FAULTY, "failing": {}}), keys_of(34, 4), keys_of(35, 4)
    one.kept(keys)
    one.inner.failing = {TierCall.GENERATION: ALWAYS}
    one.manager.reset_cache()
    one.kept(later)  # no store waits for what may never come
    assert one.load(keys) == 0
    one.inner.failing = {}
    one.until(lambda: one.tier._serves)
    assert one.load(keys) == 0
    one.kept(keys_of(36, 4))
    one.pushed_out()
    assert one.load(keys_of(36, 4)) == 4


class Closing(MemoryTier):
    """Notes whether it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("answers", [True, False])
def test_a_tier_is_closed_at_the_end_unless_it_still_owes_an_answer(
    answers: bool, tiering: Callable[..., Tiering], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtide.vllm.secondary.CLOSE_PATIENCE_S", 0.1 if not answers else PATIENCE_S)
    switch = tmp_path / "hold"
    of = {"class": f"{__name__}.Closing"}
    one = tiering({**HELD, "of": of, "switch": str(switch), "holding": ["contains"], "deadline_s": 1.0})
    if not answers:
        switch.touch()
    assert one.load(keys_of(33, 2)) == 0
    inner = one.inner
    one.close()
    assert inner.inner.closed is answers
    switch.unlink(missing_ok=True)
