"""What ranks do on a day with tiers below host memory: a slot or a record holds the name of what it was.

They do what they are told when they are made to, well or not, and answer. Each copy checks what it finds.
"""

from collections.abc import Sequence

from kvtide.jobs import (
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    Hop,
    HopResult,
    JobId,
    LoadStoreSpec,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    PartFate,
    StorageLoadStoreSpec,
    TransferJob,
)
from kvtide.keys import OffloadKey, make_offload_key, split_offload_key
from kvtide.testing.ladder_half import LadderHalf, Rank, RankHop


class LadderRanks(LadderHalf):
    """Ranks that work."""

    # -- what the workers do ----------------------------------------------------------------------

    def _note_told(self, told: OffloadingConnectorMetadata) -> None:
        for discard in told.discards:
            self.naive.forgets(discard.tier, discard.keys)
            for rank in self.ranks:
                lists = rank.inventory.get(discard.tier)
                if lists is not None and self.chance.random() < 0.5:
                    # The tier may have forgotten before it tells, or have listed it already.
                    rank.inventory[discard.tier] = [key for key in lists if key not in discard.keys]
        for rank in self.ranks:
            self._begin_generation(rank, told)
            for hop in rank.hops:
                hop.cancelled = hop.cancelled or hop.job.job_id in told.jobs_to_cancel
        for job in sorted(told.jobs, key=lambda one: one.job_id):
            self._note_job(job)

    def _begin_generation(self, rank: Rank, told: OffloadingConnectorMetadata) -> None:
        if told.generation == rank.generation:
            return
        rank.generation = told.generation
        if told.keeps_tiers:
            for tier, _ in enumerate(self.tiers, 1):
                rank.inventory[tier] = self._listed(self.naive.tiers[tier - 1].held[rank.index])
            return
        self.naive.rank_reset(rank.index)
        rank.inventory = {}
        for hop in rank.hops:
            hop.void = True

    def _note_job(self, job: TransferJob) -> None:
        direction = job.direction
        self.seen[direction.value] += 1
        for rank in self.ranks:
            if direction in (Direction.STORE, Direction.LOAD):
                hop = job.hops[0] if job.hops else None
                if hop is None:
                    self._say(rank, job.job_id, 0, HopResult.FAILED)
                    self._loaded(rank, job, success=False)
                    continue
                rank.copies.append(RankHop(job, 0, hop))
            elif job.generation == rank.generation:
                rank.hops.append(RankHop(job, 0, job.hops[0]))
            else:
                self._say(rank, job.job_id, 0, HopResult.FAILED)
        void = job.generation != self.host.generation
        for index, hop in enumerate(job.hops):
            if isinstance(hop.target, StorageLoadStoreSpec):
                keys = self.naive.names(hop.target)
                assert not self._private(keys), f"{job}: an adapter's chunks are written to a tier"
                self.naive.planned((job.job_id, index), hop.target, void)
                self.seen["written behind"] += direction is Direction.STORE
            if isinstance(hop.source, StorageLoadStoreSpec):
                self.naive.names(hop.source)
                self._below[job.job_id] = (job, set(self.naive.ranks))

    def _private(self, keys: Sequence[OffloadKey]) -> bool:
        names = {split_offload_key(key)[0] for key in keys}
        return any(
            request.lora_request and names & set(request.block_hashes) for request in self._requests.values()
        )

    def _end_any(self) -> None:
        rank = self.chance.choice(self.ranks)
        if open_hops := [*rank.copies, *rank.hops]:
            self._end(rank, self.chance.choice(open_hops))

    def _end(self, rank: Rank, hop: RankHop) -> None:
        if hop in rank.copies:
            self._end_copy(rank, hop)
        else:
            self._end_hop(rank, hop)

    def _end_copy(self, rank: Rank, ended: RankHop) -> None:
        rank.copies.remove(ended)
        job, success = ended.job, self.chance.random() >= self._trouble / 2
        success = success and not (job.direction is Direction.LOAD and job.generation != rank.generation)
        if success:
            self._copy(rank, ended.hop, job)
        self._say(rank, job.job_id, 0, HopResult.DONE if success else HopResult.FAILED)
        if job.direction is Direction.LOAD:
            self._loaded(rank, job, success)
        for index, hop in enumerate(job.hops[1:], 1):
            if success and job.generation == rank.generation:
                rank.hops.append(RankHop(job, index, hop))
            else:
                self._say(rank, job.job_id, index, HopResult.FAILED)

    def _copy(self, rank: Rank, hop: Hop, job: TransferJob) -> None:
        ends = (hop.source, hop.target) if job.direction is Direction.STORE else (hop.target, hop.source)
        device, host = ends
        assert isinstance(device, GPULoadStoreSpec)
        assert isinstance(host, CPULoadStoreSpec)
        block_at = slot_at = 0
        for group, size, places, first in zip(
            self.geometry.groups, device.group_sizes, host.group_sizes, device.block_indices, strict=True
        ):
            slots = host.slots[slot_at : slot_at + places]
            for offset, block in enumerate(device.block_ids[block_at : block_at + size], first):
                if (offset + 1) % group.blocks_per_chunk:
                    continue
                slot = slots[offset // group.blocks_per_chunk - first // group.blocks_per_chunk]
                if job.direction is Direction.STORE:
                    rank.slots[slot] = self._blocks[rank.index, block]
                else:
                    request = self._requests[job.request_id]
                    end = (offset + 1) * group.tokens_per_block
                    wanted = make_offload_key(request.block_hashes[end - 1], group.group_index)
                    assert rank.slots.get(slot) == wanted, f"{job} loads what is not its own"
            block_at, slot_at = block_at + size, slot_at + places

    def _loaded(self, rank: Rank, job: TransferJob, success: bool) -> None:
        if any(hop.job is job for other in self.ranks for hop in other.copies):
            return
        request = self._loading.pop(job.request_id, None)
        if request is not None:
            self._running.append(request)

    def _end_hop(self, rank: Rank, ended: RankHop) -> None:
        """End a hop of a tier, or say that it is late."""
        chance = self.chance
        if not ended.late and chance.random() < self._trouble / 2:
            ended.late = True
            self._say(rank, ended.job.job_id, ended.index, HopResult.LATE)
            self.seen["late"] += 1
            return
        rank.hops.remove(ended)
        if isinstance(ended.hop.target, StorageLoadStoreSpec):
            fates = self._written(rank, ended, ended.hop.target, ended.hop.source)
        else:
            assert isinstance(ended.hop.source, StorageLoadStoreSpec)
            fates = self._read(rank, ended, ended.hop.source, ended.hop.target)
        done = all(fate is PartFate.DONE for fate in fates)
        self._say(rank, ended.job.job_id, ended.index, HopResult.DONE if done else HopResult.FAILED)
        if not done:
            rank.answers.fates[ended.job.job_id, ended.index] = {rank.index: bytes(fates)}

    def _written(
        self, rank: Rank, ended: RankHop, spec: StorageLoadStoreSpec, host: LoadStoreSpec
    ) -> list[PartFate]:
        assert isinstance(host, CPULoadStoreSpec)
        state, fates = self.naive.tiers[spec.tier - 1], []
        for key, slot in zip(self.naive.names(spec), host.slots, strict=True):
            well = self.chance.random() >= self._trouble and not ended.void
            written = well or (self.chance.random() < 0.3 and not ended.void)
            if written and not (ended.cancelled and not well):
                assert rank.slots.get(slot) == key, f"rank {rank.index} writes {slot}, which is not its chunk"
                state.held[rank.index].add(key)
                state.broken[rank.index].discard(key)
            fates.append(PartFate.DONE if well else PartFate.FAILED)
        return fates

    def _read(
        self, rank: Rank, ended: RankHop, spec: StorageLoadStoreSpec, host: LoadStoreSpec
    ) -> list[PartFate]:
        assert isinstance(host, CPULoadStoreSpec)
        state, fates = self.naive.tiers[spec.tier - 1], []
        for key, slot in zip(self.naive.names(spec), host.slots, strict=True):
            if ended.void or ended.cancelled or self.chance.random() < self._trouble / 3:
                fates.append(PartFate.FAILED)
            elif key in state.held[rank.index]:
                rank.slots[slot] = key
                fates.append(PartFate.DONE)
            else:
                rank.slots[slot] = OffloadKey(b"noise")
                state.broken[rank.index].discard(key) if key not in state.there else None
                fates.append(PartFate.GONE)
        return fates

    def _say(self, rank: Rank, job_id: JobId, index: int, result: HopResult) -> None:
        rank.answers.results[job_id, index] = {rank.index: result}

    def _answer(self, rank: Rank) -> None:
        """Have the scheduler half hear what a rank has said since the last time."""
        answers, rank.answers = rank.answers, OffloadingWorkerMetadata()
        for (job_id, index), results in answers.results.items():
            result = results[rank.index]
            fates = answers.fates.get((job_id, index), {}).get(rank.index)
            if result is HopResult.LATE:
                continue
            if (write := self.naive.writes.get((job_id, index))) is not None:
                count = len(write.keys)
                said = bytes(count) if fates is None and result is HopResult.FAILED else fates
                done = count if said is None else next((at for at in range(count) if said[at] != 1), count)
                self.naive.answered((job_id, index), rank.index, done)
            if index == 0 and job_id in self._below:
                self._promoted(rank, job_id, fates)
        self.scheduler.update_connector_output(answers, self.now_s)

    def _promoted(self, rank: Rank, job_id: JobId, fates: bytes | None) -> None:
        job, owing = self._below[job_id]
        owing.discard(rank.index)
        spec = job.hops[0].source
        assert isinstance(spec, StorageLoadStoreSpec)
        gone = self._gone.setdefault(job_id, set())
        gone |= {at for at, fate in enumerate(fates or b"") if fate == PartFate.GONE}
        if not owing:
            del self._below[job_id]
            for at in gone:
                key = self.naive.names(spec)[at]
                self.seen["lost"] += key in self.naive.tiers[spec.tier - 1].there
                self.naive.loses(spec.tier, key)

    def _break_any(self) -> None:
        """Have a record vanish, and nobody know."""
        rank = self.chance.choice(self.ranks)
        state = self.chance.choice(self.naive.tiers)
        if state.held[rank.index] and self._trouble:
            key = self.chance.choice(self._listed(state.held[rank.index]))
            state.held[rank.index].discard(key)
            state.broken[rank.index].add(key)
