"""Blocks that are kept out of the engine's hands by a reference in its own pool.

A fence lets the engine hand a block on and has the next step wait for the copy. Where that comes too late a
block is held: the engine counts it as used, and gives it to nobody. Knows block ids and the engine's pool.
"""

from typing import Any

from kvtide.jobs import JobId
from kvtide.scheduler.engine import BlockPool
from kvtide.scheduler.fences import NULL_BLOCK
from kvtide.scheduler.open_jobs import TransferJobStatus


class BlockHolds:
    """Who holds which blocks: open jobs.

    Attributes:
        pool: The engine's; None before it was bound, when nothing can be held.
    """

    def __init__(self) -> None:
        self._held: dict[JobId, list[Any]] = {}
        self.pool: BlockPool | None = None

    def take(self, status: TransferJobStatus) -> bool:
        """Hold the device blocks of a job until ``give_back``; False when nothing can be held."""
        if self.pool is None:
            return False
        device = status.job.device_spec()
        block_ids = sorted(set(device.block_ids) - {NULL_BLOCK}) if device is not None else []
        blocks = [self.pool.blocks[block_id] for block_id in block_ids]
        self.pool.touch(blocks)
        self._held[status.job.job_id] = blocks
        return True

    def give_back(self, job_id: JobId) -> None:
        """Let go of what a job holds, if anything: the blocks are the engine's again."""
        blocks = self._held.pop(job_id, None)
        if blocks is not None and self.pool is not None:
            self.pool.free_blocks(blocks)

    def goes_by(self, block_id: int, block_hash: bytes) -> bool:
        """Whether the engine still names a block by this hash; True when nobody can tell."""
        if self.pool is None:
            return True
        name = self.pool.blocks[block_id].block_hash  # and the group behind it
        return name is not None and bytes(name).startswith(block_hash)

    @property
    def free_count(self) -> int | None:
        """Blocks of the engine that no job holds; None before its pool was bound."""
        if self.pool is None:
            return None
        return len(self.pool.blocks) - 1 - sum(len(blocks) for blocks in self._held.values())

    def job_ids(self) -> set[JobId]:
        """Name the jobs that hold blocks."""
        return set(self._held)
