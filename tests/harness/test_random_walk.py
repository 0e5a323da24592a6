"""Seeded walks over the harness: whatever happens in whatever order, no wrong byte is read, every request
ends with the tokens a run without kvtide gives, and at the end nothing is left open.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvtide.vllm.testing import Harness
from kvtide.vllm.testing.model import PatternModel

SEEDS = range(24)
ACTIONS = 220


@dataclass
class Walk:
    """One walk; ``random`` is the only source of choice, so the seed repeats it."""

    harness: Harness
    random: random.Random
    happened: Counter[str] = field(default_factory=Counter)
    prompts: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)

    def add(self) -> None:
        if len(self.harness.scheduler.requests) > 9:
            return
        stem = [self.random.randrange(4) * 11 + i for i in range(self.random.choice((0, 8, 20, 40)))]
        tail = [self.random.randrange(90) for _ in range(self.random.randrange(1, 12))]
        prompt, count = stem + tail, self.random.randrange(1, 10)
        if self.prompts and self.random.random() < 0.4:
            earlier, _ = self.random.choice(list(self.prompts.values()))
            prompt = earlier + PatternModel.answer(earlier, 3)[: self.random.randrange(4)]
        prompt = prompt[:90]
        request_id = f"r{len(self.prompts)}"
        self.prompts[request_id] = prompt, count
        skip = self.random.random() < 0.1
        self.harness.add(request_id, prompt, count, skip_reading_prefix_cache=skip)

    def abort(self) -> None:
        if self.harness.scheduler.requests:
            victim = self.random.choice(sorted(self.harness.scheduler.requests))
            self.aborted.add(victim)
            self.harness.abort(victim)

    def step(self) -> None:
        step = self.harness.step()
        self.happened["preemption"] += len(step.preempted_req_ids or ())
        self.happened["flush"] += len(step.kv_connector_metadata.step.jobs_to_flush)

    def end_copy(self) -> None:
        copier = self.random.choice((self.harness.store, self.harness.load))
        if copier.held:
            job = self.random.choice(copier.held)
            fails = self.random.random() < 0.15
            self.happened[f"{copier.direction.value} {'failed' if fails else 'done'}"] += 1
            (copier.fail if fails else copier.finish)(job)

    def reset(self) -> None:
        self.harness.connector.reset_cache()

    def forget_device(self) -> None:
        self.harness.scheduler.reset_prefix_cache()

    def run(self, actions: int) -> None:
        kinds: list[tuple[Callable[[], None], int]] = [
            (self.step, 50),
            (self.end_copy, 25),
            (self.add, 14),
            (self.abort, 3),
            (self.forget_device, 2),
            (self.reset, 1),
        ]
        for _ in range(actions):
            (action,) = self.random.choices([k for k, _ in kinds], [w for _, w in kinds])
            self.happened[action.__name__] += 1
            action()
            self.harness.check()
        self.harness.drain(600)
        for request_id, (prompt, count) in self.prompts.items():
            answer, given = PatternModel.answer(prompt, count), self.harness.outputs[request_id]
            assert given == (answer[: len(given)] if request_id in self.aborted else answer), request_id
        assert self.harness.errors == []


HAPPENED: Counter[str] = Counter()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_walk_ends_with_right_tokens_and_empty_books(build: Callable[..., Harness], seed: int) -> None:
    chance = random.Random(seed)
    harness = build(
        num_blocks=chance.choice((28, 40)),
        host_pages=chance.choice((1, 2, 8)),
        budget_tokens=chance.choice((16, 33, 128)),
        blocks_per_chunk=chance.choice((1, 1, 2, 3)),
        block_first=chance.random() < 0.5,
        store_threshold=chance.choice((1, 1, 2)),
        flush_limit_s=0.01,
        defer_limit_s=chance.choice((0.0, 0.05)),
    )
    walk = Walk(harness, chance)
    walk.run(ACTIONS)
    HAPPENED.update(walk.happened)
    HAPPENED["hit tokens"] += int(harness.counted.data.get("hit_tokens|host", 0))


def test_everything_happened_that_can() -> None:
    """A walk that never preempts, flushes, fails or hits would prove nothing."""
    if not HAPPENED:
        pytest.skip("runs after the walks")
    kinds = ("preemption", "flush", "store failed", "load failed", "load done", "reset", "hit tokens")
    assert {kind: HAPPENED[kind] for kind in kinds if HAPPENED[kind] < 5} == {}
