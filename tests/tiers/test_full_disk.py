"""A file system that is really full: serving goes on, what is kept stays right, others keep their room."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtide.errors import TierError, TierFullError
from kvtide.jobs import JobId
from kvtide.testing.tiers import DEADLINE_S, IDENTITY, name_of, payload_of
from kvtide.tiers import slabs
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.slabs import slot_bytes_of
from kvtide.transfer import tier_lane
from kvtide.transfer.lane import PartFate, TierDirection, TierOutcome, TierPart
from kvtide.transfer.tier_lane import LaneSettings, TierLane

MIB = 1 << 20
CHUNK_BYTES = 64 << 10
LIMIT_BYTES = 64 * MIB
RESERVE_BYTES = 3 * MIB
PAYLOAD = bytes(payload_of(3, CHUNK_BYTES))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.001)


def ended(lane: TierLane) -> TierOutcome:
    found: list[TierOutcome] = []
    until(lambda: bool(found.extend(lane.poll()) or found))
    (outcome,) = found
    return outcome


def free_bytes(folder: Path) -> int:
    status = slabs.os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def others_take(folder: Path, leaving_bytes: int) -> None:
    with (folder / "of others").open("ab") as file:
        while (room := free_bytes(folder) - leaving_bytes) > 0:
            file.write(bytes(min(room, MIB)))
            file.flush()


def payload_in(number: int) -> memoryview:
    return memoryview(number.to_bytes(8, "big") + PAYLOAD[8:])


def written(tier: DiskTier, numbers: range) -> int:
    """Write until the tier is full; how many were kept."""
    for kept, number in enumerate(numbers):
        try:
            tier.write(name_of(number), payload_in(number), DEADLINE_S)
        except TierFullError:
            return kept
    return len(numbers)


def served(tier: DiskTier, numbers: range) -> list[int]:
    found = []
    for number in numbers:
        payload = bytearray(CHUNK_BYTES)
        if tier.read_into(name_of(number).key, memoryview(payload), DEADLINE_S):
            assert payload == payload_in(number)
            found.append(number)
    return found


def opened(folder: Path) -> DiskTier:
    tier = DiskTier(folder / "tier", IDENTITY, LIMIT_BYTES, RESERVE_BYTES)
    tier.open()
    return tier


def test_the_reserve_stays_free_and_what_is_discarded_makes_room(small: Path) -> None:
    tier = opened(small)
    count = written(tier, range(1000))
    record_bytes = slot_bytes_of(CHUNK_BYTES)
    index_bytes = sum(path.stat().st_blocks * 512 for path in small.rglob("index*"))
    assert free_bytes(small) + index_bytes >= RESERVE_BYTES
    assert (16 * MIB - RESERVE_BYTES) * 0.85 < count * record_bytes <= 16 * MIB - RESERVE_BYTES
    assert tier.capacity_bytes == count * tier.record_bytes(CHUNK_BYTES)
    assert served(tier, range(1000)) == list(range(count))
    tier.discard([name_of(number).key for number in range(0, 40)])
    assert written(tier, range(2000, 3000)) == 40
    tier.close()
    again = opened(small)
    assert served(again, range(3000)) == [*range(40, count), *range(2000, 2040)]
    again.close()


def test_when_others_have_taken_everything_nothing_is_lost_or_wrong(small: Path) -> None:
    tier = opened(small)
    assert written(tier, range(30)) == 30
    others_take(small, leaving_bytes=0)
    kept = 30 + written(tier, range(30, 1000))
    assert kept < 100
    assert served(tier, range(1000)) == list(range(kept))
    tier.discard([name_of(number).key for number in range(10)])
    try:
        tier.begin_generation(trusted=True)
    except TierError:
        (small / "of others").unlink()
        tier.begin_generation(trusted=True)
    (small / "of others").unlink(missing_ok=True)
    assert served(tier, range(1000)) == []
    assert written(tier, range(20)) == 20
    tier.close()
    again = opened(small)
    assert served(again, range(1000)) == list(range(20))
    again.close()


def test_the_lane_says_so_once_and_goes_on_when_there_is_room(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slabs, "SHORT_REST_S", 0.05)
    monkeypatch.setattr(tier_lane, "FULL_REST_S", 0.05)
    monkeypatch.setattr(tier_lane, "ROOM_TOLD_S", 0.05)
    others_take(small, leaving_bytes=8 * MIB)
    lane = TierLane(
        DiskTier(small / "tier", IDENTITY, LIMIT_BYTES, RESERVE_BYTES),
        "disk",
        LaneSettings(deadline_s=DEADLINE_S),
    )

    def done(job: int, direction: TierDirection, numbers: range) -> list[int]:
        buffers = [payload_in(number if direction is TierDirection.WRITE else 0) for number in numbers]
        if direction is TierDirection.READ:
            buffers = [memoryview(bytearray(CHUNK_BYTES)) for _ in numbers]
        parts = [TierPart(name_of(number), one) for number, one in zip(numbers, buffers, strict=True)]
        assert lane.submit(JobId(job), direction, parts)
        fates = ended(lane).fates
        kept = [number for number, fate in zip(numbers, fates, strict=True) if fate == PartFate.DONE]
        if direction is TierDirection.READ:
            assert all(buffers[numbers.index(number)] == payload_in(number) for number in kept)
        return kept

    first = done(1, TierDirection.WRITE, range(300))
    assert 0 < len(first) * slot_bytes_of(CHUNK_BYTES) <= 8 * MIB - RESERVE_BYTES
    assert lane.state().capacity_bytes < 8 * MIB
    assert done(2, TierDirection.READ, range(300)) == first
    for turn in range(3):  # still full
        until(lambda: lane.state().takes_writes)
        assert done(3 + turn, TierDirection.WRITE, range(300, 310)) == []
    assert caplog.text.count("disk is full: writes are skipped until there is room") == 1
    (small / "of others").unlink()
    until(lambda: lane.state().takes_writes)
    assert done(9, TierDirection.WRITE, range(300, 310)) == list(range(300, 310))
    assert caplog.text.count("has room again") == 1
    assert caplog.text.count("left out") == 0
    assert lane.close(DEADLINE_S)
