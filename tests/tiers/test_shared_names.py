"""Names and headers of shared tiers: who finds whose records; after a reset, nobody but the server itself."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.errors import CorruptRecordError
from kvtide.keys import OffloadKey, make_offload_key
from kvtide.testing import VirtualClock
from kvtide.testing.tiers import IDENTITY, name_of, payload_of
from kvtide.tiers import shared as shared_module
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.records import (
    DOUBTFUL,
    HEADER_BYTES,
    ChunkName,
    RecordIdentity,
    RecordRun,
    Shard,
    pack,
    unpack,
)
from kvtide.tiers.shared import CLOCK_STEP_S, SharedTier

PLACE = TierPlace(IDENTITY, 1, 0, instance="life one")
KEY = name_of(1).key
PAYLOAD = memoryview(payload_of(1, 64))


class NamedTier(SharedTier):
    """Names and headers, over a dict that several of them share."""

    def __init__(self, place: TierPlace, medium: dict[str, bytes] | None = None) -> None:
        super().__init__(place)
        self.medium = {} if medium is None else medium
        self.asked: list[list[OffloadKey]] = []

    def path_of(self, key: OffloadKey) -> str:
        return f"{self.folder_of(key)}/{self.file_of(key[:-4], key)}"

    def read_into(self, key: OffloadKey, payload: memoryview, deadline_s: float) -> bool:
        if (record := self.medium.get(self.path_of(key))) is None:
            return False
        payload[:] = record[HEADER_BYTES:]
        self.check(record[:HEADER_BYTES], key, payload)
        return True

    def write(self, name: ChunkName, payload: memoryview, deadline_s: float) -> Written:
        if not self.writes(name.key):
            return Written.THERE_ALREADY
        self.medium[self.path_of(name.key)] = self.header_of(name, payload) + bytes(payload)
        return Written.NEW

    def contains(self, keys: Sequence[OffloadKey], deadline_s: float) -> list[bool]:
        self.asked.append(list(keys))
        return [self.path_of(key) in self.medium for key in keys]

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError

    def ping(self, deadline_s: float) -> str:
        raise AssertionError


def tier_of(medium: dict[str, bytes] | None = None, **fields: object) -> NamedTier:
    return NamedTier(replace(PLACE, **fields), medium)  # type: ignore[arg-type]


def write(tier: NamedTier, number: int = 1) -> Written:
    return tier.write(name_of(number), memoryview(payload_of(number, 64)), 1.0)


def read(tier: NamedTier, number: int = 1) -> bool:
    return tier.read_into(name_of(number).key, memoryview(bytearray(64)), 1.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    clock = VirtualClock(1_000_000.0)
    monkeypatch.setattr(shared_module, "time", clock)
    return clock


# -- names ---------------------------------------------------------------------------------------------------


def test_a_name_says_format_model_group_hash_and_shard() -> None:
    tier = tier_of()
    assert tier.folder_of(KEY) == f"kv1/{bytes(range(32)).hex()}/g0"
    assert tier.file_of(KEY[:-4], KEY) == f"{KEY[:-4].hex()}.1of4"
    assert tier.folder_of(name_of(1, group_index=12).key).endswith("/g12")


def test_whoever_computes_the_same_finds_the_same_whatever_life_it_is_in() -> None:
    medium: dict[str, bytes] = {}
    write(tier_of(medium))
    assert read(tier_of(medium, instance="life two"))


@pytest.mark.parametrize(
    "identity",
    [
        RecordIdentity(bytes(32), IDENTITY.shards),
        RecordIdentity(IDENTITY.fingerprint, (Shard(2, 4),)),
        RecordIdentity(IDENTITY.fingerprint, (Shard(1, 8),)),
    ],
    ids=["weights", "rank", "rank count"],
)
def test_whoever_computes_anything_else_does_not(identity: RecordIdentity) -> None:
    medium: dict[str, bytes] = {}
    write(tier_of(medium))
    other = tier_of(medium, identity=identity)
    assert not read(other)
    write(other)
    assert len(medium) == 2, "nor does it overwrite it"


@settings(deadline=None)
@given(
    block_hash=st.binary(min_size=1, max_size=32),
    group_index=st.integers(0, 3),
    fingerprint=st.binary(min_size=32, max_size=32),
)
def test_no_bytes_of_a_hash_leave_the_folder_or_break_a_name(
    block_hash: bytes, group_index: int, fingerprint: bytes
) -> None:
    tier = tier_of(identity=RecordIdentity(fingerprint))
    key = make_offload_key(block_hash, group_index)
    assert re.fullmatch(r"kv1/[0-9a-f]{64}/g\d+", tier.folder_of(key))
    assert re.fullmatch(r"([0-9a-f]{2}){1,32}\.0of1", tier.file_of(block_hash, key))


@settings(deadline=None)
@given(st.sets(st.tuples(st.binary(min_size=1, max_size=8), st.integers(0, 300)), min_size=2, max_size=8))
def test_two_chunks_have_two_names(chunks: set[tuple[bytes, int]]) -> None:
    tier = tier_of()
    keys = [make_offload_key(block_hash, group_index) for block_hash, group_index in chunks]
    assert len({tier.path_of(key) for key in keys}) == len(keys)


def test_groups_have_shards_of_their_own() -> None:
    tier = tier_of(identity=RecordIdentity(bytes(32), (Shard(0, 2), Shard(3, 8))))
    files = [tier.file_of(b"x", make_offload_key(b"x", group)) for group in (0, 1)]
    assert files == ["78.0of2", "78.3of8"]
    with pytest.raises(KeyError, match="no such group: 2"):
        tier.file_of(b"x", make_offload_key(b"x", 2))
    with pytest.raises(ValueError, match="there are 2 groups"):
        tier.header_of(ChunkName(make_offload_key(b"x", 2), None, 0), PAYLOAD)


# -- who writes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("writes", "expected"),
    [((True,), [True] * 3), ((False,), [False] * 3), ((True, False), [True, False, False])],
    ids=["all groups", "none", "by group; none where there is no such group"],
)
def test_a_replica_leaves_writing_to_another(writes: tuple[bool, ...], expected: list[bool]) -> None:
    tier = tier_of(writes=writes)
    assert [tier.writes(name_of(1, group_index=group).key) for group in range(3)] == expected


def test_what_one_replica_writes_all_read() -> None:
    medium: dict[str, bytes] = {}
    writer, reader = tier_of(medium), tier_of(medium, writes=(False,), rank=2)
    assert write(reader) is Written.THERE_ALREADY
    assert not medium
    assert write(writer) is Written.NEW
    assert read(reader)


# -- after a reset -------------------------------------------------------------------------------------------


def test_after_a_reset_nothing_of_before_is_found_and_nobody_finds_what_is_written() -> None:
    medium: dict[str, bytes] = {}
    tier, other = tier_of(medium), tier_of(medium, instance="life two")
    write(tier, 1)
    tier.begin_generation()
    assert tier.is_apart
    assert not read(tier, 1)
    write(tier, 2)
    assert read(tier, 2)
    assert not read(other, 2)
    other.begin_generation()
    assert not read(other, 2), "nor does one that was reset as well"
    assert read(tier_of(medium), 1), "and who was not has lost nothing"
    assert not other.contains([name_of(2).key], 1.0)[0]


@pytest.mark.parametrize("trusted", [False, True])
def test_each_reset_is_a_place_of_its_own_whether_the_weights_are_trusted_or_not(trusted: bool) -> None:
    tier = tier_of()
    folders = [tier.folder_of(KEY)]
    for _ in range(3):
        tier.begin_generation(trusted)
        folders.append(tier.folder_of(KEY))
        assert tier.generation & DOUBTFUL, "its records say themselves that they are nobody else's"
        assert re.fullmatch(r"kv1/[0-9a-f]{64}-[0-9a-f]{16}/g0", folders[-1])
    assert len(set(folders)) == 4


def test_all_ranks_of_a_life_are_reset_to_the_same_place() -> None:
    one, other = tier_of(), tier_of(rank=2)
    for tier in (one, other):
        tier.begin_generation()
        tier.begin_generation()
    assert one.generation == other.generation


def test_a_record_of_an_earlier_life_written_after_a_reset_is_refused(clock: VirtualClock) -> None:
    # As if two lives had been given one name.
    medium: dict[str, bytes] = {}
    earlier = tier_of(medium)
    earlier.begin_generation()
    write(earlier)
    clock.advance(CLOCK_STEP_S + 1)
    later = tier_of(medium)
    later.begin_generation()
    with pytest.raises(CorruptRecordError, match="an earlier life"):
        read(later)
    write(later)
    assert read(later)


def test_a_clock_that_was_set_back_a_little_costs_nothing(clock: VirtualClock) -> None:
    tier = tier_of()
    tier.begin_generation()
    clock._now_s -= CLOCK_STEP_S
    write(tier)
    assert read(tier)


def test_before_a_reset_the_age_of_a_record_is_of_no_interest(clock: VirtualClock) -> None:
    medium: dict[str, bytes] = {}
    write(tier_of(medium))
    clock.advance(10 * 365 * 86400)
    assert read(tier_of(medium))


# -- records -------------------------------------------------------------------------------------------------


def test_a_header_says_all_that_it_is_held_against(clock: VirtualClock) -> None:
    tier = tier_of()
    name = name_of(5, parent=4)
    header = unpack(tier.header_of(name, PAYLOAD))
    assert (header.name, header.shard, header.fingerprint) == (name, Shard(1, 4), IDENTITY.fingerprint)
    assert (header.generation, header.payload_bytes, header.written_at_s) == (0, 64, 1_000_000)
    assert tier.record_bytes(64) == HEADER_BYTES + 64


def test_the_right_record_passes_and_any_other_is_refused_by_what_is_wrong() -> None:
    tier, name = tier_of(), name_of(1)
    header = tier.header_of(name, PAYLOAD)
    tier.check(header, name.key, PAYLOAD)
    for other, what in (
        (tier_of(identity=RecordIdentity(bytes(32), IDENTITY.shards)), "fingerprint"),
        (tier_of(identity=RecordIdentity(IDENTITY.fingerprint, (Shard(0, 4),))), "shard"),
    ):
        with pytest.raises(CorruptRecordError, match=f"another {what}"):
            other.check(header, name.key, PAYLOAD)
    with pytest.raises(CorruptRecordError, match="another key"):
        tier.check(header, name_of(2).key, PAYLOAD)
    with pytest.raises(CorruptRecordError, match="the payload is damaged"):
        tier.check(header, name.key, memoryview(payload_of(2, 64)))
    with pytest.raises(CorruptRecordError, match="64 bytes, where 63 are due"):
        tier.check(header, name.key, PAYLOAD[:63])
    for short in (b"", header[:-1]):
        with pytest.raises(CorruptRecordError, match="a header of"):
            tier.check(short, name.key, PAYLOAD)
    tier.begin_generation()
    with pytest.raises(CorruptRecordError, match="another generation"):
        tier.check(header, name.key, PAYLOAD)


def test_a_record_that_claims_another_generation_is_refused_before_a_reset_too() -> None:
    tier = tier_of()
    forged = pack(replace(unpack(tier.header_of(name_of(1), PAYLOAD)), generation=DOUBTFUL | 7))
    with pytest.raises(CorruptRecordError, match="another generation"):
        tier.check(forged, KEY, PAYLOAD)


@settings(deadline=None)
@given(st.binary(max_size=2 * HEADER_BYTES))
def test_no_bytes_in_place_of_a_header_are_taken_for_one(junk: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        tier_of().check(junk, KEY, PAYLOAD)


# -- what is there -------------------------------------------------------------------------------------------


def test_what_is_there_of_a_run_is_asked_by_its_keys_in_order() -> None:
    tier = tier_of()
    run = RecordRun(0, 3, tuple(name_of(number).key[:-4] for number in range(4)), None, ())
    write(tier, 1)
    write(tier, 3)
    assert list(tier.find(run, 1.0)) == [False, True, False, True]
    assert tier.asked == [run.keys()]
