"""The limit of a shared folder: who removes what, how near the limit it stays, and what is left alone."""

import contextlib
import os
import random
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import TierFullError, TierUnavailableError
from kvtide.testing.clock import VirtualClock
from kvtide.testing.tiers import DEADLINE_S, IDENTITY, name_of, payload_of
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.directory import DirectoryTier
from kvtide.tiers.directory_cleaner import Cleaner, oldest
from kvtide.tiers.directory_lease import (
    LEASE_BYTES,
    STALE_S,
    Count,
    Lease,
    LeaseText,
    last_count,
    unpack_lease,
)
from kvtide.tiers.directory_names import LEASE, own_token, temporary_in
from kvtide.tiers.directory_room import LOOK_AGAIN_S, LOOK_S, Room
from kvtide.tiers.directory_walk import UNIT_BYTES, age_class

PATIENCE_S = 20.0
FINGERPRINTS = ("ab" * 32, "cd" * 32, "ef" * 32 + "-0123456789abcdef")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory, removed at once: there are thousands of files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.005)


def put(folder: Path, number: int, age_s: float, byte_count: int = UNIT_BYTES, fingerprint: int = 0) -> Path:
    """Lay down a file that counts as a record: what is in it is nobody's business here."""
    digits = number.to_bytes(4, "big").hex()
    path = folder / f"kv1/{FINGERPRINTS[fingerprint]}/g0/{digits[4:6]}/{digits[6:8]}/{digits * 8}.0of1"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    os.truncate(path, byte_count)
    age(path, age_s)
    return path


def age(path: Path, age_s: float) -> None:
    used_ns = int((time.time() - age_s) * 1e9)
    os.utime(path, ns=(used_ns, used_ns))


def tier_of(folder: Path, limit_bytes: int, rank: int = 0) -> DirectoryTier:
    tier = DirectoryTier.build(TierPlace(IDENTITY, rank, limit_bytes, {"path": str(folder)}))
    tier.open()
    return tier


# -- which records go -----------------------------------------------------------------------------


def test_what_was_used_longest_ago_goes_down_to_nine_tenths_of_whatever_model(tmp_path: Path) -> None:
    ages_s = [1000 * (number + 1) for number in range(30)]
    random.Random(7).shuffle(ages_s)
    paths = {
        put(tmp_path, number, age_s, fingerprint=number % 3): age_s for number, age_s in enumerate(ages_s)
    }
    assert Cleaner(str(tmp_path), 20 * UNIT_BYTES).round()
    left = {age_s for path, age_s in paths.items() if path.exists()}
    assert left == {1000 * (number + 1) for number in range(18)}
    assert last_count(str(tmp_path)) == Count(2, 18 * UNIT_BYTES)


def test_what_is_older_goes_altogether_before_any_of_the_age_where_it_ends(tmp_path: Path) -> None:
    # In whatever order the folder is walked through, some of the younger ones come first.
    ages_s = [1005] * 10 + [50_000] * 5 + [1005] * 10
    paths = [put(tmp_path, number, age_s) for number, age_s in enumerate(ages_s)]
    assert Cleaner(str(tmp_path), 20 * UNIT_BYTES).round()
    left = [path.exists() for path in paths]
    assert not any(left[10:15])
    assert sum(left) == 18


def test_at_its_limit_nothing_goes(tmp_path: Path) -> None:
    paths = [put(tmp_path, number, 1000 * number) for number in range(20)]
    assert Cleaner(str(tmp_path), 20 * UNIT_BYTES).round()
    assert all(path.exists() for path in paths)
    assert last_count(str(tmp_path)) == Count(1, 20 * UNIT_BYTES)


def test_what_was_read_of_late_stays_although_it_was_written_first(tmp_path: Path) -> None:
    tier = tier_of(tmp_path / "tier", 0)
    for number in range(10):
        tier.write(name_of(number), memoryview(payload_of(number)), DEADLINE_S)
        age(Path(tier._path_of(name_of(number).key)), 100_000 - 1000 * number)
    assert tier.read_into(name_of(0).key, memoryview(bytearray(payload_of(0))), DEADLINE_S)
    each_bytes = UNIT_BYTES * 3
    assert Cleaner(str(tmp_path / "tier"), 6 * each_bytes).round()
    here = tier.contains([name_of(number).key for number in range(10)], DEADLINE_S)
    assert here == [True] + [False] * 5 + [True] * 4
    tier.close()


@given(
    ages=st.dictionaries(st.integers(0, 1 << 40), st.integers(1, 1 << 30), max_size=20),
    byte_count=st.integers(1, 1 << 33),
)
def test_so_many_bytes_are_made_and_none_of_what_is_younger(ages: dict[int, int], byte_count: int) -> None:
    age_found, older_bytes, same_bytes = oldest(ages, byte_count)
    assert older_bytes == sum(count for one, count in ages.items() if one > age_found)
    if sum(ages.values()) >= byte_count:
        assert older_bytes + same_bytes == byte_count
        assert 0 < same_bytes <= ages[age_found]
    else:
        assert older_bytes == sum(ages.values())


@given(one_s=st.floats(0, 1e10), other_s=st.floats(0, 1e10))
def test_ages_keep_their_order_and_are_told_apart_if_they_differ_by_four_in_a_hundred(
    one_s: float, other_s: float
) -> None:
    one_s, other_s = sorted((one_s, other_s))
    assert age_class(one_s) <= age_class(other_s)
    assert one_s * 0.96 - 1 <= age_class(one_s) <= one_s
    if other_s > one_s * 1.04 + 1:
        assert age_class(one_s) < age_class(other_s)


def test_what_is_from_the_future_does_not_stay_for_ever(tmp_path: Path) -> None:
    future = put(tmp_path, 0, -1e6)
    paths = [put(tmp_path, number, 100 * number) for number in range(1, 10)]
    assert Cleaner(str(tmp_path), 9 * UNIT_BYTES).round()
    assert not future.exists()
    assert [path.exists() for path in paths] == [True] * 8 + [False]


def test_a_round_takes_no_memory_for_single_records(tmp_path: Path) -> None:
    def taken_by_a_round(count: int) -> int:
        folder = tmp_path / str(count)
        for number in range(count):
            put(folder, number, random.Random(number).random() * 1e7)
        cleaner = Cleaner(str(folder), count // 2 * UNIT_BYTES)
        cleaner._pace = lambda: lambda: None  # type: ignore[method-assign]
        tracemalloc.start()
        assert cleaner.round()
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak_bytes

    assert taken_by_a_round(3000) - taken_by_a_round(200) < 100 * 2800


# -- what is left alone ---------------------------------------------------------------------------


def test_unfinished_files_of_long_ago_go_and_others_count(tmp_path: Path) -> None:
    beside = put(tmp_path, 1, 50).parent
    old, new = Path(temporary_in(str(beside))), Path(temporary_in(str(beside)))
    at_the_top = Path(temporary_in(str(tmp_path)))
    for path, age_s in ((old, 4000), (new, 3000), (at_the_top, 4000)):
        path.write_bytes(bytes(UNIT_BYTES))
        age(path, age_s)
    assert Cleaner(str(tmp_path), 100 * UNIT_BYTES).round()
    assert (old.exists(), new.exists(), at_the_top.exists()) == (False, True, False)
    assert last_count(str(tmp_path)) == Count(1, 2 * UNIT_BYTES)


def test_an_unfinished_file_is_not_removed_for_want_of_room(tmp_path: Path) -> None:
    unfinished = Path(temporary_in(str(tmp_path)))
    unfinished.write_bytes(bytes(10 * UNIT_BYTES))
    age(unfinished, 3000)
    record = put(tmp_path, 1, 10)
    assert Cleaner(str(tmp_path), 5 * UNIT_BYTES).round()
    assert unfinished.exists()
    assert not record.exists()


def test_what_is_not_ours_is_neither_counted_nor_removed_nor_followed(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "tier", tmp_path / "elsewhere"
    mine = put(folder, 1, 10)
    of_another = put(elsewhere, 2, 1e6)
    (folder / "kv2").symlink_to(elsewhere / "kv1")
    (folder / f"kv1/{FINGERPRINTS[1]}").symlink_to(elsewhere / f"kv1/{FINGERPRINTS[0]}")
    link = mine.parent / f"{'00' * 32}.0of1"
    link.symlink_to(of_another)
    strangers = [folder / "notes.txt", mine.parent / "notes.txt", mine.parent / f"{mine.name}.bak"]
    for path in strangers:
        path.write_bytes(bytes(UNIT_BYTES))
        age(path, 1e6)
    os.mkfifo(mine.parent / f"{'11' * 32}.0of1")
    assert Cleaner(str(folder), UNIT_BYTES // 2).round()
    assert of_another.exists()
    assert link.is_symlink()
    assert all(path.exists() for path in strangers)
    assert not mine.exists()
    assert last_count(str(folder)) == Count(2, 0)


def test_folders_that_have_been_empty_for_long_go_and_come_again(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    tier = tier_of(folder, 0)
    tier.write(name_of(1), memoryview(payload_of(1)), DEADLINE_S)
    tier.discard([name_of(1).key])
    cleaner = Cleaner(str(folder), 1 << 30)
    assert cleaner.round()
    leaf = Path(tier._path_of(name_of(1).key)).parent
    assert leaf.exists()  # of just now: somebody may be about to write there
    while leaf.name != "kv1":
        age(leaf, 4000)
        assert cleaner.round()
        assert not leaf.exists()
        leaf = leaf.parent
    assert tier.write(name_of(1), memoryview(payload_of(1)), DEADLINE_S) is Written.NEW
    tier.close()


# -- one at a time --------------------------------------------------------------------------------


def test_one_has_the_lease_until_it_lets_go(tmp_path: Path) -> None:
    one, other = Lease(str(tmp_path)), Lease(str(tmp_path))
    assert one.hold()
    assert not other.hold()
    assert one.tell(77)
    assert one.hold()
    other.release()
    assert not other.hold()
    one.release()
    assert other.hold()
    assert not one.hold()
    assert not one.tell(78)


def test_a_lease_that_nobody_writes_to_is_taken_over_and_its_former_owner_finds_out(tmp_path: Path) -> None:
    clock = VirtualClock()
    one, other = Lease(str(tmp_path), clock.monotonic), Lease(str(tmp_path), clock.monotonic)
    assert one.hold()
    assert one.tell(77)
    assert not other.hold()
    clock.advance(STALE_S - 1)
    assert one.hold()  # which writes to it
    clock.advance(2)
    assert not other.hold()
    clock.advance(STALE_S)
    assert other.hold()
    assert other.count == Count(1, 77)
    assert not one.tell(99)
    assert not one.hold()
    assert other.hold()
    assert last_count(str(tmp_path)) == Count(1, 77)


def test_of_two_that_take_over_at_once_one_has_it(tmp_path: Path) -> None:
    clock = VirtualClock()
    gone, one, other = (Lease(str(tmp_path), clock.monotonic) for _ in range(3))
    assert gone.hold()
    assert not one.hold()
    assert not other.hold()
    clock.advance(STALE_S + 1)
    # Both have seen that it is stale, and replace it one after the other.
    assert one._take(replace=True)
    assert other._take(replace=True)
    assert not one.hold()
    assert other.hold()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * LEASE_BYTES,
        b"x" * 5000,
        LeaseText("somebody", 1, Count(1, 5)).pack()[:-1],
        LeaseText("somebody", 1, Count(1, 5)).pack().replace(b"5\n", b"-\n"),
        b"kvtide cleaner 1\na\n1\n1\n\xb2\n".ljust(LEASE_BYTES),
    ],
)
def test_what_is_no_lease_says_nothing_and_is_replaced_in_the_end(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LEASE).write_bytes(content)
    clock = VirtualClock()
    lease = Lease(str(tmp_path), clock.monotonic)
    assert last_count(str(tmp_path)) is None
    assert not lease.hold()
    clock.advance(STALE_S)
    assert lease.hold()
    assert lease.count == Count()


@given(token=st.just(own_token()), numbers=st.tuples(*[st.integers(0, 10**19)] * 3))
def test_a_lease_says_what_was_written_to_it(token: str, numbers: tuple[int, int, int]) -> None:
    text = LeaseText(token, numbers[0], Count(*numbers[1:]))
    assert unpack_lease(text.pack()) == text


@given(content=st.binary(max_size=2 * LEASE_BYTES))
def test_no_bytes_are_too_odd_for_a_lease(content: bytes) -> None:
    for packed in (content, content.ljust(LEASE_BYTES), b"kvtide cleaner 1\n" + content):
        assert unpack_lease(packed) is None or packed.startswith(b"kvtide cleaner 1\n")


def test_who_has_not_the_lease_removes_nothing(tmp_path: Path) -> None:
    paths = [put(tmp_path, number, 1000 * number) for number in range(20)]
    one = Lease(str(tmp_path))
    assert one.hold()
    assert not Cleaner(str(tmp_path), 10 * UNIT_BYTES).round()
    assert all(path.exists() for path in paths)


def test_who_loses_the_lease_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [put(tmp_path, number, 1000 * number) for number in range(600)]
    monkeypatch.setattr("kvtide.tiers.directory_cleaner.BEAT_S", 0.0)
    cleaner = Cleaner(str(tmp_path), UNIT_BYTES, lost := Lease(str(tmp_path)))
    first_tell = lost.tell

    def told_and_lost(used_bytes: int) -> bool:
        told = first_tell(used_bytes)
        assert Lease(str(tmp_path))._take(replace=True)
        return told

    monkeypatch.setattr(lost, "tell", told_and_lost)
    assert not cleaner.round()
    assert 0 < sum(not path.exists() for path in paths) < 300  # what it looked at before it asked again


# -- how much may be written ----------------------------------------------------------------------


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


# -- in the background ----------------------------------------------------------------------------


def cleaner_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvtide-cleaner"]


def test_only_the_first_rank_with_a_limit_has_a_thread_and_it_ends_with_the_tier(tmp_path: Path) -> None:
    for limit_bytes, rank, count in ((0, 0, 0), (1 << 30, 1, 0), (1 << 30, 0, 1)):
        tier = tier_of(tmp_path, limit_bytes, rank)
        tier.open()
        assert len(cleaner_threads()) == count
        tier.close()
        assert cleaner_threads() == []
    assert not (tmp_path / LEASE).exists()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.tiers.directory_cleaner.NUDGED_REST_S", 0.02)
    monkeypatch.setattr("kvtide.tiers.directory_cleaner.PERIOD_S", 0.05)
    monkeypatch.setattr("kvtide.tiers.directory_room.LOOK_S", 0.02)
    monkeypatch.setattr("kvtide.tiers.directory_room.LOOK_AGAIN_S", 0.02)


def bytes_in(folder: Path) -> int:
    total_bytes = 0
    for path in folder.rglob("*.1of4"):
        with contextlib.suppress(FileNotFoundError):
            total_bytes += path.stat().st_size
    return total_bytes


@pytest.mark.usefixtures("quick")
def test_much_more_than_the_limit_can_be_written_in_the_end_and_the_folder_stays_near_it(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    payload = memoryview(payload_of(1, 16 * UNIT_BYTES - 256))
    limit_bytes = 64 * 16 * UNIT_BYTES
    tier = tier_of(tmp_path, limit_bytes)
    request.addfinalizer(tier.close)
    most_bytes = written = 0
    end_s = time.monotonic() + PATIENCE_S
    while written < 300:
        assert time.monotonic() < end_s, f"{written} were written"
        try:
            tier.write(name_of(written), payload, DEADLINE_S)
            written += 1
        except TierFullError:
            time.sleep(0.005)  # the thread needs the time
        most_bytes = max(most_bytes, bytes_in(tmp_path))
    # When it was counted last at most a tenth too much; while that was done an eighth came, and one since.
    assert most_bytes <= limit_bytes * (1 + 1 / 10 + 2 / 8) + 16 * UNIT_BYTES


@pytest.mark.usefixtures("quick")
def test_trouble_is_told_once_and_its_end_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / LEASE).mkdir()
    cleaner = Cleaner(str(tmp_path), UNIT_BYTES)
    cleaner.start()
    try:
        until(lambda: len(caplog.messages) == 1)
        assert "cannot be counted or removed" in caplog.messages[0]
        (tmp_path / LEASE).rmdir()
        until(lambda: len(caplog.messages) == 2)
        assert "again" in caplog.messages[1]
    finally:
        assert cleaner.close()
