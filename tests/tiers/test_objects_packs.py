"""Small chunks go into objects together, and whoever shares the beginning of a prompt finds them."""

import operator
import random
import time
from collections.abc import Iterator

import obstore
import pytest
from objects_runs import (
    NEW,
    PACK_BYTES,
    PAYLOAD_BYTES,
    THERE,
    WORDS,
    Counting,
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

from kvtide.errors import CorruptRecordError
from kvtide.jobs import JobId, PartFate
from kvtide.testing.tiers import DEADLINE_S, IDENTITY
from kvtide.tiers import objects_bucket
from kvtide.tiers.base import TierPlace
from kvtide.tiers.objects import ObjectsTier
from kvtide.tiers.objects_options import options_of
from kvtide.tiers.records import HEADER_BYTES, unpack
from kvtide.transfer.lane import TierDirection, TierPart
from kvtide.transfer.tier_lane import LaneSettings, TierLane


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


@pytest.mark.parametrize(("start", "stop", "puts"), [(5, 21, 1), (5, 22, 2), (60, 76, 2), (48, 64, 1)])
def test_pieces_begin_where_a_run_does_and_end_with_its_window(
    store: MemoryStore, tier: ObjectsTier, start: int, stop: int, puts: int
) -> None:
    assert write(tier, run_of(WORDS, start, stop)) == [NEW] * (stop - start)
    assert len(paths(store)) == puts


def test_a_lane_hands_over_runs_and_few_objects_come_of_it(store: MemoryStore, other: ObjectsTier) -> None:
    lane = TierLane(tier_over(store), "bucket", LaneSettings(thread_count=2, deadline_s=DEADLINE_S))
    run, lead = run_of(WORDS, 70, 110), WORDS[64:70]
    sent = [TierPart(name, memoryview(payload_for(WORDS[name.chunk_index]))) for name in run.names()]
    back = [TierPart(name, memoryview(bytearray(PAYLOAD_BYTES))) for name in run.names()]
    try:
        for job, direction, parts in ((1, TierDirection.WRITE, sent), (2, TierDirection.READ, back)):
            assert lane.submit(JobId(job), direction, parts, lead)
            end_s = time.monotonic() + 2 * DEADLINE_S
            while not (outcomes := lane.poll()):
                assert time.monotonic() < end_s, "it did not end"
                time.sleep(0.001)
            assert set(outcomes[0].fates) == {PartFate.DONE}
    finally:
        assert lane.close(DEADLINE_S)
    assert [one.payload for one in back] == [one.payload for one in sent]
    assert len(paths(store)) == 3
    assert all("/w/" in path for path in paths(store))
    assert read(other, run) == [True] * 40


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


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_written_while_another_thread_lists_is_not_missed(
    store: MemoryStore, tier: ObjectsTier, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    bucket = tier._bucket
    listed = bucket.listed

    def writes_meanwhile(folder: str, end_s: float) -> object:
        monkeypatch.setattr(bucket, "listed", listed)
        found = listed(folder, end_s)
        for at in range(count):
            assert write(tier, run_of(WORDS, 8 * at, 8 * at + 8)) == [NEW] * 8
        return found

    monkeypatch.setattr(bucket, "listed", writes_meanwhile)
    assert read(tier, run_of(WORDS, 0, 8 * count)) == [True] * 8 * count
    assert read(tier, run_of(WORDS, 0, 8 * count)) == [True] * 8 * count


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
