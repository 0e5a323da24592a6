"""A shared folder on a real shared file system: JuiceFS, seen through the mounts of two hosts."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import TierUnavailableError
from kvtide.jobs import JobId
from kvtide.keys import OffloadKey
from kvtide.testing.memory_tier import MemoryTier
from kvtide.testing.servers.juicefs import JuiceMount, JuiceVolume, juicefs_volume
from kvtide.testing.tiers import DEADLINE_S, IDENTITY, PAYLOAD_BYTES, TierTests, name_of, payload_of
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.breaker import Breaker, BreakerState
from kvtide.tiers.directory import DirectoryTier
from kvtide.tiers.directory_cleaner import Cleaner
from kvtide.tiers.directory_lease import STALE_S, Lease, last_count
from kvtide.tiers.records import HEADER_BYTES, RecordIdentity
from kvtide.transfer.lane import PartFate, TierDirection, TierOutcome, TierPart
from kvtide.transfer.tier_lane import LaneSettings, TierLane

READ, WRITE = TierDirection.READ, TierDirection.WRITE
DONE, FAILED = PartFate.DONE, PartFate.FAILED
PATIENCE_S = 60.0
WORKER = Path(__file__).parents[1] / "tiers/directory_worker.py"


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JuiceVolume]:
    with juicefs_volume(tmp_path_factory.mktemp("juicefs")) as volume:
        yield volume


@pytest.fixture(scope="module")
def here(volume: JuiceVolume, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JuiceMount]:
    with volume.mounted(tmp_path_factory.mktemp("here")) as mount:
        yield mount


@pytest.fixture(scope="module")
def there(volume: JuiceVolume, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JuiceMount]:
    with volume.mounted(tmp_path_factory.mktemp("there")) as mount:
        yield mount


def tier_at(path: Path, identity: RecordIdentity = IDENTITY, limit_bytes: int = 0) -> DirectoryTier:
    return DirectoryTier.build(TierPlace(identity, 0, limit_bytes, {"path": str(path)}))


def opened(path: Path) -> DirectoryTier:
    tier = tier_at(path)
    tier.open()
    return tier


def write(tier: DirectoryTier, number: int) -> Written:
    return tier.write(name_of(number), memoryview(payload_of(number)), DEADLINE_S)


def read(tier: DirectoryTier, number: int) -> bytes | None:
    payload = bytearray(PAYLOAD_BYTES)
    found = tier.read_into(name_of(number).key, memoryview(payload), DEADLINE_S)
    return bytes(payload) if found else None


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.005)


class TestDirectoryTierOnJuiceFS(TierTests):
    @pytest.fixture
    def place(self, here: JuiceMount) -> Path:
        return here.path / f"tier-{os.urandom(4).hex()}"

    def make(self, place: Any, identity: RecordIdentity) -> DirectoryTier:
        return tier_at(place, identity, 1 << 30)

    def damage(self, tier: Any, key: OffloadKey) -> None:
        with open(tier._path_of(key), "r+b") as file:
            file.seek(HEADER_BYTES + 777)
            file.write(b"\xff\x00\xff")

    def lose(self, tier: Any, key: OffloadKey) -> None:
        os.unlink(tier._path_of(key))


def test_two_hosts_see_at_once_what_the_other_wrote(here: JuiceMount, there: JuiceMount) -> None:
    one, other = opened(here.path / "two"), opened(there.path / "two")
    keys = [name_of(number).key for number in range(4)]
    assert other.contains(keys, DEADLINE_S) == [False] * 4
    for number in range(4):
        assert write(one if number % 2 else other, number) is Written.NEW
    for tier in (one, other):
        assert tier.contains(keys, DEADLINE_S) == [True] * 4
        assert [read(tier, number) for number in range(4)] == [payload_of(number) for number in range(4)]
    assert write(other, 1) is Written.THERE_ALREADY
    one.discard(keys[:1])
    # A host remembers names for a second: until then it may find nothing behind one, which is a miss.
    until(lambda: read(other, 0) is None)
    until(lambda: write(other, 0) is Written.NEW)
    assert "juicefs" in one.ping(DEADLINE_S)


def test_of_two_hosts_one_removes_and_both_know_what_was_counted(here: JuiceMount, there: JuiceMount) -> None:
    one, other = opened(here.path / "lease"), opened(there.path / "lease")
    for number in range(10):
        write(one, number)
        used_ns = int((time.time() - 1000 * (20 - number)) * 1e9)
        os.utime(one._path_of(name_of(number).key), ns=(used_ns, used_ns))
    assert read(other, 0) == payload_of(0)  # so that it is the youngest
    each_bytes = 3 * 4096
    now_s = [0.0]
    late = Lease(str(there.path / "lease"), lambda: now_s[0])
    first = Lease(str(here.path / "lease"))
    # What the other host knows of a file's times may be a second old.
    until(lambda: os.stat(one._path_of(name_of(0).key)).st_atime > time.time() - 500)
    assert Cleaner(str(here.path / "lease"), 8 * each_bytes, first).round()
    assert not late.hold()
    for path in (here.path, there.path):
        assert last_count(str(path / "lease")) == late.count
    assert late.count.used_bytes == 7 * each_bytes
    left = one.contains([name_of(number).key for number in range(10)], DEADLINE_S)
    assert left == [True] + [False] * 3 + [True] * 6
    now_s[0] += STALE_S
    assert late.hold()
    assert not first.hold()


@pytest.mark.parametrize("how", [[], ["--replaces"]], ids=["renames that spare", "renames that replace"])
def test_processes_on_two_hosts_never_see_a_wrong_byte(
    here: JuiceMount, there: JuiceMount, how: list[str]
) -> None:
    name = f"stress-{os.urandom(4).hex()}"
    workers = [
        subprocess.Popen(
            [sys.executable, WORKER, mount.path / name, str(seed), "250", "--count", "4", *how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for seed, mount in enumerate((here, there, here, there))
    ]
    try:
        told = [worker.communicate(timeout=180.0) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, told, strict=True):
        assert worker.returncode == 0, errors.decode()
    done = sum((Counter(json.loads(output)) for output, _ in told), Counter[str]())
    assert all(done[what] > 5 for what in ("hit", "miss", "new", "there already", "cleaned")), done


# -- a bad night ----------------------------------------------------------------------------------


def outcome_of(lane: TierLane, job_id: int) -> TierOutcome:
    found: dict[int, TierOutcome] = {}
    until(lambda: job_id in found or bool(found.update({one.job_id: one for one in lane.poll()})))
    return found[job_id]


def parts(*numbers: int, full: bool = False) -> list[TierPart]:
    return [
        TierPart(name_of(number), memoryview(payload_of(number) if full else bytearray(PAYLOAD_BYTES)))
        for number in numbers
    ]


def test_a_frozen_file_system_is_late_then_out_then_back_and_holds_up_nobody(
    volume: JuiceVolume, tmp_path: Path
) -> None:
    settings = LaneSettings(thread_count=2, deadline_s=0.5, late_limit=2, wait_limit_s=2.0)
    with volume.mounted(tmp_path / "frozen") as mount:
        lane = TierLane(tier_at(mount.path / "night"), "night", settings, Breaker(3, 0.1, 0.1))
        beside = TierLane(MemoryTier(IDENTITY), "beside", settings)
        try:
            until(lambda: lane.state().opened and beside.state().opened)
            lane.submit(JobId(1), WRITE, parts(0, 1, 2, full=True))
            assert outcome_of(lane, 1).fates == bytes([DONE] * 3)

            mount.freeze()
            lane.submit(JobId(2), READ, parts(0, 1, 2))
            lane.submit(JobId(3), WRITE, parts(3, 4, full=True))
            until(lambda: lane.state().late_count > settings.late_limit)
            assert lane.state().state is BreakerState.OPEN
            assert 2 in lane.take_late()
            # Others go on, and what comes now fails at once.
            beside.submit(JobId(4), WRITE, parts(5, full=True))
            assert outcome_of(beside, 4).fates == bytes([DONE])
            lane.submit(JobId(5), READ, parts(0))
            assert outcome_of(lane, 5).fates == bytes([FAILED])

            mount.thaw()
            until(lambda: lane.state().late_count == 0)
            job_id, into = 10, parts(0)

            def is_back() -> bool:
                nonlocal job_id
                job_id += 1
                lane.submit(JobId(job_id), READ, into)
                return outcome_of(lane, job_id).fates == bytes([DONE])

            until(is_back)
            assert bytes(into[0].payload) == bytes(payload_of(0))
            until(lambda: lane.state().state is BreakerState.CLOSED)
        finally:
            mount.thaw()
            assert lane.close(PATIENCE_S)
            assert beside.close(PATIENCE_S)


def test_a_tier_can_be_closed_while_what_counts_its_records_waits_for_a_frozen_file_system(
    volume: JuiceVolume, tmp_path: Path
) -> None:
    with volume.mounted(tmp_path / "frozen") as mount:
        (mount.path / "counted").mkdir()
        cleaner = Cleaner(str(mount.path / "counted"), 1 << 30)
        mount.freeze()
        try:
            cleaner.start()
            assert not cleaner.close(0.2)
        finally:
            mount.thaw()
        assert cleaner.close(PATIENCE_S)


def test_a_file_system_that_has_gone_is_unavailable_and_one_that_is_mounted_anew_is_as_good(
    volume: JuiceVolume, tmp_path: Path
) -> None:
    point = tmp_path / "gone"
    with volume.mounted(point) as mount:
        tier = opened(point / "tier")
        write(tier, 1)
        mount.kill()
        for call in (lambda: read(tier, 1), lambda: write(tier, 2), lambda: tier.ping(DEADLINE_S)):
            with pytest.raises(TierUnavailableError, match="mounted"):
                call()
        with pytest.raises(TierUnavailableError):
            tier.contains([name_of(1).key], DEADLINE_S)
        tier.discard([name_of(1).key])
    # Unmounted: nothing is written to the host's own disk.
    assert read(tier, 1) is None
    with pytest.raises(TierUnavailableError, match="is the file system mounted"):
        write(tier, 2)
    assert list(point.iterdir()) == []
    with volume.mounted(point):
        assert read(tier, 1) == payload_of(1)
        assert write(tier, 2) is Written.NEW
        assert read(tier, 2) == payload_of(2)
    tier.close()
