"""The limit of a shared folder: what goes first, what is left alone, and the thread that sees to it."""

import contextlib
import os
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from directory_records import FINGERPRINTS, age, folder_in_memory, put, tier_of
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import TierFullError
from kvtide.testing.tiers import DEADLINE_S, name_of, payload_of
from kvtide.tiers.base import Written
from kvtide.tiers.directory_cleaner import Cleaner, oldest
from kvtide.tiers.directory_lease import Count, last_count
from kvtide.tiers.directory_names import LEASE, temporary_in
from kvtide.tiers.directory_walk import UNIT_BYTES, age_class

PATIENCE_S = 20.0


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    yield from folder_in_memory()


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.005)


# -- which records go --------------------------------------------------------------------------


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


# -- what is left alone ------------------------------------------------------------------------


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


# -- in the background -------------------------------------------------------------------------


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
