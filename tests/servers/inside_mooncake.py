"""The Mooncake tier against a real store. Run in a network of its own, by ``test_mooncake_store``."""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import CorruptRecordError, TierError, TierFullError, TierUnavailableError
from kvtide.keys import OffloadKey, split_offload_key
from kvtide.testing.servers.mooncake import Store, mooncake_store
from kvtide.testing.servers.process import free_port
from kvtide.testing.tiers import DEADLINE_S, IDENTITY, PAYLOAD_BYTES, TierTests, name_of, payload_of
from kvtide.tiers.base import Tier, TierPlace, Written
from kvtide.tiers.mooncake import MooncakeTier
from kvtide.tiers.records import HEADER_BYTES, RecordIdentity, RecordRun

SHORT_S = 2.0
PATIENCE_S = 60.0
BIG = memoryview(payload_of(1) * 512)  # 4 MiB


def tier_at(
    address: str, identity: RecordIdentity = IDENTITY, writes: tuple[bool, ...] = (True,), **options: Any
) -> MooncakeTier:
    options = {"master": address, "buffer": "64MiB", **options}
    return MooncakeTier.build(TierPlace(identity, 0, 0, options, f"life-{time.monotonic_ns()}", writes))


@contextlib.contextmanager
def opened_at(address: str, **options: Any) -> Iterator[MooncakeTier]:
    """A tier of a model that no other test has."""
    tier = tier_at(address, RecordIdentity(os.urandom(32), IDENTITY.shards), **options)
    try:
        tier.open()
        yield tier
    finally:
        tier.close()


def run_of(numbers: range) -> RecordRun:
    hashes = tuple(split_offload_key(name_of(number).key)[0] for number in numbers)
    return RecordRun(0, numbers.start, hashes)


def object_of(tier: Tier, key: OffloadKey) -> str:
    assert isinstance(tier, MooncakeTier)
    return f"{tier.folder_of(key)}/{tier.file_of(split_offload_key(key)[0], key)}"


def child_pid(tier: MooncakeTier) -> int:
    return tier._client.child(time.monotonic() + DEADLINE_S).pid


def freeze(pid: int) -> None:
    """Stop a child of ours; when this returns, none of its threads does anything."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def recovered(call: Any) -> Any:
    """Make a call again until the store is back; the last error when it does not come back."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except (TierUnavailableError, TierFullError):  # full: storage has not mounted again
            if time.monotonic() > until_s:
                raise


class Stranger:
    """A client of the library's own, with nothing of ours: what it does is behind the tier's back."""

    def __init__(self, address: str) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        assert self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", address) == 0
        self._memory = ctypes.create_string_buffer(1 << 20)
        self._address = ctypes.addressof(self._memory)
        assert self._store.register_buffer(self._address, len(self._memory)) == 0

    def get(self, key: str) -> bytes:
        [size] = self._store.batch_get_into([key], [self._address], [len(self._memory)])
        assert size > 0, size
        return self._memory.raw[:size]

    def put(self, key: str, value: bytes) -> None:
        ctypes.memmove(self._address, value, len(value))
        assert self._store.batch_put_from([key], [self._address], [len(value)]) == [0]

    def remove(self, key: str) -> None:
        assert self._store.batch_remove([key], True) == [0]

    def close(self) -> None:
        self._store.unregister_buffer(self._address)
        self._store.close()


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with mooncake_store() as started:
        yield started


@pytest.fixture(scope="module")
def stranger(store: Store) -> Iterator[Stranger]:
    client = Stranger(store.address)
    yield client
    client.close()


@pytest.fixture
def own_store() -> Iterator[Store]:
    """One that a test may break."""
    with mooncake_store(memory_bytes=64 << 20, client_ttl_s=2) as started:
        yield started


class TestMooncakeTier(TierTests):
    @pytest.fixture(autouse=True)
    def _surroundings(self, stranger: Stranger) -> None:
        self.stranger = stranger

    @pytest.fixture
    def place(self, store: Store, tmp_path: Path) -> Any:
        # The store is one for all tests, so each test is a model of its own.
        return store.address, os.urandom(16)

    def make(self, place: Any, identity: RecordIdentity) -> Tier:
        address, salt = place
        return tier_at(address, RecordIdentity(identity.fingerprint[:16] + salt, identity.shards))

    def damage(self, tier: Tier, key: OffloadKey) -> None:
        name = object_of(tier, key)
        record = bytearray(self.stranger.get(name))
        record[HEADER_BYTES + 17] ^= 4
        self.stranger.remove(name)
        self.stranger.put(name, bytes(record))

    def lose(self, tier: Tier, key: OffloadKey) -> None:
        self.stranger.remove(object_of(tier, key))

    # -- runs ---------------------------------------------------------------------------------------

    def test_a_run_is_written_and_read_in_one_call_each(self, tier: MooncakeTier) -> None:
        run, payloads = run_of(range(20)), [memoryview(payload_of(number)) for number in range(20)]
        assert tier.run_chunks(PAYLOAD_BYTES) >= 20
        assert tier.write_run(run.between(3, 5), payloads[3:5], DEADLINE_S) == [Written.NEW] * 2
        ends = tier.write_run(run, payloads, DEADLINE_S)
        assert ends == [Written.NEW] * 3 + [Written.THERE_ALREADY] * 2 + [Written.NEW] * 15
        tier.discard([name_of(7).key])
        self.damage(tier, name_of(9).key)
        got = [bytearray(PAYLOAD_BYTES) for _ in range(20)]
        found = list(tier.read_run(run, [memoryview(one) for one in got], DEADLINE_S))
        assert isinstance(found.pop(9), CorruptRecordError)
        assert found == [True] * 7 + [False] + [True] * 11
        assert [got[at] for at in range(20) if at not in (7, 9)] == [
            payload_of(at) for at in range(20) if at not in (7, 9)
        ]
        assert list(tier.find(run, DEADLINE_S)) == [at not in (7, 9) for at in range(20)]

    def test_a_run_longer_than_the_buffer_is_written_and_read(self, place: Any) -> None:
        tier = self.opened(place)
        numbers, byte_count = range(20), 4 << 20  # 80 MiB through 64
        payload = payload_of(1) * (byte_count // PAYLOAD_BYTES)
        try:
            ends = tier.write_run(run_of(numbers), [memoryview(payload)] * 20, DEADLINE_S)
            assert ends == [Written.NEW] * 20
            got = [bytearray(byte_count) for _ in numbers]
            assert tier.read_run(run_of(numbers), [memoryview(one) for one in got], DEADLINE_S) == [True] * 20
            assert all(one == payload for one in got)
        finally:
            for number in numbers:
                self.lose(tier, name_of(number).key)
            tier.close()

    # -- what others put there ------------------------------------------------------------------------

    @pytest.mark.parametrize("byte_count", [1, HEADER_BYTES - 1, HEADER_BYTES, 1 << 20])
    def test_an_object_that_is_no_record_is_refused_and_forgotten(
        self, tier: MooncakeTier, byte_count: int
    ) -> None:
        self.stranger.put(object_of(tier, name_of(1).key), os.urandom(byte_count))
        with pytest.raises(CorruptRecordError):
            self._read(tier, 1)
        assert self._read(tier, 1) is None

    def test_a_rank_that_does_not_write_says_it_is_there(self, store: Store) -> None:
        tier = tier_at(store.address, writes=(False,))
        assert self._write(tier, 1) is Written.THERE_ALREADY
        assert tier.write_run(run_of(range(2)), [memoryview(payload_of(1))] * 2, DEADLINE_S) == (
            [Written.THERE_ALREADY] * 2
        )
        assert tier.contains([name_of(1).key], DEADLINE_S) == [False]
        tier.close()

    def test_hundreds_of_keys_are_forgotten_and_asked_about(self, tier: MooncakeTier) -> None:
        for number in (0, 599):
            self._write(tier, number)
        keys = [name_of(number).key for number in range(600)]
        tier.discard(keys[1:])
        assert tier.contains(keys, DEADLINE_S) == [True] + [False] * 599

    def test_what_somebody_reads_is_not_taken_from_under_him(self, tier: MooncakeTier) -> None:
        self._write(tier, 1)
        assert self._read(tier, 1) == payload_of(1)
        tier.discard([name_of(1).key])
        assert self._read(tier, 1) == payload_of(1)

    def test_a_payload_larger_than_the_buffer_names_the_setting(self, store: Store) -> None:
        tier = tier_at(store.address, buffer="1MiB")
        payload = memoryview(bytearray(1 << 20))
        with pytest.raises(TierUnavailableError, match=r"tiers\.options\.buffer"):
            tier.write(name_of(1), payload, DEADLINE_S)
        with pytest.raises(TierUnavailableError, match=r"tiers\.options\.buffer"):
            tier.read_into(name_of(1).key, payload, DEADLINE_S)
        tier.close()

    def test_a_ping_says_what_answers(self, tier: MooncakeTier, store: Store) -> None:
        assert f"master {store.address}, tcp" in tier.ping(DEADLINE_S)


# -- bad nights ---------------------------------------------------------------------------------------


def test_a_wrong_master_is_told_by_the_name_of_the_setting() -> None:
    tier = tier_at(f"127.0.0.1:{free_port()}")
    with pytest.raises(TierUnavailableError, match=r"tiers\.options\.master"):
        tier.open()
    tier.close()


def test_a_closed_tier_leaves_no_process_and_makes_no_call(store: Store) -> None:
    with opened_at(store.address) as tier:
        pid = child_pid(tier)
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(TierUnavailableError):
        tier.contains([name_of(1).key], SHORT_S)


def test_memory_that_this_client_lends_is_taken_back_when_it_closes() -> None:
    with mooncake_store(memory_bytes=16 << 20) as small:
        small.storage.kill()
        with opened_at(small.address, segment="64MiB") as tier:
            numbers = iter(range(100_000))  # where the dead one's memory is chosen, another is tried
            assert recovered(lambda: tier.write(name_of(next(numbers)), BIG, SHORT_S)) is Written.NEW
            pid = child_pid(tier)
        assert not Path(f"/proc/{pid}").exists()


def test_a_client_that_dies_is_replaced(store: Store) -> None:
    with opened_at(store.address) as tier:
        tier.write(name_of(1), memoryview(payload_of(1)), DEADLINE_S)
        former = child_pid(tier)
        os.kill(former, signal.SIGSEGV)
        payload = bytearray(PAYLOAD_BYTES)
        assert recovered(lambda: tier.read_into(name_of(1).key, memoryview(payload), DEADLINE_S))
        assert payload == payload_of(1)
        assert child_pid(tier) != former


def test_a_client_whose_parent_is_killed_ends(store: Store) -> None:
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from inside_mooncake import *\n"
        "tier = tier_at(sys.argv[2]); tier.open(); print(child_pid(tier), flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), store.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        watched = os.pidfd_open(pid)
        parent.kill()
    try:
        ended, _, _ = select.select([watched], [], [], PATIENCE_S)
    finally:
        os.close(watched)
    assert ended


def test_a_client_that_hangs_is_given_up_at_the_deadline_and_used_again(store: Store) -> None:
    with opened_at(store.address) as tier:
        freeze(child_pid(tier))
        # More calls than there are channels, and none of them waits for the client.
        for _ in range(20):
            with pytest.raises(TierUnavailableError):
                tier.write(name_of(1), memoryview(payload_of(1)), 0.05)
        os.kill(child_pid(tier), signal.SIGCONT)
        assert recovered(lambda: tier.write(name_of(2), memoryview(payload_of(2)), SHORT_S)) is Written.NEW
        payload = bytearray(PAYLOAD_BYTES)
        assert tier.read_into(name_of(2).key, memoryview(payload), DEADLINE_S)
        assert payload == payload_of(2)


def test_a_client_that_hangs_is_closed_all_the_same(store: Store) -> None:
    with opened_at(store.address) as tier:
        pid = child_pid(tier)
        freeze(pid)
        with pytest.raises(TierUnavailableError):
            tier.contains([name_of(1).key], 0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_a_full_store_says_so_and_serves_on() -> None:
    with mooncake_store(memory_bytes=64 << 20, lease_ms=600_000) as small, opened_at(small.address) as tier:

        def fill() -> None:
            for number in range(32):
                tier.write(name_of(number), BIG, DEADLINE_S)
                assert tier.contains([name_of(number).key], DEADLINE_S) == [True]  # a lease from now on

        with pytest.raises(TierFullError, match="NO_AVAILABLE_HANDLE"):
            fill()
        got = bytearray(BIG.nbytes)
        assert tier.read_into(name_of(0).key, memoryview(got), DEADLINE_S)
        assert got == BIG


def test_a_full_store_makes_room_and_what_is_evicted_is_a_miss() -> None:
    with mooncake_store(memory_bytes=64 << 20, lease_ms=500) as small, opened_at(small.address) as tier:
        for number in range(40):
            with contextlib.suppress(TierFullError):
                tier.write(name_of(number), BIG, DEADLINE_S)
        got = bytearray(BIG.nbytes)
        found = []
        for number in range(40):
            if tier.read_into(name_of(number).key, memoryview(got), DEADLINE_S):
                assert got == BIG
                found.append(number)
        assert 0 < len(found) <= 16
        assert max(found) > 16


def test_the_master_is_killed_under_load_and_comes_back(own_store: Store) -> None:
    stop, wrong, troubles = threading.Event(), [], []

    def work(tier: MooncakeTier, number: int) -> None:
        got = bytearray(PAYLOAD_BYTES)
        while not stop.is_set():
            number += 1
            try:
                tier.write(name_of(number), memoryview(payload_of(number % 50)), SHORT_S)
                found = tier.read_into(name_of(number).key, memoryview(got), SHORT_S)
            except TierError as error:
                troubles.append(error)
            else:
                if found and got != payload_of(number % 50):
                    wrong.append(number)

    with opened_at(own_store.address) as tier, ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(work, tier, 1000 * worker) for worker in range(1, 5)]
        try:
            recovered(lambda: tier.write(name_of(1), memoryview(payload_of(1)), SHORT_S))
            own_store.master.kill()
            with pytest.raises(TierUnavailableError):
                tier.contains([name_of(1).key], SHORT_S)
            own_store.master.start()
            recovered(lambda: tier.write(name_of(2), memoryview(payload_of(2)), SHORT_S))
        finally:
            stop.set()
        for worker in workers:
            worker.result(PATIENCE_S)
    assert any(isinstance(error, TierUnavailableError) for error in troubles)
    assert not wrong


def test_a_frozen_storage_process_costs_its_deadline_and_is_used_again(own_store: Store) -> None:
    with opened_at(own_store.address) as tier:
        assert tier.write(name_of(1), BIG, DEADLINE_S) is Written.NEW
        own_store.storage.freeze()
        got = memoryview(bytearray(BIG.nbytes))
        with pytest.raises(TierUnavailableError):
            tier.read_into(name_of(1).key, got, 0.5)
        with pytest.raises(TierUnavailableError):
            tier.write(name_of(2), BIG, DEADLINE_S)  # ends by the library's own patience
        own_store.storage.thaw()
        assert recovered(lambda: tier.write(name_of(2), BIG, SHORT_S)) is Written.NEW
        assert recovered(lambda: tier.read_into(name_of(2).key, got, SHORT_S))
        assert got == BIG


def test_a_storage_process_that_is_killed_and_started_again_holds_new_records(own_store: Store) -> None:
    with opened_at(own_store.address) as tier:
        tier.write(name_of(1), BIG, DEADLINE_S)
        own_store.storage.kill()
        got = memoryview(bytearray(BIG.nbytes))
        # A miss, once the master has noticed.
        assert recovered(lambda: tier.read_into(name_of(1).key, got, SHORT_S)) is False
        own_store.storage.start()
        numbers = iter(range(2, 100_000))
        assert recovered(lambda: tier.write(name_of(next(numbers)), BIG, SHORT_S)) is Written.NEW


def test_a_frozen_master_does_not_hold_this_process(own_store: Store) -> None:
    """Connecting holds the interpreter's lock of whichever process the library is in."""
    own_store.master.freeze()
    tier = tier_at(own_store.address)
    ticks, stop = [], threading.Event()

    def tick() -> None:
        while not stop.wait(0.005):
            ticks.append(time.monotonic())

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        with pytest.raises(TierUnavailableError):
            tier.contains([name_of(1).key], SHORT_S)
    finally:
        stop.set()
        ticker.join()
        own_store.master.thaw()
    # Of about 380; the library in this process would have left a handful.
    assert len(ticks) > 20
    assert recovered(lambda: tier.contains([name_of(1).key], SHORT_S)) == [False]
    tier.close()
