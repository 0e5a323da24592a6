"""Seeded days of a scheduler half with tiers below host memory: everything that may go wrong there does.

Plays the engine; the ranks are ``LadderRanks``. After each call the books are held against ``NaiveLadder``.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvtide.jobs import CPULoadStoreSpec
from kvtide.keys import Medium, OffloadKey, PackedKeys, make_offload_key, split_offload_key
from kvtide.manager.ladder import PreparedWrite
from kvtide.testing.asked import HASH_BYTES, Asked, Step
from kvtide.testing.ladder_ranks import LadderRanks


class LadderDay(LadderRanks):
    """One seeded day.

    Args:
        seed: Decides everything.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(random.Random(seed))
        self._heard: Counter[OffloadKey] = Counter()  # tiers that hold a chunk, as events tell
        self._queued: list[Asked] = []
        self._prompts: list[list[int]] = [[0] * 6]
        self._block_count = self._request_count = 0

    def run(self, calls: int) -> None:
        """Do so many things, compare after each, end all that is open, and see that nothing is left."""
        for _ in range(calls):
            self._call()
            self.check()
        self._trouble = 0.0
        for request in [*self._queued, *self._running]:
            self._finish(request)
        for _ in range(600):
            for name in list(self._loading):
                if name not in {hop.job.request_id for rank in self.ranks for hop in rank.copies}:
                    self._finish(self._loading[name])
            self._tell_inventory(limit=50)
            self._step()
            if not (self._loading or len(self.scheduler._jobs) or self._is_busy_below):
                break
            for rank in self.ranks:
                for hop in [*rank.copies, *rank.hops]:
                    self._end(rank, hop)
                self._answer(rank)
            self.check()
        self.check()
        self.scheduler.check_invariants()
        assert self.scheduler._lower is not None
        assert self.scheduler._lower.is_idle
        assert not self.host.catalog.pin_count, "something is kept for nobody"
        assert not self.host.pinned_count, "slots are held for nobody"

    # -- what may be done -----------------------------------------------------------------------

    def _call(self) -> None:
        """Do one thing."""
        things: list[tuple[float, Callable[[], None]]] = [
            (0.14, self._ask),
            (0.16, lambda: self._admit(self._one_of(self._queued))),
            (0.2, self._step),
            (0.1, lambda: self._finish(self._one_of(self._running))),
            (0.01, lambda: self._finish(self._one_of(self._queued))),
            (0.22, self._end_any),
            (0.1, lambda: self._answer(self.chance.choice(self.ranks))),
            (0.003, self._reset),
            (0.01, self._report_any),
            (0.03, self._break_any),
            (0.02, lambda: self._tell_inventory(limit=self.chance.choice((1, 3, 10)))),
            (0.01, self._wait),
        ]
        ((_, thing),) = self.chance.choices(things, [weight for weight, _ in things])
        thing()

    def _one_of(self, requests: Sequence[Asked]) -> Asked | None:
        return self.chance.choice(requests) if requests else None

    def _wait(self) -> None:
        self.now_s += self.chance.choice((0.1, 1.0, 3.0))

    def _ask(self) -> None:
        chance = self.chance
        old = chance.choice(self._prompts)
        if chance.random() < 0.5:
            keep = chance.choice((0, chance.randint(0, len(old))))
            old = (old[:keep] + [chance.randrange(self._alphabet) for _ in range(chance.randint(1, 8))])[:20]
            self._prompts = [*self._prompts, old][-8:]
        lora = chance.random() < 0.1
        self._request_count += 1
        tokens = [100 + token for token in old] if lora else list(old)
        adapter = SimpleNamespace(lora_name="adapter") if lora else None
        request = Asked(f"r{self._request_count}", tokens, adapter)
        self._requests[request.request_id] = request
        self.scheduler.on_new_request(request)
        self._queued.append(request)

    def _admit(self, request: Asked | None) -> None:
        if request is None:
            return
        hit, _ = self.scheduler.get_num_new_matched_tokens(request, 0, self.now_s)
        self.seen["deferred"] += hit is None
        if hit is None:
            return
        self._queued.remove(request)
        request.tables = tuple(
            self._new_blocks(-(-request.num_tokens // group.tokens_per_block))
            for group in self.geometry.groups
        )
        self.scheduler.update_state_after_alloc(request, request.tables, hit, self.now_s)
        self.seen["hits"] += hit > 0
        if hit:
            self._loading[request.request_id] = request
        else:
            self._running.append(request)

    def _new_blocks(self, count: int) -> list[int]:
        first, self._block_count = self._block_count + 1, self._block_count + count
        return list(range(first, first + count))

    def _step(self) -> None:
        scheduled = {}
        for request in self._running:
            if left := request.num_tokens - request.num_computed_tokens:
                scheduled[request.request_id] = left
                self._compute(request)
        told = self.scheduler.build_connector_meta(Step(scheduled), self.now_s)
        for request in self._running:
            request.num_computed_tokens = request.num_tokens
        self._note_told(told)
        self.compare()
        self.now_s += 0.01

    def _compute(self, request: Asked) -> None:
        for group, table in zip(self.geometry.groups, request.tables, strict=True):
            first = request.num_computed_tokens // group.tokens_per_block
            for index, block in enumerate(table[first:], first):
                end = (index + 1) * group.tokens_per_block
                if end <= request.num_tokens:
                    name = make_offload_key(request.block_hashes[end - 1], group.group_index)
                    self._blocks.update({(rank.index, block): name for rank in self.ranks})

    def _finish(self, request: Asked | None) -> None:
        if request is None:
            return
        for there in (self._queued, self._running):
            if request in there:
                there.remove(request)
        self._loading.pop(request.request_id, None)
        self.scheduler.request_finished_all_groups(request, request.tables, self.now_s)
        self._requests[request.request_id].tables = ()

    def _reset(self) -> None:
        self.seen["resets"] += 1
        self.scheduler.reset_cache()
        self.naive.reset(self.keeps)

    # -- comparing ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare every table."""
        self.scheduler.check_invariants()
        for rank in self.ranks:
            for hop in [*rank.hops, *rank.copies]:
                for end in (hop.hop.source, hop.hop.target):
                    if isinstance(end, CPULoadStoreSpec):
                        free = [slot for slot in end.slots if self._is_free(slot)]
                        assert not free, f"{hop.job} still touches slots {free}, which are free"
        lower = self.scheduler._lower
        assert lower is not None
        promotions = lower._promotions
        most = max(1, int(self.capacity * self.share))
        assert promotions._open_count + promotions._kept_count <= most, "more is brought back than may be"
        kept = sum(state.below.chunk_count for state in self.scheduler._requests.values())
        assert kept == promotions._kept_count, f"{kept} chunks are kept, {promotions._kept_count} counted"
        for request in [*self._running, *self._loading.values()]:
            state = self.scheduler._requests.get(request.request_id)
            assert state is None or not state.below.handles, f"{request.request_id} was admitted"
        for tier in self.tiers:
            assert tier.open_bytes <= tier.plan.queue_bytes
            assert tier.open_bytes == sum(
                self._record_bytes[split_offload_key(write.keys[0])[1]] * len(write.keys)
                for write in self._open_writes(tier.index)
            )

    def _open_writes(self, tier: int) -> list[Any]:
        unsent = self._unsent_writes(tier)
        return [write for write in self.naive.writes.values() if write.tier == tier] + unsent

    def _unsent_writes(self, tier: int) -> list[Any]:
        """Hops that the next step tells: the naive side does not know of them yet."""
        hops = self.ladder_hops
        return [
            _Unsent(list(hop.what.run))
            for hop in hops
            if isinstance(hop.what, PreparedWrite)
            and hop.what.tier == tier
            and hop.key not in self.naive.writes
        ]

    def _is_free(self, slot: int) -> bool:
        host = self.host
        pending = any(slot in store.slots for store in host._pending)
        return not (pending or host._slots._readers[slot] or slot in host.catalog.all_slots(0))

    def compare(self) -> None:
        """Compare what tiers are thought to hold, just after a step was told, with names and with events."""
        for event in self.scheduler.take_events():
            if event.medium is Medium.STORAGE:
                self._heard.update(dict.fromkeys(event.keys, -1 if event.removed else 1))
                self.seen["left a tier"] += len(event.keys) * event.removed
        everywhere: Counter[OffloadKey] = Counter()
        for tier in self.tiers:
            listed = {
                key
                for packed in self.host.catalog.names(tier.index)
                for key in PackedKeys((packed,), HASH_BYTES)
            }
            self.naive.check(tier.index, listed, self._is_warming)
            everywhere.update(listed)
        assert +self._heard == everywhere, "events tell something else"
        self.seen["below"] = max(self.seen["below"], len(everywhere))


@dataclass(slots=True)
class _Unsent:
    keys: list[OffloadKey]
