"""Seeded days in the life of a host tier: sessions that extend, branch, repeat, fail and start anew.

Knows what to do next and nothing of what comes of it; ``ComparedHost`` says whether that was right.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.jobs import ReqContext
from kvtide.keys import ChunkRun
from kvtide.testing.compared_host import ComparedHost

CAPACITIES = (1, 2, 3, 5, 8, 16, 40, 130)


def chained_hashes(tokens: Sequence[int], hash_bytes: int = 16, hashes_per_chunk: int = 1) -> list[bytes]:
    """Hash a prompt of one token a chunk as the engine does: each hash covers all before it."""
    hashes, parent = [], b""
    for token in tokens:
        for part in range(hashes_per_chunk):
            parent = hashlib.sha256(parent + token.to_bytes(4, "big") + bytes((part,))).digest()[:hash_bytes]
            hashes.append(parent)
    return hashes


@dataclass(slots=True)
class Session:
    """A prompt that grows, and who asks."""

    tokens: list[int]
    ctx: ReqContext


class RandomDay:
    """One seeded workload.

    Args:
        seed: Decides everything.
        host: Who is asked; without slots yet.
        capacity: Slots; None draws it.
    """

    def __init__(self, seed: int, host: ComparedHost, capacity: int | None = None) -> None:
        self.chance = random.Random(seed)
        self.host = host
        self._hash_bytes = self.chance.choice((16, 32))
        self._hashes_per_chunk = self.chance.choice((1, 1, 2))
        self._alphabet = self.chance.choice((1, 2, 3, 5))
        self._depth = self.chance.choice((2, 4, 8, 16))
        self._room_each_step = self.chance.random() < 0.3
        self._visits = 0
        self._sessions: list[Session] = []
        host.grow(self.chance.choice(CAPACITIES) if capacity is None else capacity)

    def run(self, steps: int) -> None:
        """Do so many things, compare after each, and end all that is open."""
        for _ in range(steps):
            self._step()
        self.host.finish(ReqContext("end"))

    # -- inside ---------------------------------------------------------------------------------

    def _step(self) -> None:
        chance, host = self.chance, self.host
        session = self._session()
        ctx, stop = session.ctx, chance.randint(1, len(session.tokens))
        hashes = chained_hashes(session.tokens, self._hash_bytes, self._hashes_per_chunk)
        run = ChunkRun(hashes, 0, self._hashes_per_chunk, 0, stop)
        start = chance.choice((0, 0, chance.randint(0, stop)))
        action = chance.random()
        if action < 0.38:
            storing = host.store(run.between(start, stop), ctx, chance.choice((None, None, None, 0, 1, 4)))
            if storing is not None and chance.random() < 0.5:
                host.end_store(storing)
        elif action < 0.58 and host.storing:
            host.end_store(chance.choice(host.storing), success=chance.random() < 0.75)
        elif action < 0.66:
            ready = host.lookup(run.between(start, stop), ctx).ready_count
            if ready:
                host.load(run.between(start, start + ready), ctx)
        elif action < 0.75 and host.loading:
            host.end_load(chance.choice(host.loading), ctx)
        elif action < 0.86:
            host.touch(run, ctx)
        elif action < 0.91:
            host.evict(chance.choice((1, 1, 2, 7, 1000)))
        elif action < 0.92:
            host.grow(host.naive.capacity + chance.randint(0, 6))
        elif action < 0.93:
            host.reset()
        elif action < 0.95:
            host.end_store_again()
        if self._room_each_step or action > 0.95:
            host.keep_room()
        host.lookup(run.between(chance.randint(0, stop), stop), ctx)
        host.check()

    def _session(self) -> Session:
        chance, action = self.chance, self.chance.random()
        if not self._sessions or action < 0.25:
            length = chance.randint(1, self._depth)
            tokens = [int(chance.random() * chance.random() * self._alphabet) for _ in range(length)]
            self._sessions.append(self._asks(tokens))
        elif action < 0.4:
            old = chance.choice(self._sessions).tokens
            branch = [*old[: chance.randint(1, len(old))], chance.randint(0, self._alphabet)]
            self._sessions.append(self._asks(branch))
        elif action < 0.55:
            grown = chance.choice(self._sessions)
            grown.tokens = grown.tokens + [
                chance.randrange(self._alphabet) for _ in range(chance.randint(1, 3))
            ]
        elif action < 0.6:
            self._sessions.append(self._asks(chance.choice(self._sessions).tokens))
        del self._sessions[:-6]
        return chance.choice(self._sessions)

    def _asks(self, tokens: list[int]) -> Session:
        self._visits += 1
        return Session(tokens, ReqContext(f"request {self._visits}", None, self._visits))
