"""Which device blocks a copy still touches.

Knows block ids and job ids. Does not know requests, keys or tiers: whoever plans a job opens its
fence, whoever learns the job's end closes it, and anyone may ask "may these blocks be reused?".
"""

from collections.abc import Sequence

import numpy as np

from kvtide.jobs import Ids, JobId, ids

NULL_BLOCK = 0
"""vLLM's placeholder, never written and never reused."""

FEW = 32  # below it a loop is faster than an array


class Fences:
    """A copy owns its device blocks from planning to the last byte.

    The same block may be listed twice in a job, and several stores may read one block.
    """

    def __init__(self) -> None:
        self._blocks_of: dict[JobId, Ids] = {}
        self._jobs_at = np.zeros(1024, dtype=np.int32)  # open jobs, per block
        self._one = self._jobs_at.data  # the same, for one block at a time

    def open(self, job_id: JobId, block_ids: Ids) -> None:
        """Fence the blocks of a job that has been planned."""
        self._blocks_of[job_id] = block_ids
        self._count(block_ids, 1)

    def close(self, job_id: JobId) -> None:
        """Drop the fence of a job that has ended; closing it twice has no effect."""
        self._count(self._blocks_of.pop(job_id, ids(())), -1)

    def conflicts(self, block_ids: Sequence[int]) -> set[JobId]:
        """Name the open jobs that touch any of these blocks."""
        if not self._blocks_of or not block_ids:
            return set()
        known = len(self._one)
        if len(block_ids) < FEW:
            touched = [block for block in block_ids if block < known and self._one[block]]
        else:
            asked = np.array(block_ids, dtype=np.int32)
            asked = asked[asked < known]
            touched = asked[self._jobs_at[asked] > 0].tolist()
        found: set[JobId] = set()
        for block in touched:
            if block != NULL_BLOCK:
                found |= {job_id for job_id, blocks in self._blocks_of.items() if block in blocks}
        return found

    def job_ids(self) -> set[JobId]:
        """Name the jobs that have a fence."""
        return set(self._blocks_of)

    def _count(self, block_ids: Ids, by: int) -> None:
        if len(block_ids) < FEW:
            highest = max(block_ids, default=0)
        else:
            # The index type that numpy uses itself: with another one each access converts it anew.
            blocks = np.frombuffer(block_ids, dtype=np.int32).astype(np.intp)
            highest = int(blocks.max())
        if highest >= len(self._one):
            self._jobs_at = np.concatenate((self._jobs_at, np.zeros(2 * highest, dtype=np.int32)))
            self._one = self._jobs_at.data
        if len(block_ids) < FEW:
            for block in set(block_ids):
                self._one[block] += by
        else:
            # A block that is listed twice is counted once, here and when the fence is closed.
            self._jobs_at[blocks] += by
