"""A scheduler half over shared tiers, and a prober that answers what a test says, when it says so."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from fakes import FakeRequest, FakeStep

from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry
from kvtide.jobs import (
    HopResult,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    PartFate,
    PoolReport,
    ReqContext,
    StorageLoadStoreSpec,
    TierReport,
    TransferJob,
)
from kvtide.manager.catalog import CatalogGroup
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.manager.ladder import Ladder
from kvtide.manager.lower import Demotion, LowerTier, TierPlan
from kvtide.manager.shared import SharedTierBooks
from kvtide.metrics import MetricsDelta
from kvtide.policies import LRUPolicy
from kvtide.probing import ProbeAnswer, ProbeQuestion, Prober
from kvtide.scheduler.scheduler import OffloadingConnectorScheduler
from kvtide.scheduler.state import SchedulerOffloadConfig

GROUP = GroupGeometry(0, GroupKind.FULL_ATTENTION, 4, 1, 4)
CTX = ReqContext("?")


class ScriptedProber(Prober):
    """Keeps questions until a test answers them.

    Attributes:
        asked: Every question.
        forgotten: Every number that was to be forgotten.
        expected_s: By tier, what ``answer_s`` says; 0 where nothing is said.
    """

    def __init__(self) -> None:
        self.asked: list[ProbeQuestion] = []
        self.forgotten: list[int] = []
        self.expected_s: dict[int, float] = {}
        self.closed = False
        self._answers: deque[ProbeAnswer] = deque()

    def say(self, question: ProbeQuestion, *present: bool, part: int = 0, start: int | None = None) -> None:
        """Answer some of a question, from the first chunk it is about if nothing else is said."""
        first = question.parts[part].chunks.start if start is None and part < len(question.parts) else start
        self._answers.append(ProbeAnswer(question.question_id, part, first or 0, present))

    def end(self, question: ProbeQuestion, *present: bool) -> None:
        """Answer all of a question."""
        if present:
            self.say(question, *present)
        self._answers.append(ProbeAnswer(question.question_id, last=True))

    def ask(self, question: ProbeQuestion) -> None:
        self.asked.append(question)

    def take(self) -> list[ProbeAnswer]:
        answers, self._answers = list(self._answers), deque()
        return answers

    def forget(self, question_ids: Sequence[int]) -> None:
        self.forgotten += question_ids

    def answer_s(self, tier: int) -> float:
        return math.inf if self.closed else self.expected_s.get(tier, 0.0)

    def close(self) -> None:
        self.closed = True


class EnginePool:
    """Of the engine's pool, whether it holds a block."""

    def __init__(self, held: Sequence[bytes]) -> None:
        self._held = set(held)

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> object:
        return [object()] if block_hash in self._held else None


class Half:
    """The scheduler half of one rank, over ``tiers``: ``p`` is a private one, ``s`` a shared one."""

    def __init__(
        self,
        tiers: str = "s",
        groups: tuple[GroupGeometry, ...] = (GROUP,),
        names: int = 10_000,
        is_asked: bool = True,
        **limits: Any,
    ) -> None:
        self.metrics, self.prober, self.now_s = MetricsDelta(), ScriptedProber(), 100.0
        self.geometry = KVGeometry(groups)
        rows = [
            CatalogGroup(self.geometry.positions_per_chunk(group), group.window_chunks) for group in groups
        ]
        policies = [LRUPolicy() for _ in tiers]
        self.manager = CPUOffloadingManager(LRUPolicy(), None, self.metrics, False, rows, policies)
        self.tiers: list[LowerTier] = []
        for index, kind in enumerate(tiers, 1):
            plan = TierPlan(f"{kind}{index}", Demotion.AT_ONCE, 1 << 20, False, kind == "s")
            books = SharedTierBooks if kind == "s" else LowerTier
            self.tiers.append(books(index, plan, self.manager.catalog, rows, 1, self.metrics))
        self.ladder = Ladder(self.manager, self.tiers)
        config = SchedulerOffloadConfig(self.geometry, **limits)
        self.scheduler = OffloadingConnectorScheduler(
            config, self.manager, self.metrics, self.ladder, self.prober if is_asked else None
        )
        self.report(pools={0: PoolReport(1024, 1024, 64)})
        for tier in self.tiers:
            self.serve(tier.index, names=names)

    # -- what the ranks say -------------------------------------------------------------------------

    def report(self, **answers: Any) -> None:
        self.scheduler.update_connector_output(OffloadingWorkerMetadata(**answers), self.now_s)
        self.scheduler.check_invariants()

    def serve(
        self, tier: int = 1, serves: bool = True, names: int = 10_000, chunk_read_s: float = 0.0
    ) -> None:
        costs = (1,) * len(self.geometry.groups)
        self.report(tiers={(0, tier): TierReport(serves, serves, names, costs, chunk_read_s)})

    def end(self, job: TransferJob, *fates: PartFate) -> None:
        """Have the one hop of a job below host memory end, well if nothing is said."""
        key, well = (job.job_id, 0), all(fate is PartFate.DONE for fate in fates)
        self.report(
            results={key: {0: HopResult.DONE if well else HopResult.FAILED}},
            fates={} if well else {key: {0: bytes(fates)}},
        )

    # -- what the engine does -------------------------------------------------------------------------

    def arrive(self, name: str, tokens: Sequence[int], **fields: Any) -> FakeRequest:
        request = FakeRequest(name, list(tokens), **fields)
        self.scheduler.on_new_request(request)
        self.scheduler.check_invariants()
        return request

    def asks(self, request: FakeRequest, after_s: float = 0.0) -> int | None:
        """Have the engine ask for a request that waits; None when it is to wait on."""
        self.now_s += after_s
        found = self.scheduler.get_num_new_matched_tokens(request, 0, self.now_s)[0]
        self.scheduler.check_invariants()
        return found

    def step(self, after_s: float = 0.0, **scheduled: int) -> OffloadingConnectorMetadata:
        self.now_s += after_s
        told = self.scheduler.build_connector_meta(FakeStep(scheduled), self.now_s)
        self.scheduler.check_invariants()
        return told

    def finish(self, request: FakeRequest) -> None:
        self.scheduler.request_finished_all_groups(request, ([],) * len(self.geometry.groups), self.now_s)
        self.scheduler.check_invariants()

    # -- how things stand -----------------------------------------------------------------------------

    def hold(self, request: FakeRequest, chunks: int, tiers: Sequence[int] = (0,)) -> None:
        """Put leading chunks of a prompt into host memory, or into private tiers."""
        run = self.geometry.groups[0].run(request.block_hashes, 0, chunks)
        output = self.manager.prepare_store(run, CTX)
        writes = self.ladder.writes_behind(run, output.store_spec.slots, CTX, None)
        self.manager.complete_store(output.keys_to_store, output.store_spec, CTX, True)
        for write in writes:
            self.ladder.end_write(write, [PartFate.DONE if write.tier in tiers else PartFate.FAILED] * chunks)
        if 0 not in tiers:
            self.manager._evict(10_000)
        self.ladder.take_discards()

    def below(self, request: FakeRequest, tier: int = 1, group: int = 0) -> int:
        """Leading chunks that the books of a tier have."""
        run = self.geometry.groups[group].run(request.block_hashes, 0, len(request.block_hashes))
        return self.manager.catalog.resident(group, run.block_hashes, 0, len(run), tier)

    def count(self, name: str, label: str = "s1") -> float:
        return self.metrics.data.get(f"{name}|{label}", 0)

    @property
    def open_count(self) -> int:
        return self.scheduler._lower._probes.open_count


def chunks_of(question: ProbeQuestion) -> list[tuple[int, int, int]]:
    """Per part, the group and the chunks it is about."""
    parts = [part.chunks for part in question.parts]
    return [(chunks.group_index, chunks.start, chunks.start + len(chunks.hashes)) for chunks in parts]


def promoted(step: OffloadingConnectorMetadata) -> list[tuple[int, int, int]]:
    """Per promotion of a step, its tier and the chunks it brings."""
    found = []
    for job in step.jobs:
        source = job.hops[0].source
        if isinstance(source, StorageLoadStoreSpec):
            found.append((source.tier, source.start, source.start + len(source.hashes)))
    return found
