"""kvtide's tiers behind their production lane; of the disk tier, where in its files the chunks lie.

The place of a chunk is read from the records themselves, not from the tier's books: the yardstick reads the
same bytes of the same files, and knows nothing of the tier.
"""

import mmap
import os
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from benchmarks.storage.pages import Pages
from benchmarks.storage.plain import opened
from kvtide.errors import CorruptRecordError
from kvtide.jobs import JobId
from kvtide.keys import OffloadKey, make_offload_key
from kvtide.tiers.base import Tier
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.records import ChunkName, RecordIdentity, Shard, unpack
from kvtide.tiers.slabs import ALIGNMENT, aligned
from kvtide.transfer.lane import PartFate, TierDirection, TierOutcome, TierPart
from kvtide.transfer.tier_lane import LaneSettings, TierLane

IDENTITY = RecordIdentity(bytes(range(32)), (Shard(),))
CALL_LIMIT_S = 120.0
POLL_S = 0.0005


def names_of(count: int, prompt: int = 0) -> list[ChunkName]:
    """Name the chunks of one prompt; another prompt shares none of them.

    The first two bytes of a hash, by which some tiers choose a folder, are the same in every prompt: folders
    stand there before, as they do where there is much.
    """
    digests = [sha256(f"{prompt} {index}".encode()).digest() for index in range(count)]
    hashes = [sha256(f"{index}".encode()).digest()[:2] + one[2:] for index, one in enumerate(digests)]
    parents: list[bytes | None] = [None, *hashes]
    return [
        ChunkName(make_offload_key(one, 0), parent, index)
        for index, (one, parent) in enumerate(zip(hashes, parents, strict=False))
    ]


class OurLane:
    """A tier behind its production lane.

    Args:
        tier: Owned from now on.
        name: Of it.
        settings: Of the lane.
        poll_s: Between looks whether a job has ended; each takes the lane's lock, as an engine's does, once
            in a step of many milliseconds.

    Raises:
        RuntimeError: The tier did not open.
    """

    def __init__(self, tier: Tier, name: str, settings: LaneSettings, poll_s: float = POLL_S) -> None:
        self._lane = TierLane(tier, name, settings)
        self._poll_s = poll_s
        self._job_count = 0
        give_up_s = time.monotonic() + CALL_LIMIT_S
        while not self._lane.state().opened:
            if time.monotonic() > give_up_s:
                self.close()
                raise RuntimeError("the tier did not open")
            time.sleep(POLL_S)

    def write(self, names: Sequence[ChunkName], pages: Pages) -> TierOutcome:
        """Write every chunk of ``pages``, as one job."""
        return self._run(TierDirection.WRITE, names, pages)

    def read(self, names: Sequence[ChunkName], pages: Pages) -> TierOutcome:
        """Read every chunk, as one job: what one request promotes."""
        return self._run(TierDirection.READ, names, pages)

    def close(self) -> None:
        """End the lane and the tier."""
        self._lane.close(CALL_LIMIT_S)

    def _run(self, direction: TierDirection, names: Sequence[ChunkName], pages: Pages) -> TierOutcome:
        parts = [TierPart(name, pages.chunk(index)) for index, name in enumerate(names)]
        self._job_count += 1
        if not self._lane.submit(JobId(self._job_count), direction, parts):
            raise RuntimeError("the lane did not take the job")
        give_up_s = time.monotonic() + CALL_LIMIT_S
        while not (ended := self._lane.poll()):
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"no answer of the lane within {CALL_LIMIT_S:.0f} s")
            time.sleep(self._poll_s)
        if any(fate != PartFate.DONE for fate in ended[0].fates):
            raise RuntimeError(f"chunks failed: {dict(ended[0].trouble)}")
        return ended[0]


class OurTier:
    """One disk tier with its lane.

    Args:
        folder: Of the tier; made.
        pages: What is read into and written from.
        thread_count: Of the lane.
    """

    def __init__(self, folder: Path, pages: Pages, thread_count: int) -> None:
        self._folder = folder
        self._pages = pages
        slot_bytes = ALIGNMENT + aligned(pages.chunk_bytes)
        room_bytes = 2 * pages.chunk_count * slot_bytes
        tier = DiskTier(folder, IDENTITY, room_bytes)
        # What is to be read is written in one go, which no production queue would take.
        settings = LaneSettings(thread_count, queue_bytes=len(pages.view), deadline_s=CALL_LIMIT_S)
        self._lane = OurLane(tier, "disk", settings)
        self.names = names_of(pages.chunk_count)

    def write(self) -> TierOutcome:
        """Write every chunk, as one job."""
        return self._lane.write(self.names, self._pages)

    def read(self) -> TierOutcome:
        """Read every chunk, as one job: what one request promotes."""
        return self._lane.read(self.names, self._pages)

    def close(self) -> None:
        """End the lane and the tier."""
        self._lane.close()

    def places(self, direct: bool) -> tuple[Path, list[int]]:
        """Find the file that holds the chunks, and at which offset each one's payload begins."""
        (path,) = self._folder.rglob("slab-*")
        slot_bytes = ALIGNMENT + aligned(self._pages.chunk_bytes)
        found: dict[OffloadKey, int] = {}
        descriptor = opened(path, direct)
        head = memoryview(mmap.mmap(-1, ALIGNMENT))
        try:
            for offset in range(0, os.fstat(descriptor).st_size, slot_bytes):
                os.preadv(descriptor, [head], offset)
                try:
                    found[unpack(head).name.key] = offset + ALIGNMENT
                except CorruptRecordError:
                    continue  # a slot that was never used
        finally:
            os.close(descriptor)
        return path, [found[name.key] for name in self.names]
