#!/usr/bin/env python3
"""Break the connector on purpose, one line at a time, and see whether the simulation notices.

``scripts/mutants.py`` or ``make mutants``. Each mutant replaces one line in a copy of ``src``; the walks of
``kvtide.vllm.testing.sim`` run against the copy until a promise is found broken. The unchanged code runs
first, and must pass. A mutant that no walk notices is a hole in the walk, or no mutant.

Ends with 0 when every mutant was caught, 1 when not, 2 when the list does not fit the code any more, the
unchanged code does not pass, or a mutant cannot even be walked.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"

CONFIGURATIONS = (
    "sync/v1/1/small/lru",
    "async/v2/2/small/lru",
    "async/v1-drafting/4/small/arc",
    "sync/v2/2/large/arc",
    "async/v1/2/large/lru",
    "sync/v1-drafting/2/small/arc",
    "async/v2/1/small/arc",
    "async/v1/4/small/lru",
    "sync/v2/4/small/lru",
    "async/v2/2/large/arc",
    "sync/v2/1/small/arc",
    "sync/v1/2/small/lru",
)
"""Of the simulation: every value of every column is among them."""

WALK_STEPS = 500
STEPS = 144 * WALK_STEPS
"""Of all walks against one mutant: twelve seeds of each configuration."""

LIMIT_S = 60.0
"""A mutant that was not noticed by then is not caught. The unchanged code gets longer: it has to pass."""


class OutOfDateError(Exception):
    """A line is not there, or there several times."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One line, broken.

    Attributes:
        name: For ``--only``.
        kind: Of failure in the field, see ``docs/simulation.md``.
        file: Below ``src/kvtide``.
        line: The whole line, without its indentation; it stands in the file exactly once.
        replacement: What stands there instead, at the same indentation.
        breaks: What goes wrong by it.
        tiers: Walks against it have such ones below host memory, chance or not; see ``--tiers`` of ``sim``.
    """

    name: str
    kind: str
    file: str
    line: str
    replacement: str
    breaks: str
    tiers: str = ""

    def applied(self, text: str) -> str:
        """Break a file's text.

        Raises:
            OutOfDateError: The line is not there exactly once.
        """
        lines = text.split("\n")
        found = [index for index, line in enumerate(lines) if line.strip() == self.line]
        if len(found) != 1:
            raise OutOfDateError(f"{self.name}: {self.file} has {len(found)} times: {self.line}")
        (index,) = found
        indentation = lines[index][: len(lines[index]) - len(lines[index].lstrip())]
        lines[index] = indentation + self.replacement
        return "\n".join(lines)


MUTANTS = (
    # F1: a block or a slot changes owner while a copy touches it.
    Mutant(
        "unasked-blocks-unchecked",
        "F1",
        "scheduler/tables.py",
        "self._flush |= self._jobs.fences.conflicts(table[first_computed:])",
        "self._flush |= self._jobs.fences.conflicts(table[first_computed:] if loaded_tokens else ())",
        "blocks given to a request that loads nothing from us are not checked against open copies",
    ),
    Mutant(
        "load-over-readers",
        "F1",
        "scheduler/tables.py",
        "after |= self._jobs.fences.conflicts(table[first_new:first_computed])",
        "after |= set()",
        "a load is written into blocks that a store still reads",
    ),
    Mutant(
        "store-before-forward",
        "F1",
        "transfer/engine.py",
        "(ready if job.job_id in step.jobs_to_flush else self._deferred).append(job)",
        "ready.append(job)",
        "a store begins before the forward that writes its blocks",
    ),
    Mutant(
        "fence-dropped-on-abort",
        "F1",
        "scheduler/scheduler.py",
        "state = self._requests.pop(request.request_id, None)",
        "state = self._requests.pop(request.request_id, None); [self._jobs.fences.close(one)"
        " for one in (state.transfer_jobs if state else ())]",
        "the blocks of a request that has ended are free although its copies run",
    ),
    Mutant(
        "one-conflict-named",
        "F1",
        "scheduler/fences.py",
        "found |= {job_id for job_id, blocks in self._blocks_of.items() if block in blocks}",
        "found = {job_id for job_id, blocks in self._blocks_of.items() if block in blocks}",
        "of the copies in the way only those at the last block are waited for",
    ),
    Mutant(
        "flushed-store-believed",
        "F1",
        "transfer/engine.py",
        "self._void |= waited",
        "self._void |= set()",
        "a store that was cut short because its blocks were given away counts once it ends",
    ),
    Mutant(
        "doomed-slots-freed",
        "F1",
        "manager/arrivals.py",
        "if store.copied:",
        "if store.slots:",
        "slots of a store that is given up are handed out while its copy still writes into them",
    ),
    Mutant(
        "readers-not-counted",
        "F1",
        "manager/slots.py",
        "self._readers[held] += 1",
        "self._readers[held] += 0",
        "slots are given to others while a load reads them",
    ),
    Mutant(
        "given-up-blocks-free",
        "F1",
        "scheduler/holds.py",
        "self.pool.touch(blocks)",
        "self.pool.touch(())",
        "blocks of a load that was given up are handed out although its copy may still write into them",
    ),
    Mutant(
        "load-waits-for-nobody",
        "F1",
        "transfer/engine.py",
        "behind = any(other in self._open for other in job.after)",
        "behind = False",
        "a load begins although the store that reads its blocks has not ended",
    ),
    Mutant(
        "reset-frees-everything",
        "F1",
        "manager/cpu.py",
        "pending = [np.frombuffer(store.slots, dtype=np.int32) for store in self._pending]",
        "pending = [np.frombuffer(store.slots, dtype=np.int32) for store in ()]",
        "a reset hands out slots that stores of before it still write into",
    ),
    # F2: holes in a request's life.
    Mutant(
        "never-ran-and-stored",
        "F2",
        "scheduler/scheduler.py",
        "if state is None or state.load_job is not None or not state.computed or not any(block_ids):",
        "if state is None or state.load_job is not None or not any(block_ids):",
        "blocks of a request that was aborted while another connector loads are stored",
    ),
    Mutant(
        "growth-unchecked",
        "F2",
        "scheduler/tables.py",
        "self._flush |= self._jobs.fences.conflicts(block_ids)",
        "self._flush |= set()",
        "blocks given to a running request are not checked against open copies",
    ),
    Mutant(
        "old-table-kept",
        "F2",
        "scheduler/state.py",
        "group.block_ids = []",
        "group.block_ids = group.block_ids",
        "a preempted request is admitted again and its new blocks are taken for its old ones",
    ),
    Mutant(
        "resumed-table-appended",
        "F2",
        "scheduler/tables.py",
        "if new_block_ids is None or request_id in cached.resumed_req_ids:",
        "if new_block_ids is None:",
        "the whole table of a resumed request is taken for blocks that were added",
    ),
    Mutant(
        "aborted-and-waited-for",
        "F2",
        "scheduler/scheduler.py",
        "self._parked.settled(request.request_id)",
        "self._parked.admitted(state) if state is not None else None",
        "a request whose load has failed stands back for one that was aborted before it ran",
    ),
    Mutant(
        "last-chunks-lost",
        "F2",
        "scheduler/scheduler.py",
        "self._stores.plan(state, computed_tokens, now_s, final=True)",
        "self._stores.plan(state, computed_tokens, now_s, final=False)",
        "what was generated last is never stored",
    ),
    Mutant(
        "once-computed-always-computed",
        "F2",
        "scheduler/state.py",
        "self.stale = self.computed = False",
        "self.stale = False",
        "who ran before it was preempted counts as having filled the blocks it was given since",
    ),
    # F3: geometry counted wrong.
    Mutant(
        "one-chunk-too-few",
        "F3",
        "geometry.py",
        "return range(begin // group.tokens_per_chunk, -(-restored_tokens // group.tokens_per_chunk))",
        "return range(begin // group.tokens_per_chunk, -(-restored_tokens // group.tokens_per_chunk) - 1)",
        "the last chunk a reader needs is not among those it gets",
    ),
    Mutant(
        "window-one-short",
        "F3",
        "geometry.py",
        "return max(0, restored_tokens - (self.window_tokens - 1))",
        "return max(0, restored_tokens - (self.window_tokens - 2))",
        "the first token a query sees through its window is not brought",
    ),
    Mutant(
        "chunk-begun-anew",
        "F3",
        "transfer/plans.py",
        "index = first_block % group.blocks_per_chunk + np.arange(block_count, dtype=np.int64)",
        "index = np.arange(block_count, dtype=np.int64)",
        "a load that begins within a chunk takes the bytes from the chunk's beginning",
    ),
    Mutant(
        "slots-in-wrong-order",
        "F3",
        "manager/cpu.py",
        "spec = CPULoadStoreSpec(packed(slots), (len(slots),))",
        "spec = CPULoadStoreSpec(packed(slots[::-1]), (len(slots),))",
        "the chunks of a load arrive in reverse",
    ),
    Mutant(
        "last-token-loaded",
        "F3",
        "scheduler/lookup.py",
        "limit = min(request.num_tokens - 1, hashed_tokens)",
        "limit = min(request.num_tokens, hashed_tokens)",
        "the whole prompt is offered and nothing is left to compute logits from",
    ),
    Mutant(
        "null-block-stored",
        "F3",
        "scheduler/stores.py",
        "gone = max((index + 1 for index, block in enumerate(blocks) if block == NULL_BLOCK), default=0)",
        "gone = 0",
        "chunks behind the window are stored although the engine has let go of their blocks",
    ),
    Mutant(
        "uncomputed-stored",
        "F3",
        "scheduler/stores.py",
        "chunk_count = min(group.full_chunks(computed_tokens), hashed)",
        "chunk_count = hashed",
        "chunks are stored because they have a hash, computed or not",
    ),
    Mutant(
        "regions-overlap",
        "F3",
        "transfer/region.py",
        "offset = (np.cumsum(size) - size) * blocks_per_chunk",
        "offset = np.cumsum(size) - size",
        "of a chunk of several blocks one layer is written over another",
    ),
    Mutant(
        "slots-overlap",
        "F3",
        "transfer/region.py",
        "return max(group.chunk_bytes for group in groups)",
        "return min(group.chunk_bytes for group in groups)",
        "a slot is as large as the smallest chunk of any group",
    ),
    Mutant(
        "first-block-forgotten",
        "F3",
        "scheduler/loads.py",
        "indices.append(first)",
        "indices.append(0)",
        "where in its first chunk a load begins is not told",
    ),
    # F4: a cache that is only ever written.
    Mutant(
        "writer-one-short",
        "F4",
        "scheduler/stores.py",
        "hashed = group.hashed_chunks(len(request.block_hashes))",
        "hashed = group.hashed_chunks(len(request.block_hashes)) - 1",
        "the writer keeps one chunk less than a reader asks for",
    ),
    Mutant(
        "parent-evicted-first",
        "F4",
        "manager/departures.py",
        "free = not self._kids[tier][node] and self._pinned(node) < held",
        "free = self._pinned(node) < held",
        "a chunk leaves before those that extend it, and they are never read again",
    ),
    Mutant(
        "reuse-never-counted",
        "F4",
        "manager/reuse.py",
        "offers = offers | {request_id}",
        "offers = frozenset((request_id,))",
        "a chunk is never found to be asked for a second time, and nothing is stored",
    ),
    Mutant(
        "no-room-is-made",
        "F4",
        "manager/room.py",
        "evict(count * cost, None)",
        "evict(0, None)",
        "a full pool stays as it is, whatever is asked for now",
    ),
    Mutant(
        "window-chunk-skipped",
        "F4",
        "scheduler/stores.py",
        "return -(-(first + gone) // group.blocks_per_chunk)",
        "return -(-(first + gone) // group.blocks_per_chunk) + 1",
        "of what the engine holds behind a window the first chunk is left out",
    ),
    Mutant(
        "lazy-never-looks",
        "F4",
        "scheduler/lazy.py",
        "while seen < limit and block is not end:",
        "while False:",
        "what the engine is about to hand out is never stored",
    ),
    # F5: failure taken for success.
    Mutant(
        "failed-store-visible",
        "F5",
        "manager/arrivals.py",
        "if done_count and store.intact:",
        "if store.intact:",
        "chunks of a store that has failed can be read",
    ),
    Mutant(
        "failed-load-unreported",
        "F5",
        "transfer/engine.py",
        "if not success:",
        "if success is None:",
        "a request whose load has failed computes on as if it had been loaded",
    ),
    Mutant(
        "orphans-kept",
        "F5",
        "manager/arrivals.py",
        "doomed += store.children",
        "doomed += ()",
        "what continues a failed store stays pending on it",
    ),
    Mutant(
        "half-a-copy-is-one",
        "F5",
        "transfer/engine.py",
        "self._end(job, outcome.success and job.job_id not in self._void)",
        "self._end(job, outcome.byte_count > 0 and job.job_id not in self._void)",
        "a copy that stopped half way is answered as done",
    ),
    Mutant(
        "failed-copy-completed",
        "F5",
        "scheduler/scheduler.py",
        "chunks.run, chunks.spec, status.owner.context, success=not status.failed",
        "chunks.run, chunks.spec, status.owner.context, success=True",
        "a store that some rank has failed is completed like any other",
    ),
    # F6: an answer that never comes.
    Mutant(
        "failure-unanswered",
        "F6",
        "transfer/engine.py",
        "self._answers[job.job_id, 0] = HopResult.DONE if success else HopResult.FAILED",
        "self._answers.update({(job.job_id, 0): HopResult.DONE} if success else {})",
        "of a copy that has failed nobody ever hears",
    ),
    Mutant(
        "no-deadline",
        "F6",
        "scheduler/open_jobs.py",
        "job_id, generation, direction, owner.request.request_id, hops, after, self._deadline_s",
        "job_id, generation, direction, owner.request.request_id, hops, after, 1e9",
        "a copy that never begins is never given up",
    ),
    Mutant(
        "nobody-polls",
        "F6",
        "scheduler/scheduler.py",
        "if self._copied or any(now_s - status.planned_at_s < overdue_s for status in self._jobs):",
        "if self._copied:",
        "an engine without requests sleeps and copies are never heard of",
    ),
    Mutant(
        "load-failure-unnoticed",
        "F6",
        "scheduler/scheduler.py",
        "self._parked.load_failed(request_id)",
        "self._parked.settled(request_id)",
        "a request whose load has failed, and those behind it, wait for a load that vLLM never admits",
    ),
    Mutant(
        "awake-for-ever",
        "F6",
        "scheduler/scheduler.py",
        "overdue_s = self._config.transfer_deadline_s + QUARANTINE_S",
        "overdue_s = 1e9",
        "one copy that never ends keeps an idle engine stepping",
    ),
    Mutant(
        "wedged-load-untold",
        "F6",
        "scheduler/quarantine.py",
        "self._given_up.add(status.job.job_id)",
        "self._given_up.discard(status.job.job_id)",
        "nobody tells the engine that a load which does not end was given up",
    ),
    Mutant(
        "answers-thrown-away",
        "F6",
        "transfer/engine.py",
        "return None if answers == NO_NEWS else answers",
        "return answers if answers.pools or answers.generations else None",
        "how copies have ended is told only along with something else",
    ),
    # F7: deadlock and starvation under pressure.
    Mutant(
        "flush-without-limit",
        "F7",
        "transfer/engine.py",
        "if not waited or handler.wait(waited, PATIENCE * self._flush_limit_s):",
        "if not waited or handler.wait(waited, 100 * self._flush_limit_s):",
        "a step waits for a slow store as long as it takes",
    ),
    Mutant(
        "store-queue-unbounded",
        "F7",
        "scheduler/stores.py",
        "return max(0, self._config.store_queue_bytes // self.slot_bytes - self._jobs.store_chunk_count)",
        "return None",
        "stores pile up beyond the bytes that may be open at once",
    ),
    Mutant(
        "store-queue-never-shorter",
        "F7",
        "scheduler/open_jobs.py",
        "self._store_chunks -= status.chunk_count",
        "self._store_chunks -= 0",
        "the queue of stores is found full for ever",
    ),
    Mutant(
        "loading-for-ever",
        "F7",
        "scheduler/loads.py",
        "del self._loading[status.job.job_id]",
        "self._loading.get(status.job.job_id)",
        "others wait for a load that has ended long ago",
    ),
    Mutant(
        "named-by-first-block",
        "F8",
        "keys.py",
        "hashes = self.block_hashes[first::step] if first else self.block_hashes",
        "hashes = self.block_hashes[::step] if first else self.block_hashes",
        "chunks of several blocks go by the hash of the first block, whatever the others hold",
    ),
    Mutant(
        "pending-prefix-assumed",
        "F8",
        "manager/pending.py",
        "low, high = (middle, high) if stored.hash_of(at) == other.hash_of(at) else (low, middle - 1)",
        "low, high = (middle, high) if stored.start <= at else (low, middle - 1)",
        "prompts that part within a pending store are taken for one",
    ),
    Mutant(
        "known-prefix-assumed",
        "F8",
        "manager/tree.py",
        "if self.hashes(node, middle - 1, middle) == keys[position + middle - 1]:",
        "if self.hashes(node, middle - 1, middle):",
        "prompts that part within a run of the tree are taken for one",
    ),
    Mutant(
        "stale-after-reset",
        "F8",
        "scheduler/scheduler.py",
        "state.stale = any(group.block_ids for group in state.groups)",
        "state.stale = False",
        "KV of before a reset is stored under the names of after it",
    ),
    Mutant(
        "other-tokens-announced",
        "F8",
        "scheduler/contents.py",
        "run.start * group.tokens_per_chunk : run.stop * group.tokens_per_chunk",
        "0 : len(run) * group.tokens_per_chunk",
        "a router is told of chunks under the tokens of others",
    ),
    # F9: ranks that disagree.
    Mutant(
        "first-rank-speaks",
        "F9",
        "scheduler/open_jobs.py",
        "return not self.pending_count",
        "return True",
        "a job is done when any rank has answered",
    ),
    Mutant(
        "last-rank-decides",
        "F9",
        "scheduler/open_jobs.py",
        "self.failed = True",
        "self.failed = not self.pending_count",
        "a failure counts only when it is the last answer",
    ),
    Mutant(
        "wrong-rank-struck-out",
        "F9",
        "scheduler/open_jobs.py",
        "self.owing[hop_index].discard(rank)",
        "self.owing[hop_index].pop()",
        "an answer strikes out some rank, not the one that gave it",
    ),
    Mutant(
        "one-rank-heard",
        "F9",
        "jobs.py",
        "results[key] = results.get(key, {}) | answers",
        "results[key] = answers",
        "of ranks that answer in one step the last is heard",
    ),
    Mutant(
        "all-ranks-are-the-first",
        "F9",
        "transfer/engine.py",
        "{key: {self._rank: result} for key, result in self._answers.items()}, pools",
        "{key: {0: result} for key, result in self._answers.items()}, pools",
        "every rank answers in the name of the first",
    ),
    # F10: leaks and books that do not balance.
    Mutant(
        "lazy-keeps-what-is-gone",
        "F10",
        "scheduler/lazy.py",
        "self._leavings.drop(block_ids)",
        "pass",
        "what was left in a block is written down although somebody else has it now",
    ),
    Mutant(
        "unpin-forgotten",
        "F10",
        "manager/cpu.py",
        "self.catalog.unpin(load.pin)",
        "self.catalog.unpin(0)",
        "what was loaded once can never be evicted",
    ),
    Mutant(
        "generation-ignored",
        "F10",
        "manager/slots.py",
        "unowned = unread[self._unowned[unread]]",
        "unowned = unread[:0]",
        "slots that a load was reading when the cache was reset are never free again",
    ),
    Mutant(
        "given-up-blocks-kept",
        "F10",
        "scheduler/holds.py",
        "self.pool.free_blocks(blocks)",
        "self.pool.free_blocks(())",
        "blocks that were held for a copy are held when it has ended",
    ),
    Mutant(
        "pending-never-forgotten",
        "F10",
        "manager/pending.py",
        "del self._by_slot[store.slots[0]]",
        "self._by_slot.get(store.slots[0])",
        "a store that has ended stays on the way",
    ),
    Mutant(
        "evicted-and-held",
        "F10",
        "manager/cpu.py",
        "self._give_back(np.concatenate(gone.slots))",
        "np.concatenate(gone.slots)",
        "slots of chunks that have left are never free again",
    ),
    Mutant(
        "request-never-forgotten",
        "F10",
        "scheduler/scheduler.py",
        "state = self._requests.pop(request.request_id, None)",
        "state = self._requests.get(request.request_id)",
        "the state beside a request outlives it",
    ),
    Mutant(
        "removal-untold",
        "F10",
        "manager/cpu.py",
        "return self._tell_removed(gone.names)",
        "return self._tell_removed(())",
        "a router believes in chunks that have left",
    ),
    # Tiers below host memory.
    Mutant(
        "slot-let-go-while-written-on",
        "F1",
        "manager/ladder.py",
        "self.host.hold(slots)",
        "self.host.hold(slots[:0])",
        "a slot gets a new owner while a write to a tier still reads it",
    ),
    Mutant(
        "late-promotion-lets-go",
        "F1",
        "manager/arrivals.py",
        "if store.copied:",
        "if store.copied or self._tier == 0:",
        "slots are free while a read that is late may still write into them",
    ),
    Mutant(
        "hop-done-by-one-rank",
        "F9",
        "scheduler/below.py",
        "return not self.owing",
        "return True",
        "what one rank has read or written counts for all",
    ),
    Mutant(
        "failed-read-is-ready",
        "F5",
        "scheduler/promotions.py",
        "self._ladder.host.complete_part(run, spec, done)",
        "self._ladder.host.complete_part(run, spec, len(run))",
        "chunks that did not come back are ready in host memory",
    ),
    Mutant(
        "failed-write-is-there",
        "F5",
        "manager/ladder.py",
        "self.tiers[write.tier - 1].end_write(write.run, write.places, leading_done(fates))",
        "self.tiers[write.tier - 1].end_write(write.run, write.places, len(fates))",
        "what a tier could not keep is in its books",
    ),
    Mutant(
        "failed-store-written-on",
        "F5",
        "transfer/engine.py",
        "elif success and job.generation == self._generation:",
        "elif job.generation == self._generation:",
        "what a store did not bring is written to the disk",
    ),
    Mutant(
        "written-on-across-a-reset",
        "F8",
        "transfer/engine.py",
        "elif success and job.generation == self._generation:",
        "elif success:",
        "what was computed before a reset is written as if it were of after it",
    ),
    Mutant(
        "reset-leaves-tiers",
        "F8",
        "transfer/tier_hops.py",
        "seat.lane.begin_generation()",
        "seat.lane.recount()",
        "a tier serves what was computed before a reset",
    ),
    Mutant(
        "doubtful-served-after-restart",
        "F8",
        "tiers/records.py",
        "doubtful = not trusted or generation & DOUBTFUL",
        "doubtful = 0",
        "what was computed with weights put into memory is served after a restart",
    ),
    Mutant(
        "weights-not-in-the-name",
        "F8",
        "vllm/identity.py",
        '"weights": weights_of(model),',
        '"weights": "",',
        "other weights are served what the old ones computed",
    ),
    Mutant(
        "discards-untold",
        "F10",
        "scheduler/lower_tiers.py",
        "discards=self._ladder.take_discards(),",
        "discards=self._ladder.take_discards()[:0],",
        "what is evicted stays on the disk, in no book",
    ),
    Mutant(
        "written-on-slots-kept",
        "F10",
        "manager/ladder.py",
        "self.host.release(write.slots.slots)",
        "self.host.release(write.slots.slots[1:])",
        "a slot that was written on is never free again",
    ),
    Mutant(
        "promoted-kept-for-ever",
        "F10",
        "scheduler/promotions.py",
        "self._ladder.host.let_go(handle)",
        "self._ladder.host.let_go(0)",
        "what was brought back for a request can never leave",
    ),
    Mutant(
        "promotions-without-budget",
        "F7",
        "scheduler/promotions.py",
        "return most - self._open_count - self._kept_count",
        "return most",
        "requests that wait take all of host memory",
    ),
    Mutant(
        "nothing-brought-back",
        "F4",
        "scheduler/promotions.py",
        "if below < above + geometry.restore_interval:",
        "if below < above + 64 * geometry.restore_interval:",
        "tiers are only ever written",
    ),
    Mutant(
        "inventory-not-taken-in",
        "F4",
        "manager/warming.py",
        "self.found_count += self._tier.found(run, self._visit)",
        "self.found_count += len(run)",
        "after a restart nothing of the disk is known",
    ),
    Mutant(
        "removal-below-untold",
        "F10",
        "manager/lower.py",
        "if self._with_events and (names := self._catalog.names(self.index)):",
        "if self._with_events and (names := self._catalog.names(self.index)[1:]):",
        "a router believes that a reset left something below",
    ),
    # A tier that others use too: what it says is a hint, and what is in it is not ours alone.
    Mutant(
        "held-back-for-ever",
        "F7",
        "scheduler/probes.py",
        "if now_s < state.below.asked_s + self._wait_s:",
        "if now_s < state.below.asked_s + 40 * self._wait_s:",
        "a request waits two seconds for a store that does not answer",
        "shared",
    ),
    Mutant(
        "held-back-for-the-slow",
        "F7",
        "scheduler/probes.py",
        "if not any(self._prober.answer_s(one.tier.index) <= self._wait_s for one in questions):",
        "if not questions:",
        "every request waits for a store that is known to be slow",
        "shared",
    ),
    Mutant(
        "answers-in-the-wrong-place",
        "F3",
        "scheduler/probes.py",
        "return question.tier.note_presence(run.between(answer.start, stop), present, question.visit)",
        "return question.tier.note_presence(run.between(run.start, run.start + there), present[:there], 0)",
        "what a store says of later chunks is taken for earlier ones",
        "shared",
    ),
    Mutant(
        "asked-after-a-reset",
        "F8",
        "scheduler/probes.py",
        "self._silent = self._silent or not keeps",
        "self._silent = False",
        "a server with other weights in memory goes by what is there of the old ones",
        "shared",
    ),
    Mutant(
        "questions-never-end",
        "F10",
        "scheduler/probes.py",
        "if answer.last:",
        "if answer.last and answer.present:",
        "questions that were answered are remembered for ever",
        "shared",
    ),
    Mutant(
        "absent-stays-in-the-books",
        "F5",
        "manager/shared.py",
        "super().lose(run, run.start + at)",
        "pass",
        "what a store says not to have is read again and again",
        "shared",
    ),
    Mutant(
        "present-not-taken-in",
        "F4",
        "manager/shared.py",
        "changed |= bool(self.found(run.between(run.start + start, run.start + stop), visit))",
        "changed |= start > stop",
        "a shared tier is only ever written: nobody finds what others wrote",
        "shared",
    ),
    Mutant(
        "hints-never-stale",
        "F5",
        "manager/shared.py",
        "sure = places >= TICKETS + self.now_s - CONFIRMED_FOR_S",
        "sure = places >= 0",
        "what a store said once is taken to be so for ever",
        "shared",
    ),
    Mutant(
        "shared-tier-emptied",
        "F9",
        "manager/shared.py",
        '"""Leave it where it is: others may want it, and the store has rules of its own."""',
        "super()._discard(keys)",
        "what leaves our books is deleted for everybody",
        "shared",
    ),
    Mutant(
        "public-after-a-reset",
        "F8",
        "tiers/shared.py",
        "self.generation = xxhash.xxh3_64_intdigest(life) | DOUBTFUL",
        "self.generation = 0",
        "what other weights computed is served to everybody, and what the old ones did to us",
        "shared",
    ),
    Mutant(
        "resets-share-a-name",
        "F8",
        "tiers/shared.py",
        "self._reset_count += 1",
        "self._reset_count = 1",
        "after a second reset what was computed before it is served",
        "shared",
    ),
    Mutant(
        "life-not-in-the-name",
        "F8",
        "tiers/shared.py",
        'life = f"{self._instance}/{self._reset_count}".encode()',
        'life = f"{self._reset_count}".encode()',
        "servers that were reset read one another's records",
        "shared",
    ),
    Mutant(
        "every-replica-writes",
        "F9",
        "spec_tiers.py",
        "writes = tuple(writer == rank and not reads_only for writer in writers_of(identity.shards, rank))",
        "writes = (not reads_only,)",
        "what ranks have alike is written by each of them",
        "shared",
    ),
    Mutant(
        "lead-too-short",
        "F3",
        "jobs.py",
        "lead = tuple(run.between(run.start - run.start % LEAD_ALIGNMENT, run.start).hashes())",
        "lead = tuple(run.between(run.start - run.start % (LEAD_ALIGNMENT // 2), run.start).hashes())",
        "a tier that packs neighbours together looks for them in the wrong place",
        "shared",
    ),
    Mutant(
        "call-of-a-job-begins-anew",
        "F3",
        "transfer/lane_calls.py",
        "return job.between(start + first.index, start + first.index + len(parts))",
        "return job.between(start, start + len(parts))",
        "the second call of a job reads the chunks of the first",
        "shared",
    ),
    Mutant(
        "first-chunk-unasked",
        "F3",
        "transfer/prober.py",
        "at, stop, size = run.start, run.start + len(run), FIRST_KEYS",
        "at, stop, size = run.start + 1, run.start + len(run), FIRST_KEYS",
        "the first chunk is never asked for, and what follows it never found",
        "shared",
    ),
    Mutant(
        "names-without-limit",
        "F7",
        "transfer/tier_hops.py",
        "return (seat.names_limit or 0) * max(seat.record_bytes)",
        "return 1 << 50",
        "the books of a shared tier grow without end",
        "shared",
    ),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one mutant, or of the unchanged code.

    Attributes:
        caught: A walk found a promise broken.
        by: Configuration and seed of that walk; else why there is none.
        found: ``wrong bytes``, ``hangs`` or ``leaks``; empty when nothing was found.
        seconds: How long it took, importing vLLM included.
        walked: The simulation ran until then: it neither fell over nor could not begin.
    """

    caught: bool
    by: str
    found: str
    seconds: float
    walked: bool = True


def mutate(mutant: Mutant, source: Path) -> None:
    """Break the copy of ``src`` at ``source``."""
    file = source / "kvtide" / mutant.file
    file.write_text(mutant.applied(file.read_text(encoding="utf-8")), encoding="utf-8")


def walked(mutant: Mutant | None, limit_s: float, tiers: str = "") -> Verdict:
    """Walk with a copy of the code, broken or not, until something is found."""
    tiers = tiers if mutant is None else mutant.tiers
    with tempfile.TemporaryDirectory(prefix="kvtide-mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            mutate(mutant, source)
        chosen = [part for name in CONFIGURATIONS for part in ("--configuration", name)]
        budget = ["--steps", str(STEPS), "--walk-steps", str(WALK_STEPS), "--processes", "1"]
        budget += ["--tiers", tiers] if tiers else []
        began_s = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtide.vllm.testing.sim", *budget, *chosen],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(source), "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        late = threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        alarm = threading.Timer(limit_s, give_up)
        alarm.start()
        try:
            return _listen(process, began_s, late)
        finally:
            alarm.cancel()
            process.kill()
            process.wait()


def _listen(process: "subprocess.Popen[str]", began_s: float, late: threading.Event) -> Verdict:
    """Read what a simulation says up to the first walk that ended badly, which makes it exit with 1."""
    assert process.stdout is not None
    kinds, said = ("wrong bytes", "hangs", "leaks"), ""
    found = by = ""
    for line in process.stdout:
        said = line.strip() or said
        kind, _, rest = said.partition(": ")
        if kind in kinds and ", seed " in rest:
            found, by = kind, rest
        if said.startswith("repeat with: ") and found:
            return Verdict(True, by, found, time.monotonic() - began_s)
    seconds = time.monotonic() - began_s
    if late.is_set():
        return Verdict(False, f"nothing found within {seconds:.0f} s", "", seconds)
    if process.wait():
        return Verdict(False, f"fell over: {said}", "", seconds, walked=False)
    return Verdict(False, f"nothing found in {STEPS} steps", "", seconds)


def check_applies(mutants: Sequence[Mutant]) -> None:
    """Check that every line is where the list says.

    Raises:
        OutOfDateError: One is not.
    """
    for mutant in mutants:
        mutant.applied((SOURCE / "kvtide" / mutant.file).read_text(encoding="utf-8"))


def table(verdicts: Sequence[tuple[Mutant, Verdict]]) -> str:
    """Show what became of each mutant."""
    rows = [("kind", "mutant", "found", "by", "s")]
    rows += [
        (mutant.kind, mutant.name, verdict.found or "NOT CAUGHT", verdict.by, f"{verdict.seconds:.0f}")
        for mutant, verdict in verdicts
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="this mutant; may be given again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what became of each there")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help=f"for each ({LIMIT_S:.0f})")
    parser.add_argument("--list", action="store_true", help="name the mutants and end")
    asked = parser.parse_args(arguments)
    if asked.list:
        print("\n".join(f"{one.kind:4s} {one.name:28s} {one.breaks}" for one in MUTANTS))
        return 0
    chosen = [one for one in MUTANTS if not asked.only or one.name in asked.only]
    if unknown := set(asked.only or ()) - {one.name for one in chosen}:
        parser.error(f"no mutant is called {', '.join(sorted(unknown))}: see --list")
    try:
        check_applies(MUTANTS)
    except OutOfDateError as error:
        print(f"the list of mutants is out of date: {error}", file=sys.stderr)
        return 2
    for tiers in sorted({one.tiers for one in chosen}):
        unchanged = walked(None, 10 * asked.limit_s, tiers)
        if unchanged.caught or not unchanged.walked:
            print(f"the unchanged code does not pass: {unchanged.found} {unchanged.by}", file=sys.stderr)
            return 2
        print(f"unchanged, {tiers or 'any tiers'}: {unchanged.by}, {unchanged.seconds:.0f} s", flush=True)
    verdicts = dict(_verdicts(chosen, asked.jobs, asked.limit_s))
    by_order = [(one, verdicts[one]) for one in chosen]
    print(table(by_order))
    for mutant, verdict in by_order:
        if not verdict.caught:
            print(f"not caught: {mutant.kind} {mutant.name}: {mutant.breaks}")
    if asked.json is not None:
        records = [asdict(mutant) | asdict(verdict) for mutant, verdict in by_order]
        asked.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    caught = sum(verdict.caught for verdict in verdicts.values())
    print(f"caught {caught} of {len(chosen)}")
    if not all(verdict.walked for verdict in verdicts.values()):
        return 2
    return 0 if caught == len(chosen) else 1


def _verdicts(mutants: Sequence[Mutant], jobs: int, limit_s: float) -> list[tuple[Mutant, Verdict]]:
    """Walk with each mutant, several at a time, telling how it goes."""
    verdicts = []
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(walked, mutant, limit_s): mutant for mutant in mutants}
        for count, future in enumerate(as_completed(futures), 1):
            mutant, verdict = futures[future], future.result()
            told = f"{verdict.found} by {verdict.by}" if verdict.caught else f"NOT CAUGHT: {verdict.by}"
            print(f"{count:3d}/{len(mutants)} {mutant.kind} {mutant.name}: {told}", flush=True)
            verdicts.append((mutant, verdict))
    return verdicts


if __name__ == "__main__":
    sys.exit(main())
