"""The valkey tier on real servers: the contract of every tier, and what is its own."""

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import CorruptRecordError, TierError, TierFullError
from kvtide.keys import OffloadKey, split_offload_key
from kvtide.testing.servers.valkey import (
    Server,
    cluster,
    redis_server,
    valkey_program,
    valkey_server,
    wait_until,
)
from kvtide.testing.tiers import IDENTITY, PAYLOAD_BYTES, TierTests, name_of
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.records import HEADER_BYTES, RecordIdentity, RecordRun, Shard
from kvtide.tiers.valkey import ValkeyTier
from kvtide.tiers.valkey_routes import slot_of

PATIENCE_S = 20.0


def build(url: str, identity: RecordIdentity = IDENTITY, **options: Any) -> ValkeyTier:
    place = TierPlace(identity, 0, 0, {"url": url, **options}, instance=os.urandom(8).hex())
    return ValkeyTier.build(place)


@contextmanager
def opened(url: str, **options: Any) -> Iterator[ValkeyTier]:
    tier = build(url, **options)
    try:
        tier.open()
        yield tier
    finally:
        tier.close()


def payload_of(number: int, byte_count: int = PAYLOAD_BYTES) -> bytearray:
    """Bytes of their own for each number, made faster than those of the suite."""
    return bytearray(random.Random(number).randbytes(byte_count))


def path_of(tier: ValkeyTier, key: OffloadKey) -> bytes:
    """Say under which name a record lies, by what is written down of names."""
    return f"kvtide/{tier.folder_of(key)}/{tier.file_of(split_offload_key(key)[0], key)}".encode()


def read(tier: ValkeyTier, number: int, byte_count: int = PAYLOAD_BYTES) -> bytearray | None:
    payload = bytearray(byte_count)
    found = tier.read_into(name_of(number).key, memoryview(payload), PATIENCE_S)
    return payload if found else None


def write(tier: ValkeyTier, number: int, byte_count: int = PAYLOAD_BYTES) -> Written:
    return tier.write(name_of(number), memoryview(payload_of(number, byte_count)), PATIENCE_S)


class ServerTests(TierTests):
    """The contract, on one server or on several."""

    @pytest.fixture
    def place(self, servers: list[Server]) -> list[Server]:
        for server in servers:
            server.command("FLUSHALL")
        return servers

    def make(self, place: list[Server], identity: RecordIdentity) -> ValkeyTier:
        self.servers = place
        return build(place[-1].url, identity, cluster=len(place) > 1)

    def damage(self, tier: Any, key: OffloadKey) -> None:
        server, path = self.keeper_of(tier, key)
        value = bytearray(server.command("GET", path))
        value[HEADER_BYTES + 7] ^= 1
        server.command("SET", path, bytes(value))

    def lose(self, tier: Any, key: OffloadKey) -> None:
        server, path = self.keeper_of(tier, key)
        assert server.command("DEL", path) == 1

    def keeper_of(self, tier: ValkeyTier, key: OffloadKey) -> tuple[Server, bytes]:
        path = path_of(tier, key)
        number = slot_of(path) * len(self.servers) // 16384
        return self.servers[number], path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_server(tmp_path_factory.mktemp("redis") / "one") as server:
        yield server


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with valkey_server(tmp_path_factory.mktemp("valkey") / "one") as server:
        yield server


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with cluster(tmp_path_factory.mktemp("cluster"), program=valkey_program()) as nodes:
        yield nodes


class TestOnRedis(ServerTests):
    @pytest.fixture
    def servers(self, server: Server) -> list[Server]:
        return [server]


class TestOnValkey(ServerTests):
    @pytest.fixture
    def servers(self, embedded: Server) -> list[Server]:
        return [embedded]


class TestOnACluster(ServerTests):
    @pytest.fixture
    def servers(self, nodes: list[Server]) -> list[Server]:
        return nodes


@pytest.fixture
def tier(server: Server) -> Iterator[ValkeyTier]:
    server.command("FLUSHALL")
    with opened(server.url) as tier:
        yield tier


# -- what lies there ------------------------------------------------------------------------------


def test_a_record_is_one_string_header_first_under_a_name_that_says_whose_it_is(
    tier: ValkeyTier, server: Server
) -> None:
    write(tier, 1)
    (path,) = server.command("KEYS", "*")
    block_hash = split_offload_key(name_of(1).key)[0]
    assert path == f"kvtide/kv1/{bytes(range(32)).hex()}/g0/{block_hash.hex()}.1of4".encode()
    value = server.command("GET", path)
    assert value[:8] == b"KVTIDE\r\n"
    assert value[HEADER_BYTES:] == payload_of(1)
    assert server.command("TTL", path) == -1


def test_records_expire_when_that_is_asked_for(server: Server) -> None:
    with opened(server.url, ttl_s=100, prefix="other:") as tier:
        for number, byte_count in ((1, PAYLOAD_BYTES), (2, 1 << 20)):
            assert write(tier, number, byte_count) is Written.NEW
        paths = server.command("KEYS", "other:*")
        assert len(paths) == 2
        assert all(0 < server.command("TTL", path) <= 100 for path in paths)


def test_what_another_rank_writes_is_not_written_here(server: Server) -> None:
    server.command("FLUSHALL")
    place = TierPlace(IDENTITY, 1, 0, {"url": server.url}, writes=(False,))
    tier = ValkeyTier.build(place)
    tier.open()
    assert write(tier, 1) is Written.THERE_ALREADY
    run = RecordRun(0, 5, (b"a" * 32, b"b" * 32))
    payloads = [memoryview(payload_of(number)) for number in (1, 2)]
    assert list(tier.write_run(run, payloads, PATIENCE_S)) == [Written.THERE_ALREADY] * 2
    assert server.command("DBSIZE") == 0
    tier.close()


def test_databases_and_sockets_are_reached_by_their_url(server: Server) -> None:
    server.command("FLUSHALL")
    with opened(f"{server.url}/3") as third, opened(f"unix://{server.socket_path}") as by_socket:
        write(third, 1)
        assert read(third, 1) == payload_of(1)
        assert read(by_socket, 1) is None
        write(by_socket, 2)
        assert read(by_socket, 2) == payload_of(2)
    tier = build(f"{server.url}/99")
    with pytest.raises(Exception, match=r"no database 99: see the end of tiers\.options\.url"):
        tier.open()
    tier.close()


def test_a_ping_says_what_answers(server: Server, tier: ValkeyTier) -> None:
    said = tier.ping(PATIENCE_S)
    assert said.startswith("Redis ")
    assert f"at 127.0.0.1:{server.port}, " in said
    assert "no maxmemory" in said
    assert "maxmemory-policy noeviction (set allkeys-lru" in said
    assert server.command("TTL", "kvtide/trial") > 0


# -- many records at once -----------------------------------------------------------------------


@pytest.mark.parametrize("byte_count", [16 << 10, 64 << 10, 1 << 20])
def test_a_run_is_written_and_read_in_one_call(tier: ValkeyTier, byte_count: int) -> None:
    hashes = tuple(split_offload_key(name_of(number).key)[0] for number in range(6))
    run = RecordRun(0, 0, hashes)
    write(tier, 2, byte_count)
    payloads = [memoryview(payload_of(number, byte_count)) for number in range(6)]
    written = list(tier.write_run(run, payloads, PATIENCE_S))
    assert written == [Written.NEW] * 2 + [Written.THERE_ALREADY] + [Written.NEW] * 3
    tier.discard([name_of(4).key])
    slots = [memoryview(bytearray(byte_count)) for _ in range(6)]
    assert list(tier.read_run(run, slots, PATIENCE_S)) == [True] * 4 + [False, True]
    for number in (0, 1, 2, 3, 5):
        assert slots[number] == payloads[number]
    assert [read(tier, number, byte_count) is not None for number in range(6)] == [True] * 4 + [False, True]


def test_one_bad_record_of_a_run_costs_no_other(tier: ValkeyTier, server: Server) -> None:
    hashes = tuple(split_offload_key(name_of(number).key)[0] for number in range(7))
    for number in range(7):
        write(tier, number)
    paths = [path_of(tier, name_of(number).key) for number in range(7)]
    good = server.command("GET", paths[1])
    server.command("SETRANGE", paths[1], str(HEADER_BYTES + 1), b"\x00\x00\x00")
    server.command("SET", paths[2], good[:-1])
    server.command("SET", paths[3], good + b"x")
    server.command("SET", paths[4], b"z" * (6 << 20))
    server.command("DEL", paths[5])
    server.command("LPUSH", paths[5], good)
    slots = [memoryview(bytearray(PAYLOAD_BYTES)) for _ in range(7)]
    outcomes = tier.read_run(RecordRun(0, 0, hashes), slots, PATIENCE_S)
    assert [outcome is True for outcome in outcomes] == [True] + [False] * 5 + [True]
    assert all(isinstance(outcome, CorruptRecordError) for outcome in outcomes[1:6])
    assert (slots[0], slots[6]) == (payload_of(0), payload_of(6))
    assert server.command("DBSIZE") == 2


def test_hundreds_of_keys_are_asked_for_and_discarded(tier: ValkeyTier, server: Server) -> None:
    keys = [name_of(number).key for number in range(700)]
    written = range(0, 700, 70)
    for number in written:
        write(tier, number)
    assert tier.contains(keys, PATIENCE_S) == [number in written for number in range(700)]
    tier.discard(keys)
    assert server.command("DBSIZE") == 0


# -- never a wrong byte -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forged",
    [
        b"",
        b"KVTIDE\r\n",
        bytes(HEADER_BYTES + PAYLOAD_BYTES),
        bytes(HEADER_BYTES + PAYLOAD_BYTES - 1),
        bytes(HEADER_BYTES + PAYLOAD_BYTES + 1),
        bytes(9 << 20),
    ],
    ids=["empty", "short", "zeros", "one short", "one long", "9 MiB"],
)
def test_a_forged_value_is_refused_and_forgotten(tier: ValkeyTier, server: Server, forged: bytes) -> None:
    path = path_of(tier, name_of(1).key)
    server.command("SET", path, forged)
    with pytest.raises(CorruptRecordError):
        read(tier, 1)
    assert server.command("EXISTS", path) == 0
    assert read(tier, 1) is None
    assert write(tier, 1) is Written.NEW
    assert read(tier, 1) == payload_of(1)


def test_a_record_under_another_ones_name_is_refused(tier: ValkeyTier, server: Server) -> None:
    write(tier, 1)
    write(tier, 2)
    of_one, of_two = (path_of(tier, name_of(number).key) for number in (1, 2))
    server.command("RENAME", of_one, of_two)
    with pytest.raises(CorruptRecordError, match="another key"):
        read(tier, 2)
    stranger = RecordIdentity(IDENTITY.fingerprint, (Shard(2, 4),))
    tier_of_stranger = build(server.url, stranger)
    write(tier_of_stranger, 3)
    server.command("RENAME", path_of(tier_of_stranger, name_of(3).key), path_of(tier, name_of(3).key))
    with pytest.raises(CorruptRecordError, match="another shard"):
        read(tier, 3)
    tier_of_stranger.close()


@pytest.mark.parametrize(
    "words", [("LPUSH", "x"), ("HSET", "x", "y"), ("SADD", "x"), ("XADD", "*", "x", "y")]
)
def test_something_that_is_no_string_is_refused_and_forgotten(
    tier: ValkeyTier, server: Server, words: tuple[str, ...]
) -> None:
    path = path_of(tier, name_of(1).key)
    server.command(words[0], path, *words[1:])
    assert tier.contains([name_of(1).key], PATIENCE_S) == [True]
    with pytest.raises(CorruptRecordError, match="something else"):
        read(tier, 1)
    assert write(tier, 1) is Written.NEW
    assert read(tier, 1) == payload_of(1)


# -- how much -----------------------------------------------------------------------------------


def refused(tier: ValkeyTier, number: int) -> TierError | None:
    try:
        write(tier, number, 1 << 20)
    except TierError as error:
        return error
    return None


def test_a_full_server_takes_no_writes_and_reads_go_on(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path / "full", "--maxmemory", "16mb", "--maxmemory-policy", "noeviction") as server,
        opened(server.url) as tier,
    ):
        kept = 0
        while (full := refused(tier, kept)) is None:
            kept += 1
            assert kept < 20
        assert isinstance(full, TierFullError)
        assert "allkeys-lru" in str(full)
        assert kept > 5
        assert all(read(tier, number, 1 << 20) == payload_of(number, 1 << 20) for number in range(kept))
        assert not tier.nodes[0].is_out()
        tier.discard([name_of(number).key for number in range(kept)])
        wait_until(lambda: server.command("DBSIZE") == 0)
        assert write(tier, 50, 64) is Written.NEW


def test_what_the_server_evicts_is_a_miss(tmp_path: Path) -> None:
    with (
        redis_server(
            tmp_path / "small", "--maxmemory", "16mb", "--maxmemory-policy", "allkeys-lru"
        ) as server,
        opened(server.url) as tier,
    ):
        payloads = {number: payload_of(number, 1 << 20) for number in range(24)}
        for number, payload in payloads.items():
            assert tier.write(name_of(number), memoryview(payload), PATIENCE_S) is Written.NEW
        found = {number: read(tier, number, 1 << 20) for number in payloads}
        there = {number for number, payload in found.items() if payload is not None}
        assert 5 < len(there) < 20
        assert all(found[number] == payloads[number] for number in there)
        assert "16.0 MiB used, maxmemory-policy allkeys-lru" in tier.ping(PATIENCE_S)


# -- connections --------------------------------------------------------------------------------


def test_there_are_no_more_connections_than_threads(tier: ValkeyTier, server: Server) -> None:
    write(tier, 1)
    together = threading.Barrier(6)

    def work() -> None:
        together.wait(PATIENCE_S)
        for _ in range(50):
            assert read(tier, 1) == payload_of(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (node,) = tier.nodes
    assert 1 <= node.connection_count <= 6
    tier.close()
    # Ours over the Unix socket is the only one that is left, once the server has noticed.
    wait_until(lambda: server.command("CLIENT", "LIST").count(b"id=") == 1)
    with pytest.raises(Exception, match="not used any more"):
        read(tier, 1)
