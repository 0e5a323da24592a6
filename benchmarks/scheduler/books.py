"""kvtide's primitives, timed: a prompt is stored, found, read and touched, chunk by chunk or as a whole.

Calls the manager in the order of the scheduler half; every copy succeeds. Knows hashes and the primitives;
does not know how the books are kept, nor who judges the times.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.scheduler.calls import Calls
from kvtide.jobs import CPULoadStoreSpec, ReqContext
from kvtide.keys import ChunkRun
from kvtide.manager.base import LookupResult, PrepareStoreOutput
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.metrics import MetricsDelta
from kvtide.policies import LRUPolicy

CONTEXT = ReqContext("benchmark")


def run_of(hashes: Sequence[bytes], stop: int | None = None, start: int = 0) -> ChunkRun:
    """View a prompt's first chunks: one block a chunk, one group."""
    return ChunkRun(hashes, 0, 1, start, len(hashes) if stop is None else stop)


class Books:
    """One manager with LRU.

    Attributes:
        manager: As kvtide builds it.
        calls: All of them, and which were slow.
    """

    def __init__(self, capacity: int) -> None:
        self._metrics = MetricsDelta()
        self.manager = CPUOffloadingManager(LRUPolicy(), metrics=self._metrics)
        self.calls = Calls()
        self.manager.grow(capacity)

    @property
    def evicted_chunks(self) -> int:
        """Count the chunks that have left so far, by the metric of that name."""
        return int(self._metrics.data.get("evicted_chunks|", 0))

    def end_step(self) -> None:
        """Do what the scheduler half does once a step."""
        if hasattr(self.manager, "keep_room"):
            self._timed("keep_room")

    def lookup(self, run: ChunkRun) -> LookupResult:
        """Ask how much of a prompt is ready."""
        return self._timed("lookup", run, CONTEXT)

    def touch(self, run: ChunkRun) -> None:
        """Refresh a prompt."""
        self._timed("touch", run, CONTEXT)

    def begin_load(self, run: ChunkRun) -> CPULoadStoreSpec:
        """Pin what is ready."""
        return self._timed("prepare_load", run, CONTEXT)

    def end_load(self, run: ChunkRun, spec: CPULoadStoreSpec) -> None:
        """Unpin it."""
        self._timed("complete_load", run, spec, CONTEXT)

    def begin_store(self, run: ChunkRun) -> PrepareStoreOutput:
        """Offer a prompt from its beginning, as the scheduler half does: what is known is refreshed."""
        self.touch(run)
        return self._timed("prepare_store", run, CONTEXT)

    def end_store(self, output: PrepareStoreOutput) -> None:
        """Make it ready."""
        if output.keys_to_store:
            self._timed("complete_store", output.keys_to_store, output.store_spec, CONTEXT, True)

    def store(self, run: ChunkRun) -> int:
        """Store a prompt; returns how many of its chunks were copied."""
        output = self.begin_store(run)
        self.end_store(output)
        return len(output.keys_to_store)

    def load(self, run: ChunkRun) -> None:
        """Look a prompt up, refresh it and read what is ready."""
        ready = self.lookup(run).ready_count
        self.touch(run)
        if ready:
            found = run.between(run.start, run.start + ready)
            self.end_load(found, self.begin_load(found))

    def _timed(self, name: str, *args: Any) -> Any:
        return self.calls.timed(name, getattr(self.manager, name), *args)[0]
