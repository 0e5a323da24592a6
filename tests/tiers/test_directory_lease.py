"""The lease on cleaning a shared folder: one has it at a time, and whoever loses it stops."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from directory_records import folder_in_memory, put
from hypothesis import given
from hypothesis import strategies as st

from kvtide.testing.clock import VirtualClock
from kvtide.tiers.directory_cleaner import Cleaner
from kvtide.tiers.directory_lease import (
    LEASE_BYTES,
    STALE_S,
    Count,
    Lease,
    LeaseText,
    last_count,
    unpack_lease,
)
from kvtide.tiers.directory_names import LEASE, own_token
from kvtide.tiers.directory_walk import UNIT_BYTES


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    yield from folder_in_memory()


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
