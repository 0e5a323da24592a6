"""What is written on to tiers below host memory, and when: behind a store, on second sight, before eviction.

Turns what the ladder prepares into hops; does not know how long they take. A tier that is slow, full or out
is skipped, and what was skipped is offered again when somebody asks for it.
"""

from kvtide.events import ChunkContent
from kvtide.geometry import KVGeometry, chunks_needed
from kvtide.jobs import Ids
from kvtide.keys import ChunkRun
from kvtide.manager.ladder import Ladder, PreparedWrite
from kvtide.manager.lower import Demotion
from kvtide.scheduler.below import BelowJobs, OpenHop
from kvtide.scheduler.state import RequestOffloadState


class Demotions:
    """Plans demotions into ``below``.

    Args:
        geometry: Groups and chunks.
        ladder: Which chunk is where.
        below: Open hops.
    """

    def __init__(self, geometry: KVGeometry, ladder: Ladder, below: BelowJobs) -> None:
        self._geometry = geometry
        self._ladder = ladder
        self._below = below

    def behind(
        self, state: RequestOffloadState, run: ChunkRun, slots: Ids, content: ChunkContent | None
    ) -> list[PreparedWrite]:
        """Say what is written on, as soon as it is in host memory, of a store that is being planned."""
        if state.request.lora_request is not None:
            # The engine's hashes know an adapter's name, not what is in it: nothing of it outlives us.
            self._ladder.keep_out(run.between(0, run.stop))
            return []
        return self._ladder.writes_behind(run, slots, state.context, content)

    def sighted(self, state: RequestOffloadState) -> None:
        """Look at what host memory holds of a request that is admitted for the first time."""
        if state.below.sighted or state.request.lora_request is not None:
            return
        state.below.sighted = True
        for demotion in (Demotion.SECOND_SIGHT, Demotion.AT_ONCE):
            if self._ladder.may_lack(demotion):
                for run in self._of_use(state):
                    self._demote(self._ladder.catch_up(run, demotion, state.context))

    def end_step(self) -> None:
        """Write what would leave host memory next, where a tier wants that."""
        self._demote(self._ladder.save_victims())

    def ended(self, hop: OpenHop, write: PreparedWrite) -> None:
        """Note what has been written."""
        self._ladder.end_write(write, hop.all_fates())

    # -- inside ---------------------------------------------------------------------------------

    def _of_use(self, state: RequestOffloadState) -> list[ChunkRun]:
        """What of a prompt a later request can use, of each group."""
        hashes, finest = state.request.block_hashes, self._geometry.finest
        whole = finest.run(hashes, 0, finest.hashed_chunks(len(hashes)))
        point = self._ladder.host.restore_point(whole) * finest.tokens_per_chunk
        runs = []
        for group in self._geometry.groups:
            needed = chunks_needed(group, 0, self._geometry.restore_point(point))
            if needed:
                runs.append(group.run(hashes, needed.start, needed.stop).frozen())
        return runs

    def _demote(self, writes: list[PreparedWrite]) -> None:
        if writes:
            self._below.demote(self._ladder.host.generation, writes)
