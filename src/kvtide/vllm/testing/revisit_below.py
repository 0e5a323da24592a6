"""Whether what has left host memory is brought back from below, or tiers are only ever written.

Asks an engine at rest whose copies and calls go well; then host memory loses it, by a restart or by what is
asked in between, and asks again without storing anything. Counts what came against what the tiers themselves
say to hold. Knows tokens and names of chunks; how they come is not its business.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from vllm.v1.request import Request

from kvtide.keys import ChunkRun
from kvtide.manager.cpu import HOST
from kvtide.manager.lower import Demotion, LowerTier
from kvtide.manager.shared import SharedTierBooks
from kvtide.vllm.testing.asks import Ask
from kvtide.vllm.testing.below import ladder_of, lower_of, shared_of, tiers_of
from kvtide.vllm.testing.engine import ModelEngine
from kvtide.vllm.testing.promises import HangError, LeakError
from kvtide.vllm.testing.reach import Reach

TIMES = 4
"""What comes too late for a request is there for the next one."""

FILLERS = 60


@dataclass(frozen=True, slots=True)
class FoundBelow:
    """How it went.

    Attributes:
        due_tokens: That had to come back, of what tiers hold.
        hit_tokens: That came back.
        promoted_chunks: That were brought back to host memory for it.
        shared_chunks: Of those, what came from a shared tier.
    """

    due_tokens: int
    hit_tokens: int
    promoted_chunks: int
    shared_chunks: int


class RevisitBelow:
    """Asks one thing, loses it, and asks it again.

    Args:
        engine: At rest, its copies and calls going well.
        ask: What is asked.
        settle: Runs engine and tiers to rest.
        number: Of the first request, for its name.

    Attributes:
        asked: Requests that were asked so far.
    """

    def __init__(self, engine: ModelEngine, ask: Ask, settle: Callable[[], None], number: int) -> None:
        self._engine = engine
        self._ask = ask
        self._settle = settle
        self._number = number
        self.asked = 0
        self._names: list[ChunkRun] = []

    def store(self) -> None:
        """Ask until it is stored, and once more."""
        for _ in range(int(self._engine.shape.settings["store_threshold"]) + 1):
            self._engine.scheduler.reset_prefix_cache()
            request = self._run(self._ask.prompt, "below")
        hashes, groups = list(request.block_hashes), self._engine.connector._geometry.groups
        self._names = [group.run(hashes, 0, group.hashed_chunks(len(hashes))) for group in groups]

    def push_out(self, longest_tokens: int) -> bool:
        """Ask other things until host memory holds nothing of it; False when that takes too long."""
        chance = random.Random(self._number)
        for _ in range(FILLERS):
            if not self._in_host():
                return True
            prompt = [chance.randrange(90) for _ in range(max(1, longest_tokens - 2))]
            self._run(prompt, "fills host memory")
            self._engine.scheduler.reset_prefix_cache()
        return not self._in_host()

    def read(self) -> FoundBelow:
        """Ask it again.

        Raises:
            LeakError: What tiers hold did not come back.
            HangError: A token was wrong.
        """
        engine, due = self._engine, self._due()
        before, shared = self._count("tier_hit_chunks|"), self._count("tier_hit_chunks|shared")
        hit_tokens = 0
        for _ in range(TIMES):
            engine.scheduler.reset_prefix_cache()
            hits = self._count("hit_tokens|host")
            self._run(self._ask.prompt, "from below", {"kv_transfer_params": {"no_write": True}})
            hit_tokens = max(hit_tokens, self._count("hit_tokens|host") - hits)
        # A store may evict while others are written to it.
        due = min(due, self._due())
        if hit_tokens < due:
            raise LeakError(
                f"{hit_tokens} of {due} tokens of a prompt of {len(self._ask.prompt)} came back from below"
            )
        return FoundBelow(
            due,
            hit_tokens,
            self._count("tier_hit_chunks|") - before,
            self._count("tier_hit_chunks|shared") - shared,
        )

    # -- inside -------------------------------------------------------------------------------------

    def _run(self, prompt: list[int], what: str, extra: dict[str, object] | None = None) -> Request:
        name = f"{what} {self._number + self.asked}"
        self.asked += 1
        identity = self._ask.identity
        request = self._engine.add(name, prompt, 1, cache_salt=identity.cache_salt, extra_args=extra)
        due = self._engine.oracle.demanded(name).tokens[len(prompt) : len(prompt) + 1]
        self._settle()
        if self._engine.outputs[name] != due:
            raise HangError(f"{name}: {self._engine.outputs[name]} where {due} was due")
        return request

    def _count(self, name: str) -> int:
        data = self._engine.counted.data
        return sum(int(value) for key, value in data.items() if key.startswith(name))

    def _in_host(self) -> bool:
        manager = self._engine.connector._deciding._manager
        for run in self._names:
            keys, start, _ = run.positions(manager.groups[run.group_index].stride)
            slots = manager.catalog.slots(HOST, run.group_index, keys, start, run.stop)
            if (slots >= 0).any():
                return True
        return False

    def _gives_way(self, tier: LowerTier) -> bool:
        """Whether what leaves host memory for what is brought back may push just that out of a tier."""
        room = tier.capacity_bytes - tier.used_bytes
        wanted = self._engine.connector._deciding._manager.capacity * max(tier._record_bytes)
        return tier.plan.demotion is Demotion.ON_EVICTION and room < wanted

    def _holding(self, tier: LowerTier, run: ChunkRun) -> list[bool]:
        """For each chunk whether it lies on every rank, and the engine knows or can find it."""
        keys = list(run)
        if not isinstance(tier, SharedTierBooks):
            of_ranks = [place.contains(keys, 1.0) for place in tiers_of(self._engine, tier.index)]
            return [all(of_chunk) for of_chunk in zip(*of_ranks, strict=True)]
        there = [all(place.holds(key) for place in shared_of(self._engine)) for key in keys]
        places = tier._catalog.slots(
            tier.index, run.group_index, tier._arrivals.positions(run)[0], 0, run.stop
        )
        known = [at < len(places) and places[at] >= 0 for at in range(len(keys))]
        lower = lower_of(self._engine)
        assert lower is not None
        assert lower._probes is not None
        if not lower._probes._silent:
            # It finds what has no gap before it, and remembers so much.
            told = [one and not tier.is_refuted(key) for one, key in zip(there, keys, strict=True)]
            row = told.index(False) if False in told else len(told)
            room = tier.capacity_bytes // max(tier._record_bytes) * 39 // 40 - 1
            known = [one or at < min(row, room) for at, one in enumerate(known)]
        return [one and other for one, other in zip(there, known, strict=True)]

    def _due(self) -> int:
        """Tokens at whose end a request can go on with what lies on every rank, within the budget."""
        engine, ladder = self._engine, ladder_of(self._engine)
        reach = Reach(engine.shape, engine.hash_tokens)
        if not reach.one_prefix or any(self._gives_way(tier) for tier in ladder.tiers):
            return 0
        (run,) = self._names
        held = 0
        holding = [self._holding(tier, run) for tier in ladder.tiers]
        while held < len(run) and any(of_tier[held] for of_tier in holding):
            held += 1
        room = max(1, int(ladder.host.capacity * float(engine.shape.settings["promotion_share"])))
        due = reach.of_chunks(min(held, room, ladder.host.capacity * 39 // 40 - 1))
        return max(0, min(due, reach.of_prompt(len(self._ask.prompt))))
