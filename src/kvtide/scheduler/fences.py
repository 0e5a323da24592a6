"""Which device blocks a copy still touches.

Knows block ids and job ids. Does not know requests, keys or tiers: whoever plans a job opens its
fence, whoever learns the job's end closes it, and anyone may ask "may these blocks be reused?".
"""

from collections.abc import Iterable, Sequence

from kvtide.jobs import JobId


class Fences:
    """A copy owns its device blocks from planning to the last byte.

    The same block may be listed twice in a job, and several stores may read one block.
    """

    NULL_BLOCK = 0  # vLLM's placeholder, never written and never reused

    def __init__(self) -> None:
        self._jobs_at: dict[int, set[JobId]] = {}
        self._blocks_of: dict[JobId, Sequence[int]] = {}

    def open(self, job_id: JobId, block_ids: Sequence[int]) -> None:
        """Fence the blocks of a job that has been planned."""
        self._blocks_of[job_id] = block_ids
        for block_id in block_ids:
            self._jobs_at.setdefault(block_id, set()).add(job_id)

    def close(self, job_id: JobId) -> None:
        """Drop the fence of a job that has ended; closing it twice has no effect."""
        for block_id in self._blocks_of.pop(job_id, ()):
            jobs = self._jobs_at.get(block_id)
            if jobs is not None:
                jobs.discard(job_id)
                if not jobs:
                    del self._jobs_at[block_id]

    def conflicts(self, block_ids: Iterable[int]) -> set[JobId]:
        """Name the open jobs that touch any of these blocks."""
        if not self._jobs_at:
            return set()
        found: set[JobId] = set()
        for block_id in block_ids:
            if block_id != self.NULL_BLOCK and (jobs := self._jobs_at.get(block_id)):
                found |= jobs
        return found

    def job_ids(self) -> set[JobId]:
        """Name the jobs that have a fence."""
        return set(self._blocks_of)
