"""An hour of sessions in virtual time, through kvtide's six primitives: do neighbours stay neighbours?

About 32 requests run together: a prompt is loaded as far as it is there, the rest is stored piece by piece as
it is computed, then a chunk at a time as the answer grows, in between those of all the others. The pool is
full long before the hour is over. Times below are of the simulated engine; nothing here is fast or slow.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.frame.children import Tell
from benchmarks.scheduler.books import Books, run_of
from benchmarks.scheduler.prompts import joined
from benchmarks.scheduler.sessions import SYSTEM_TOKENS, Session, sessions
from benchmarks.scheduler.vocabulary import SESSIONS, TOKENS_PER_BLOCK

HOUR_S = 3600.0
LATE_SHARE = 0.75
TURNS_PER_S = 0.9
SEED = 3

PIECE_TOKENS = (2_048, 8_192)  # of a prompt computed in one step
PROMPT_TOKENS_PER_S = 10_000
TOKEN_S = 0.1  # between two tokens of one answer: about 32 requests then run together
LOAD_CHUNK_S = 0.0001
STORE_S = 0.05
SYSTEM_CHUNKS = SYSTEM_TOKENS // TOKENS_PER_BLOCK


@dataclass(slots=True)
class _Seen:
    """What happened in the hour."""

    loads: list[list[int]] = field(default_factory=list)  # slots and runs, of the last quarter
    turns: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    running: int = 0
    running_s: float = 0.0
    stored_chunks: int = 0
    full_at_s: float | None = None
    late_evicted_chunks: int = 0


class _Hour:
    def __init__(self, tell: Tell, capacity: int, hour_s: float) -> None:
        self._tell = tell
        self._hour_s = hour_s
        self._books = Books(capacity)
        self._random = np.random.default_rng(SEED)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._told_s = 0.0
        self._evicted_early = 0
        self._changed_s = 0.0
        self.seen = _Seen()
        self.sessions = sessions(hour_s, TURNS_PER_S, SEED)

    def run(self) -> None:
        for index, session in enumerate(self.sessions):
            self._at(session.begin_s, lambda now_s, s=session, i=index: self._begin(now_s, s, i))
        self._at(TOKEN_S, self._step)
        while self._events:
            now_s, _, happen = heapq.heappop(self._events)
            if now_s > self._hour_s:
                break
            if now_s >= self._told_s:
                self._tell(f"an hour of sessions: minute {now_s / 60:.0f}")
                self._told_s += self._hour_s / 6
            happen(now_s)

    def _at(self, when_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), happen))

    # -- a session --------------------------------------------------------------------------------------

    def _begin(self, now_s: float, session: Session, index: int) -> None:
        last = session.turns[-1]
        own = (last.prompt_tokens + last.output_tokens) // TOKENS_PER_BLOCK - SYSTEM_CHUNKS
        self._turn(now_s, session, 0, joined([("system", SYSTEM_CHUNKS), (f"session/{index}", own)]))

    def _turn(self, now_s: float, session: Session, turn_index: int, hashes: Sequence[bytes]) -> None:
        turn = session.turns[turn_index]
        self._note_running(now_s, +1)
        run = run_of(hashes, (turn.prompt_tokens - 1) // TOKENS_PER_BLOCK)
        ready = self._books.lookup(run).ready_count
        self._books.touch(run)
        self.seen.turns += 1
        self.seen.prompt_tokens += turn.prompt_tokens
        self.seen.hit_tokens += ready * TOKENS_PER_BLOCK
        when_s = now_s
        if ready:
            found = run_of(hashes, ready)
            spec = self._books.begin_load(found)
            if now_s >= LATE_SHARE * self._hour_s:
                self.seen.loads.append([len(spec.slots), runs_in(spec.slots)])
            when_s = now_s + ready * LOAD_CHUNK_S
            self._at(when_s, lambda _: self._books.end_load(found, spec))
        computed = ready * TOKENS_PER_BLOCK
        while computed < turn.prompt_tokens:
            piece = min(int(self._random.integers(*PIECE_TOKENS)), turn.prompt_tokens - computed)
            computed += piece
            when_s += piece / PROMPT_TOKENS_PER_S
            self._offer_at(when_s, hashes, computed // TOKENS_PER_BLOCK)
        for chunks in range(
            computed // TOKENS_PER_BLOCK + 1, (computed + turn.output_tokens) // TOKENS_PER_BLOCK + 1
        ):
            self._offer_at(when_s + (chunks * TOKENS_PER_BLOCK - computed) * TOKEN_S, hashes, chunks)
        ended_s = when_s + turn.output_tokens * TOKEN_S
        self._at(ended_s, lambda now_s: self._note_running(now_s, -1))
        if turn_index + 1 < len(session.turns):
            next_s = max(ended_s + 1, now_s + session.turns[turn_index + 1].gap_s)
            self._at(next_s, lambda now_s: self._turn(now_s, session, turn_index + 1, hashes))

    def _offer_at(self, when_s: float, hashes: Sequence[bytes], chunks: int) -> None:
        if chunks:
            self._at(when_s, lambda now_s: self._offer(now_s, hashes, chunks))

    def _offer(self, now_s: float, hashes: Sequence[bytes], chunks: int) -> None:
        output = self._books.begin_store(run_of(hashes, chunks))
        self.seen.stored_chunks += len(output.keys_to_store)
        self._at(now_s + STORE_S, lambda _: self._books.end_store(output))

    def _step(self, now_s: float) -> None:
        """A token for everybody who runs."""
        self._books.end_step()
        evicted = self._books.evicted_chunks
        if evicted and self.seen.full_at_s is None:
            self.seen.full_at_s = now_s
        if now_s < LATE_SHARE * self._hour_s:
            self._evicted_early = evicted
        self.seen.late_evicted_chunks = evicted - self._evicted_early
        self._at(now_s + TOKEN_S, self._step)

    def _note_running(self, now_s: float, change: int) -> None:
        self.seen.running_s += self.seen.running * (now_s - self._changed_s)
        self.seen.running += change
        self._changed_s = now_s

    # -- afterwards -------------------------------------------------------------------------------------

    def resident(self) -> tuple[int, int]:
        """Count slots and runs of every session's part that is still there."""
        slots = runs = 0
        for index, session in enumerate(self.sessions):
            last = session.turns[-1]
            own = (last.prompt_tokens + last.output_tokens) // TOKENS_PER_BLOCK - SYSTEM_CHUNKS
            hashes = joined([("system", SYSTEM_CHUNKS), (f"session/{index}", own)])
            ready = self._books.lookup(run_of(hashes)).ready_count
            if ready <= SYSTEM_CHUNKS:
                continue
            found = run_of(hashes, ready)
            spec = self._books.begin_load(found)
            # What all share is counted with nobody.
            slots += ready - SYSTEM_CHUNKS
            runs += runs_in(spec.slots[SYSTEM_CHUNKS:])
            self._books.end_load(found, spec)
        return slots, runs


def measure_hour(tell: Tell, capacity: int, hour_s: float = HOUR_S) -> list[dict[str, Any]]:
    """Simulate, and say how scattered the slots of what is read are in the last quarter."""
    hour = _Hour(tell, capacity, hour_s)
    hour.run()
    seen = hour.seen
    resident_slots, resident_runs = hour.resident()
    return [
        {
            "row": SESSIONS,
            "capacity": capacity,
            "hour_s": hour_s,
            "sessions": len(hour.sessions),
            "turns": seen.turns,
            "prompt_tokens": seen.prompt_tokens,
            "hit_tokens": seen.hit_tokens,
            "running_mean": seen.running_s / hour_s,
            "stored_chunks": seen.stored_chunks,
            "full_at_s": seen.full_at_s,
            "late_evicted_chunks": seen.late_evicted_chunks,
            "late_loads": seen.loads,
            "resident_slots": resident_slots,
            "resident_runs": resident_runs,
        }
    ]


def runs_in(slots: Sequence[int]) -> int:
    """Count the contiguous runs that these slots are, in their order."""
    if not len(slots):
        return 0
    return 1 + int(np.count_nonzero(np.diff(np.asarray(slots)) != 1))
