"""Small chunks go into objects together, and whoever shares the beginning of a prompt finds them."""

import hashlib
import operator
import random
from collections.abc import Iterator, Sequence
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore

from kvtide.errors import CorruptRecordError, TierUnavailableError
from kvtide.testing.tiers import DEADLINE_S, IDENTITY, payload_of
from kvtide.tiers import objects_bucket
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.objects import ObjectsTier
from kvtide.tiers.objects_options import options_of
from kvtide.tiers.records import HEADER_BYTES, RecordRun, unpack

PAYLOAD_BYTES = 512
PACK_BYTES = 16 * PAYLOAD_BYTES
NEW, THERE = Written.NEW, Written.THERE_ALREADY


def prompt(*words: Any) -> tuple[bytes, ...]:
    """Chained hashes: two prompts have a beginning in common as far as their words are the same."""
    hashes, before = [], b""
    for word in words:
        before = hashlib.sha256(before + repr(word).encode()).digest()
        hashes.append(before)
    return tuple(hashes)


def run_of(hashes: Sequence[bytes], start: int, stop: int, lead: bool = True, group: int = 0) -> RecordRun:
    whole = RecordRun(group, 0, tuple(hashes))
    run = whole.between(start, stop)
    return run if lead else RecordRun(group, start, run.hashes, run.parent_hash)


def payload_for(block_hash: bytes) -> bytearray:
    return payload_of(int.from_bytes(block_hash[:3], "big"), PAYLOAD_BYTES)


def write(tier: ObjectsTier, run: RecordRun) -> list[Any]:
    payloads = [memoryview(payload_for(one)) for one in run.hashes]
    return list(tier.write_run(run, payloads, DEADLINE_S))


def read(tier: ObjectsTier, run: RecordRun) -> list[Any]:
    """Outcomes; what came back as read is right."""
    payloads = [bytearray(PAYLOAD_BYTES) for _ in run.hashes]
    outcomes = list(tier.read_run(run, [memoryview(one) for one in payloads], DEADLINE_S))
    for outcome, payload, block_hash in zip(outcomes, payloads, run.hashes, strict=True):
        assert outcome is not True or payload == payload_for(block_hash)
    return outcomes


def tier_over(store: Any, **place: Any) -> ObjectsTier:
    options = options_of({"url": "memory://", "pack_bytes": PACK_BYTES})
    tier = ObjectsTier(TierPlace(IDENTITY, 0, 0, **place), options, store)
    tier.open()
    return tier


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


class Counting:
    """obstore, and what was asked of it."""

    def __init__(self, tier: ObjectsTier) -> None:
        self.calls: list[str] = []
        tier._bucket._obstore = self

    def __getattr__(self, name: str) -> Any:
        if name != "exceptions":
            self.calls.append(name)
        return getattr(obstore, name)


def paths(store: MemoryStore) -> list[str]:
    return sorted(one["path"] for one in obstore.list(store).collect())


WORDS = prompt(*range(200))


# -- how it lies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload_bytes", "pack_bytes", "count"),
    [
        (1, 4096, 64),
        (64, 4096, 64),
        (65, 4096, 32),
        (1024, 4096, 4),
        (2048, 4096, 2),
        (2049, 4096, 1),
        (9, 0, 1),
    ],
)
def test_as_many_chunks_go_together_as_fit(payload_bytes: int, pack_bytes: int, count: int) -> None:
    options = options_of({"url": "memory://", "pack_bytes": pack_bytes})
    tier = ObjectsTier(TierPlace(IDENTITY, 0, 0), options)
    assert tier.run_chunks(payload_bytes) == count
    tier.close()


def test_names_and_layout_of_a_piece_do_not_change(store: MemoryStore, tier: ObjectsTier) -> None:
    assert write(tier, run_of(WORDS, 64, 67, group=3)) == [NEW] * 3
    (path,) = paths(store)
    first, last = WORDS[64].hex(), WORDS[66].hex()
    folder = f"kv1/{IDENTITY.fingerprint.hex()}/g3/w/{first}.1of4"
    assert path == f"{folder}/00-{first[:32]}/03-{last[:32]}"
    piece = bytes(obstore.get(store, path).bytes())
    headers = [unpack(piece[at * HEADER_BYTES :]) for at in range(3)]
    assert [(one.name.chunk_index, one.name.parent_hash) for one in headers] == [
        (index, WORDS[index - 1]) for index in (64, 65, 66)
    ]
    assert piece[3 * HEADER_BYTES :] == b"".join(payload_for(one) for one in WORDS[64:67])


def test_a_run_is_one_object_for_every_sixteen_chunks(store: MemoryStore, tier: ObjectsTier) -> None:
    counting = Counting(tier)
    assert write(tier, run_of(WORDS, 0, 128)) == [NEW] * 128
    assert counting.calls.count("put") == 8 == len(paths(store))
    assert counting.calls.count("list") == 2


# -- who finds what ------------------------------------------------------------------------------------


def test_another_server_finds_and_reads_the_same_prompt(tier: ObjectsTier, other: ObjectsTier) -> None:
    write(tier, run_of(WORDS, 0, 100))
    assert other.find(run_of(WORDS, 0, 120), DEADLINE_S) == [True] * 100 + [False] * 20
    assert read(other, run_of(WORDS, 0, 120)) == [True] * 100 + [False] * 20
    assert write(other, run_of(WORDS, 0, 100)) == [THERE] * 100


@pytest.mark.parametrize("shared", [1, 15, 16, 37, 64, 65, 99])
def test_a_prompt_that_goes_another_way_finds_what_is_common(
    store: MemoryStore, tier: ObjectsTier, other: ObjectsTier, shared: int
) -> None:
    write(tier, run_of(WORDS, 0, 100))
    apart = prompt(*range(shared), *["another", "way", "it", "goes", "from", "here", "on"])
    expected = [True] * shared + [False] * (len(apart) - shared)
    assert other.find(run_of(apart, 0, len(apart)), DEADLINE_S) == expected
    assert read(other, run_of(apart, 0, len(apart))) == expected
    assert write(other, run_of(apart, 0, len(apart))) == [THERE if one else NEW for one in expected]
    third = tier_over(store)
    assert read(third, run_of(apart, 0, len(apart))) == [True] * len(apart)
    assert read(third, run_of(WORDS, 0, 100)) == [True] * 100
    third.close()


def test_a_shorter_prompt_finds_the_beginning_of_a_piece(tier: ObjectsTier, other: ObjectsTier) -> None:
    write(tier, run_of(WORDS, 0, 16))
    for stop in (1, 5, 15):
        assert other.find(run_of(WORDS, 0, stop), DEADLINE_S) == [True] * stop
        assert read(other, run_of(WORDS, 0, stop)) == [True] * stop


@pytest.mark.parametrize(("start", "stop"), [(5, 6), (5, 12), (70, 75), (60, 70), (15, 17)])
def test_the_middle_of_pieces_is_found_by_the_lead(
    tier: ObjectsTier, other: ObjectsTier, start: int, stop: int
) -> None:
    write(tier, run_of(WORDS, 0, 96))
    assert other.find(run_of(WORDS, start, stop), DEADLINE_S) == [True] * (stop - start)
    counting = Counting(other)
    assert read(other, run_of(WORDS, start, stop)) == [True] * (stop - start)
    assert "put" not in counting.calls


def test_pieces_written_bit_by_bit_by_two_servers_are_read_as_one(
    tier: ObjectsTier, other: ObjectsTier, store: MemoryStore
) -> None:
    for at, writer in ((0, tier), (7, other), (9, tier), (30, other)):
        write(writer, run_of(WORDS, at, at + 21))
    assert read(tier_over(store), run_of(WORDS, 0, 51)) == [True] * 51


def test_what_is_behind_a_hole_is_found(store: MemoryStore, tier: ObjectsTier, other: ObjectsTier) -> None:
    write(tier, run_of(WORDS, 20, 28))
    assert read(other, run_of(WORDS, 18, 30)) == [False] * 2 + [True] * 8 + [False] * 2
    assert read(other, run_of(WORDS, 24, 26)) == [True] * 2


def test_groups_and_ranks_keep_apart(store: MemoryStore, tier: ObjectsTier) -> None:
    write(tier, run_of(WORDS, 0, 8))
    assert read(tier, run_of(WORDS, 0, 8, group=1)) == [False] * 8


def test_without_the_beginning_of_the_window_chunks_are_objects_of_their_own_and_found_by_runs(
    store: MemoryStore, tier: ObjectsTier, other: ObjectsTier
) -> None:
    assert write(tier, run_of(WORDS, 3, 6, lead=False)) == [NEW] * 3
    assert all("/w/" not in path for path in paths(store))
    assert write(tier, run_of(WORDS, 3, 6, lead=False)) == [THERE] * 3
    for lead in (False, True):
        assert other.find(run_of(WORDS, 3, 8, lead), DEADLINE_S) == [True] * 3 + [False] * 2
        assert read(other, run_of(WORDS, 3, 8, lead)) == [True] * 3 + [False] * 2


def test_chunks_that_were_written_one_by_one_are_read_by_runs_at_once(
    store: MemoryStore, tier: ObjectsTier, other: ObjectsTier
) -> None:
    write(tier, run_of(WORDS, 0, 20))
    for name in run_of(WORDS, 20, 50).names():  # as they are computed
        payload = memoryview(payload_for(WORDS[name.chunk_index]))
        assert tier.write(name, payload, DEADLINE_S) is NEW
    assert other.find(run_of(WORDS, 0, 64), DEADLINE_S) == [True] * 50 + [False] * 14
    assert read(other, run_of(WORDS, 0, 64)) == [True] * 50 + [False] * 14
    damaged(store, tier._path_of(run_of(WORDS, 0, 64).keys()[30]), 300)
    outcomes = read(other, run_of(WORDS, 0, 50))
    assert isinstance(outcomes.pop(30), CorruptRecordError)
    assert outcomes == [True] * 49
    assert read(other, run_of(WORDS, 29, 32)) == [True, False, True]


def test_who_only_looks_learns_by_the_objects_that_chunks_are_not_packed(
    store: MemoryStore, other: ObjectsTier
) -> None:
    large = memoryview(bytes(PACK_BYTES))
    for name in run_of(WORDS, 0, 20).names():
        other.write(name, large, DEADLINE_S)
    prober = tier_over(store)
    counting = Counting(prober)
    assert prober.find(run_of(WORDS, 0, 16), DEADLINE_S) == [True] * 16
    assert "list" in counting.calls
    counting.calls.clear()
    assert prober.find(run_of(WORDS, 16, 48), DEADLINE_S) == [True] * 4 + [False] * 28
    assert "list" not in counting.calls
    prober.close()


def test_a_miss_asks_little(other: ObjectsTier) -> None:
    counting = Counting(other)
    assert other.find(run_of(WORDS, 0, 200), DEADLINE_S) == [False] * 200
    assert counting.calls.count("list") == 1
    assert len(counting.calls) <= 6
    counting.calls.clear()
    assert read(other, run_of(WORDS, 0, 64)) == [False] * 64
    assert len(counting.calls) <= 2


def test_what_is_looked_for_again_is_not_listed_again(tier: ObjectsTier, other: ObjectsTier) -> None:
    write(tier, run_of(WORDS, 0, 64))
    other.find(run_of(WORDS, 0, 64), DEADLINE_S)
    counting = Counting(other)
    other.find(run_of(WORDS, 0, 64), DEADLINE_S)
    assert counting.calls == []
    assert read(other, run_of(WORDS, 0, 64)) == [True] * 64
    assert counting.calls == ["get"] * 4


@pytest.mark.parametrize("limit", [2, 5, 1000])
def test_a_window_that_many_prompts_continue_is_walked(
    store: MemoryStore, tier: ObjectsTier, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(objects_bucket, "LISTED_AT_ONCE", limit)
    prompts = [prompt(*range(70), *[f"{one}.{at}" for at in range(40)]) for one in range(12)]
    for one in prompts:
        assert NEW in write(tier, run_of(one, 0, 110))
    assert len(paths(store)) == 4 + 12 * 3  # the first window once, of the second 3 pieces each
    reader = tier_over(store)
    for one in prompts:
        assert read(reader, run_of(one, 0, 110)) == [True] * 110
        assert reader.find(run_of(one, 80, 110), DEADLINE_S) == [True] * 30
    reader.close()


# -- by key --------------------------------------------------------------------------------------------


def test_a_key_that_was_seen_in_a_piece_is_read_and_discarded_by_itself(
    store: MemoryStore, tier: ObjectsTier, other: ObjectsTier
) -> None:
    run = run_of(WORDS, 0, 16)
    write(tier, run)
    key, payload = run.keys()[5], bytearray(PAYLOAD_BYTES)
    assert not other.read_into(key, memoryview(payload), DEADLINE_S)  # it knows only the key
    for one in (tier, other):
        one.find(run, DEADLINE_S)
        assert one.contains([key], DEADLINE_S) == [True]
        assert one.write(run.names()[5], memoryview(payload), DEADLINE_S) is THERE
        assert one.read_into(key, memoryview(payload), DEADLINE_S)
        assert payload == payload_for(run.hashes[5])
    tier.discard([key])
    assert paths(store) == []
    assert tier.contains([key], DEADLINE_S) == [False]
    assert not other.read_into(key, memoryview(payload), DEADLINE_S)
    assert other.contains([key], DEADLINE_S) == [False]
    assert write(tier, run) == [NEW] * 16


# -- never a wrong byte --------------------------------------------------------------------------------


def damaged(store: MemoryStore, path: str, at: int) -> None:
    piece = bytearray(obstore.get(store, path).bytes())
    piece[at] ^= 16
    obstore.put(store, path, bytes(piece))


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


# -- at random -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [3, 1000], ids=["listings that break off", "whole listings"])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_was_written_by_anyone_is_found_by_everyone(
    seed: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {seed}")
    monkeypatch.setattr(objects_bucket, "LISTED_AT_ONCE", limit)
    lots, store = random.Random(seed), MemoryStore()
    tiers = [tier_over(store) for _ in range(3)]
    prompts = [prompt(*range(lots.randrange(150)), *[lots.random() for _ in range(60)]) for _ in range(6)]
    held: set[bytes] = set()
    for _ in range(60):
        hashes, tier = lots.choice(prompts), lots.choice(tiers)
        start = lots.randrange(len(hashes))
        run = run_of(hashes, start, min(len(hashes), start + lots.randrange(1, 70)))
        if lots.random() < 0.5:
            outcomes = write(tier, run)
            assert {
                one for one, outcome in zip(run.hashes, outcomes, strict=True) if outcome is THERE
            } <= held
            held |= set(run.hashes)
        else:
            fresh = tier_over(store)
            found, there = read(fresh, run), [one in held for one in run.hashes]
            # A walk ends at a hole; a listing that is whole tells what is behind it.
            assert found == there if limit == 1000 else not any(map(operator.gt, found, there))
            fresh.close()
    for tier in tiers:
        tier.close()
