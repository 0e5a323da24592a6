"""How much may be written to a shared folder with a limit, from one count to the next."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from directory_records import folder_in_memory, tier_of

from kvtide.errors import TierFullError, TierUnavailableError
from kvtide.testing.clock import VirtualClock
from kvtide.testing.tiers import DEADLINE_S, name_of, payload_of
from kvtide.tiers.base import Written
from kvtide.tiers.directory_lease import Count, Lease
from kvtide.tiers.directory_room import LOOK_AGAIN_S, LOOK_S, Room


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    yield from folder_in_memory()


class Counts:
    """What is told when it is asked for, and how often that was."""

    def __init__(self) -> None:
        self.now: Count | None = None
        self.asked = self.nudges = 0

    def last(self) -> Count | None:
        self.asked += 1
        return self.now

    def nudge(self) -> None:
        self.nudges += 1


@pytest.fixture
def counts() -> Counts:
    return Counts()


def test_without_a_limit_nobody_is_asked(counts: Counts) -> None:
    Room(0, counts.last, counts.nudge).take(1 << 50)
    assert (counts.asked, counts.nudges) == (0, 0)


def test_more_than_a_tenth_beyond_the_limit_nothing_is_written_until_it_is_counted_again(
    counts: Counts,
) -> None:
    clock = VirtualClock()
    room = Room(1000, counts.last, counts.nudge, clock.monotonic)
    counts.now = Count(1, 1100)
    room.take(10)
    counts.now = Count(2, 1101)
    clock.advance(LOOK_S)
    for _ in range(2):  # the second one asks nobody
        with pytest.raises(TierFullError, match="1101 bytes were counted, where 1000 are the limit"):
            room.take(10)
    counts.now = Count(3, 900)
    clock.advance(LOOK_AGAIN_S)
    room.take(10)
    assert counts.asked == 3


def test_from_one_count_to_the_next_an_eighth_of_the_limit_is_written_whatever_happens(
    counts: Counts,
) -> None:
    clock = VirtualClock()
    room = Room(8000, counts.last, counts.nudge, clock.monotonic)
    for _ in range(2):
        for _ in range(10):
            room.take(100)
        clock.advance(1000.0)
        with pytest.raises(TierFullError, match="1000 bytes were written since"):
            room.take(100)
        room.give_back(100)
        room.take(100)
        counts.now = Count(1 if counts.now is None else 2, 100)
        clock.advance(LOOK_AGAIN_S)
    assert counts.nudges > 4


def test_a_record_larger_than_the_share_can_be_written(counts: Counts) -> None:
    room = Room(100, counts.last, counts.nudge)
    room.take(1000)
    with pytest.raises(TierFullError):
        room.take(1)


def test_what_was_counted_decides_whether_a_tier_writes_and_never_whether_it_reads(tmp_path: Path) -> None:
    limit_bytes = 1 << 20
    tier = tier_of(tmp_path, limit_bytes, rank=1)  # which counts nothing itself
    lease = Lease(str(tmp_path))
    assert lease.hold()
    assert lease.tell(limit_bytes)
    tier.write(name_of(1), memoryview(payload_of(1)), DEADLINE_S)
    assert lease.tell(2 * limit_bytes)
    tier._room._asked_s -= LOOK_S
    with pytest.raises(TierFullError):
        tier.write(name_of(2), memoryview(payload_of(2)), DEADLINE_S)
    assert tier.write(name_of(1), memoryview(payload_of(1)), DEADLINE_S) is Written.THERE_ALREADY
    assert tier.read_into(name_of(1).key, memoryview(bytearray(payload_of(1))), DEADLINE_S)
    assert "records took 2.0MiB when last counted" in tier.ping(DEADLINE_S)
    tier.close()


def test_writes_that_kept_nothing_do_not_count(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, 80 * len(payload_of(1)), rank=1)
    for _ in range(30):
        with pytest.raises(TierUnavailableError, match="out of time"):
            tier.write(name_of(1), memoryview(payload_of(1)), -1.0)
    assert tier.write(name_of(1), memoryview(payload_of(1)), DEADLINE_S) is Written.NEW
    for _ in range(30):
        assert tier.write(name_of(1), memoryview(payload_of(1)), DEADLINE_S) is Written.THERE_ALREADY
    assert tier.write(name_of(2), memoryview(payload_of(2)), DEADLINE_S) is Written.NEW
    tier.close()
