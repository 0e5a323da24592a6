"""Pieces that are damaged, gone, foreign or late: never a wrong byte, and each costs what it has to."""

from collections.abc import Iterator
from typing import Any

import obstore
import pytest
from objects_runs import (
    NEW,
    PAYLOAD_BYTES,
    THERE,
    WORDS,
    damaged,
    paths,
    payload_for,
    prompt,
    read,
    run_of,
    tier_over,
    write,
)
from obstore.store import MemoryStore

from kvtide.errors import CorruptRecordError, TierUnavailableError
from kvtide.testing.tiers import DEADLINE_S
from kvtide.tiers.objects import ObjectsTier
from kvtide.tiers.records import HEADER_BYTES


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def tier(store: MemoryStore) -> Iterator[ObjectsTier]:
    tier = tier_over(store)
    yield tier
    tier.close()


@pytest.fixture
def other(store: MemoryStore) -> Iterator[ObjectsTier]:
    """Another server's."""
    tier = tier_over(store)
    yield tier
    tier.close()


@pytest.mark.parametrize("index", [0, 7, 15])
@pytest.mark.parametrize("what", ["header", "payload"])
def test_a_damaged_piece_is_refused_once_goes_and_comes_again(
    store: MemoryStore, tier: ObjectsTier, other: ObjectsTier, index: int, what: str
) -> None:
    run = run_of(WORDS, 0, 16)
    write(tier, run)
    at = index * HEADER_BYTES + 200 if what == "header" else 16 * HEADER_BYTES + index * PAYLOAD_BYTES
    damaged(store, paths(store)[0], at)
    outcomes = read(other, run)
    assert isinstance(outcomes.pop(index), CorruptRecordError)
    assert outcomes == [True] * 15
    assert read(other, run) == [False] * 16
    assert paths(store) == []
    assert write(other, run) == [NEW] * 16
    assert read(other, run) == [True] * 16


def test_a_piece_of_another_prompt_with_a_damaged_header_is_used_as_far_as_it_can_be(
    store: MemoryStore, tier: ObjectsTier, other: ObjectsTier
) -> None:
    write(tier, run_of(WORDS, 0, 16))
    damaged(store, paths(store)[0], 4 * HEADER_BYTES + 60)
    apart = prompt(*range(10), "x")
    assert read(other, run_of(apart, 0, 11)) == [True] * 4 + [False] * 7
    write(other, run_of(apart, 0, 11))
    assert read(other, run_of(apart, 0, 11)) == [True] * 11


@pytest.mark.parametrize(
    "byte_count", [0, 100, HEADER_BYTES, 16 * (HEADER_BYTES + PAYLOAD_BYTES) + 1, 1 << 20]
)
def test_a_piece_of_another_length_is_refused_and_replaced(
    store: MemoryStore, tier: ObjectsTier, other: ObjectsTier, byte_count: int
) -> None:
    run = run_of(WORDS, 0, 16)
    write(tier, run)
    (path,) = paths(store)
    obstore.put(store, path, bytes(byte_count))
    assert write(tier_over(store), run) == [NEW] * 16  # it has listed the wrong length
    obstore.put(store, path, bytes(byte_count))
    assert all(isinstance(one, CorruptRecordError) for one in read(other, run))
    assert paths(store) == []


def test_a_piece_that_has_grown_since_it_was_listed_is_not_fetched(
    store: MemoryStore, tier: ObjectsTier, other: ObjectsTier
) -> None:
    run = run_of(WORDS, 0, 16)
    write(tier, run)
    other.find(run, DEADLINE_S)
    obstore.put(store, paths(store)[0], bytes(1 << 22))
    assert all(isinstance(one, CorruptRecordError) for one in read(other, run))


def test_a_piece_that_goes_between_list_and_get_is_a_miss(
    store: MemoryStore, tier: ObjectsTier, other: ObjectsTier
) -> None:
    run = run_of(WORDS, 0, 32)
    write(tier, run)
    assert other.find(run, DEADLINE_S) == [True] * 32
    obstore.delete(store, paths(store)[0])
    assert read(other, run) == [False] * 16 + [True] * 16
    assert other.find(run, DEADLINE_S) == [False] * 16 + [True] * 16


def test_a_piece_that_was_written_anew_since_its_headers_were_read_is_no_damage(
    store: MemoryStore, tier: ObjectsTier, other: ObjectsTier
) -> None:
    run = run_of(WORDS, 0, 16)
    write(tier, run)
    assert read(other, run_of(WORDS, 3, 5)) == [True] * 2  # it knows the headers now
    path = paths(store)[0]
    obstore.delete(store, path)
    again = tier_over(store)
    payloads = [memoryview(bytes([at]) * PAYLOAD_BYTES) for at in range(16)]  # other bytes, as good
    again.write_run(run, payloads, DEADLINE_S)
    got = bytearray(PAYLOAD_BYTES)
    first = other.read_run(run_of(WORDS, 3, 4), [memoryview(got)], DEADLINE_S)
    assert first == [False]  # not the version whose headers it knows
    assert other.read_run(run_of(WORDS, 3, 4), [memoryview(got)], DEADLINE_S) == [True]
    assert got == bytes([3]) * PAYLOAD_BYTES
    assert paths(store) == [path]


@pytest.mark.parametrize(
    "name",
    [
        "stranger",
        "00-zz/01-aa",
        "99-aa/01-aa",
        "00-{first}/00-{last}",
        "00-{first}/65-{last}",
        "60-{first}/10-{last}",
        "00-{first}/16-{last}/more",
        "00-{first}/+6-{last}",
        "00-{first}x/16-{last}",
        "0-{first}/16-{last}",
        "00-abc/16-{last}",
    ],
)
def test_strange_names_in_a_window_are_left_alone(
    store: MemoryStore, tier: ObjectsTier, other: ObjectsTier, name: str
) -> None:
    run = run_of(WORDS, 0, 16)
    write(tier, run)
    window = paths(store)[0].rsplit("/", 2)[0]
    named = name.format(first=WORDS[0].hex()[:32], last=WORDS[15].hex()[:32])
    obstore.put(store, f"{window}/{named}", b"whatever")
    assert other.find(run, DEADLINE_S) == [True] * 16
    assert read(other, run) == [True] * 16
    assert len(paths(store)) == 2


def test_a_piece_under_the_name_of_another_prompts_is_refused(
    store: MemoryStore, tier: ObjectsTier, other: ObjectsTier
) -> None:
    ours, theirs = run_of(WORDS, 0, 16), run_of(prompt(*"abcdefghijklmnop"), 0, 16)
    write(tier, ours)
    name = paths(store)[0]
    write(tier, theirs)
    (foreign,) = set(paths(store)) - {name}
    obstore.copy(store, foreign, name)
    assert all(isinstance(one, CorruptRecordError) for one in read(other, ours))
    assert read(other, theirs) == [True] * 16


def test_a_new_generation_serves_nothing_of_before(tier: ObjectsTier, other: ObjectsTier) -> None:
    run = run_of(WORDS, 0, 16)
    write(tier, run)
    tier.begin_generation()
    assert tier.find(run, DEADLINE_S) == [False] * 16
    assert read(tier, run) == [False] * 16
    assert tier.contains(run.keys(), DEADLINE_S) == [False] * 16
    assert write(tier, run) == [NEW] * 16
    assert read(tier, run) == read(other, run) == [True] * 16


class Resetting:
    """obstore during whose k-th request of a kind the tier is reset."""

    def __init__(self, tier: ObjectsTier, kind: str) -> None:
        self.tier, self.kind = tier, kind
        tier._bucket._obstore = self

    def __getattr__(self, name: str) -> Any:
        if name == self.kind:
            self.kind = ""
            self.tier.begin_generation()
        return getattr(obstore, name)


def test_a_reset_during_a_read_costs_others_nothing(
    store: MemoryStore, tier: ObjectsTier, other: ObjectsTier
) -> None:
    run = run_of(WORDS, 0, 16)
    write(tier, run)
    write(tier, run_of(WORDS, 16, 17, lead=False))
    Resetting(tier, "get")
    assert read(tier, run) == [False] * 16
    late = tier_over(store)
    Resetting(late, "get")
    assert not late.read_into(
        run_of(WORDS, 0, 17).keys()[16], memoryview(bytearray(PAYLOAD_BYTES)), DEADLINE_S
    )
    assert read(other, run_of(WORDS, 0, 17)) == [True] * 17


def test_a_reset_during_a_write_leaves_nothing_under_names_of_before(
    tier: ObjectsTier, other: ObjectsTier
) -> None:
    run = run_of(WORDS, 0, 16)
    Resetting(tier, "list")
    with pytest.raises(TierUnavailableError, match="reset"):
        write(tier, run)
    assert other.find(run, DEADLINE_S) == [False] * 16


def test_a_key_whose_piece_others_have_deleted_is_not_here(store: MemoryStore, tier: ObjectsTier) -> None:
    run = run_of(WORDS, 0, 16)
    write(tier, run)
    obstore.delete(store, paths(store))
    assert tier.contains(run.keys(), DEADLINE_S) == [False] * 16
    assert tier.write(run.names()[3], memoryview(payload_for(WORDS[3])), DEADLINE_S) is NEW
    got = bytearray(PAYLOAD_BYTES)
    assert tier.read_into(run.keys()[3], memoryview(got), DEADLINE_S)
    assert got == payload_for(WORDS[3])


def test_a_rank_whose_bytes_another_writes_writes_nothing(store: MemoryStore) -> None:
    tier = tier_over(store, writes=(False,))
    assert write(tier, run_of(WORDS, 0, 20)) == [THERE] * 20
    assert paths(store) == []
    tier.close()


def test_no_time_left_is_said_before_anything_is_asked(tier: ObjectsTier) -> None:
    run = run_of(WORDS, 0, 4)
    payloads = [memoryview(bytearray(PAYLOAD_BYTES)) for _ in range(4)]
    for call in (tier.read_run, tier.write_run):
        with pytest.raises(TierUnavailableError, match="out of time"):
            call(run, payloads, 0.0)
    with pytest.raises(TierUnavailableError, match="out of time"):
        tier.find(run, 0.0)


class Ending:
    """obstore whose k-th request of a kind and all after it fail."""

    def __init__(self, tier: ObjectsTier, kind: str, good: int) -> None:
        self.kind, self.good = kind, good
        tier._bucket._obstore = self

    def __getattr__(self, name: str) -> Any:
        if name == self.kind:
            self.good -= 1
            if self.good < 0:
                return self.fail
        return getattr(obstore, name)

    @staticmethod
    def fail(*arguments: Any, **options: Any) -> None:
        raise obstore.exceptions.GenericError(
            "Server returned non-2xx status code: 503 Slow Down: <Code>SlowDown</Code>"
        )


def test_trouble_after_the_first_piece_is_told_for_the_others(tier: ObjectsTier, other: ObjectsTier) -> None:
    run = run_of(WORDS, 0, 48)
    Ending(tier, "put", 1)
    outcomes = write(tier, run)
    assert outcomes[:16] == [NEW] * 16
    assert all(isinstance(one, TierUnavailableError) for one in outcomes[16:])
    Ending(tier, "put", 9)
    assert write(tier, run) == [THERE] * 16 + [NEW] * 32
    Ending(other, "get", 1)
    outcomes = read(other, run)
    assert outcomes[:16] == [True] * 16
    assert all(isinstance(one, TierUnavailableError) and "SlowDown" in str(one) for one in outcomes[16:])


@pytest.mark.parametrize("kind", ["list", "put"])
def test_trouble_before_anything_was_written_is_raised(tier: ObjectsTier, kind: str) -> None:
    Ending(tier, kind, 0)
    with pytest.raises(TierUnavailableError, match="503 SlowDown: throttled"):
        write(tier, run_of(WORDS, 0, 16))


@pytest.mark.parametrize("kind", ["list", "get"])
def test_trouble_before_anything_was_read_is_raised(tier: ObjectsTier, other: ObjectsTier, kind: str) -> None:
    write(tier, run_of(WORDS, 0, 16))
    Ending(other, kind, 0)
    with pytest.raises(TierUnavailableError, match="503 SlowDown: throttled"):
        read(other, run_of(WORDS, 0, 16))
