"""The modelled engine's loop: a step is planned, told, computed and answered, and time goes on.

Holds the production scheduler half between a queue (who runs) and media (who copies), and calls it in vLLM's
order. Knows seconds; neither blocks nor bytes.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kvtide.errors import ConfigError
from kvtide.jobs import JobId, StorageLoadStoreSpec, TransferJob
from kvtide.scheduler.scheduler import OffloadingConnectorScheduler
from kvtide.sim.serving_media import Media
from kvtide.sim.serving_queue import EngineQueue
from kvtide.sim.serving_rates import EngineRates
from kvtide.sim.serving_request import ServedRequest, ServedStep
from kvtide.sim.traces.request import TraceRequest

LONGEST_NAP_S = 0.02
"""An engine that waits for a copy looks again after so long: somebody's patience may have ended."""

STUCK_STEPS = 1_000_000
"""So many steps in a row that compute nothing mean that nobody will ever go on."""


@dataclass(slots=True)
class Served:
    """What happened.

    Attributes:
        requests: In the order in which they ended.
        step_count: Steps that computed something; a row of decode steps counts as what it stands for.
        busy_s: What they took.
        computed_tokens: Of prompts, those of preempted requests each time.
        now_s: When the last thing had happened.
    """

    requests: list[ServedRequest] = field(default_factory=list)
    step_count: int = 0
    busy_s: float = 0.0
    computed_tokens: int = 0
    now_s: float = 0.0


class ServingEngine:
    """One engine with its scheduler half.

    Args:
        half: The production code.
        queue: Who runs.
        media: Who copies.
        rates: How long things take.
    """

    def __init__(
        self, half: OffloadingConnectorScheduler, queue: EngineQueue, media: Media, rates: EngineRates
    ) -> None:
        self._half = half
        self._queue = queue
        self._media = media
        self._rates = rates
        self._arrivals: Iterator[ServedRequest] = iter(())
        self._next: ServedRequest | None = None
        self.served = Served()

    def run(self, requests: Iterable[TraceRequest], seen: Callable[[int], None]) -> Served:
        """Serve a trace until its last request has ended and nothing is copied any more.

        Args:
            requests: In the order of their arrival.
            seen: Is told now and then how many have ended.
        """
        self._arrivals = (ServedRequest.of(asked, index) for index, asked in enumerate(requests))
        self._next = next(self._arrivals, None)
        now_s, without_work = 0.0, 0
        while True:
            if self._queue.is_idle and not self._half.has_pending_push_work(now_s):
                if self._next is not None:
                    now_s = max(now_s, self._arrival_s)
                elif self._media.next_end_s == math.inf:
                    break
            self._let_arrive(now_s)
            step = self._queue.plan(now_s)
            now_s = self._step(step, now_s)
            without_work = 0 if step.num_scheduled_tokens else without_work + 1
            if without_work > STUCK_STEPS:
                raise ConfigError("trace", len(self.served.requests), "nobody goes on after so many requests")
            if not len(self.served.requests) % 64:
                seen(len(self.served.requests))
        self.served.now_s = now_s
        seen(len(self.served.requests))
        return self.served

    # -- time ---------------------------------------------------------------------------------------

    @property
    def _arrival_s(self) -> float:
        """When the next request is queued."""
        return math.inf if self._next is None else self._next.asked.arrival_s + self._rates.front_s

    def _let_arrive(self, now_s: float) -> None:
        while self._next is not None and self._arrival_s <= now_s:
            self._queue.arrive(self._next, now_s)
            self._next = next(self._arrivals, None)

    def _step(self, step: ServedStep, now_s: float) -> float:
        """Make one step and say when it has ended."""
        half, media, queue = self._half, self._media, self._queue
        if step.decoding and not step.prompts:
            queue.decode_more(step, self._decodes_until_news(step, now_s))
        told = half.build_connector_meta(step, now_s)
        begin_s = media.begin_step(told, now_s)
        if step.num_scheduled_tokens:
            end_s = begin_s + self._duration_s(step)
            self._note(step, end_s - now_s)
            media.start_loads(told, end_s)
        else:
            media.start_loads(told, begin_s)
            end_s = begin_s + self._nap_s(begin_s)
        for request in queue.compute(step):
            request.first_token_s = end_s
        answers = media.progress(end_s)
        for job in media.brought:
            self._note_brought(job)
        media.brought.clear()
        self.served.requests += queue.finish(end_s)
        failed = self._ended_loads(told.jobs_to_give_up)
        half.update_connector_output(answers, end_s, failed)
        return end_s

    def _duration_s(self, step: ServedStep) -> float:
        rates, count = self._rates, step.decode_count
        seconds = count * rates.step_s
        for _, before, tokens in step.prompts:
            seconds += rates.prompt_s(before, tokens)
        if step.decoding:
            # Each step has a token more before it than the one before.
            context: float = sum([one.num_tokens for one in step.decoding])
            context += len(step.decoding) * (count - 1) / 2
            seconds += count * rates.decode_step_s(len(step.decoding), context)
        return seconds

    def _decodes_until_news(self, step: ServedStep, now_s: float) -> int:
        """Count the decode steps until something happens that they would hear of."""
        if self._queue.deferred:
            return 1
        news_s = self._arrival_s
        if self._queue.loading or self._queue.waiting:
            news_s = min(news_s, self._media.next_end_s)
        if news_s == math.inf:
            return 1 << 30
        each_s = self._duration_s(step)
        return max(1, math.ceil((news_s - now_s) / each_s)) if each_s > 0 else 1

    def _nap_s(self, now_s: float) -> float:
        """Say how long an engine rests that has nothing to compute."""
        if self._media.needs_step:
            return self._rates.idle_s
        rest_s = min(self._arrival_s, self._media.next_end_s) - now_s
        if not self._queue.is_idle or rest_s == math.inf:
            rest_s = min(rest_s, LONGEST_NAP_S)
        return max(1, math.ceil(rest_s / self._rates.idle_s)) * self._rates.idle_s

    # -- what is noted ------------------------------------------------------------------------------

    def _note(self, step: ServedStep, lasted_s: float) -> None:
        served = self.served
        served.step_count += step.decode_count
        served.busy_s += lasted_s
        served.computed_tokens += sum(tokens for _, _, tokens in step.prompts)

    def _note_brought(self, job: TransferJob) -> None:
        below = job.hops[0].source
        assert isinstance(below, StorageLoadStoreSpec)
        self._queue.brought.update(dict.fromkeys(below.hashes, below.tier))

    def _ended_loads(self, given_up: Iterable[JobId]) -> list[str]:
        """Have requests go on whose loads have ended; names those whose load has failed."""
        failed = [name for name in self._given_up_names(given_up) if self._queue.end_load(name, False)]
        for name, well in self._media.ended_loads:
            if self._queue.end_load(name, well) and not well:
                failed.append(name)
        self._media.ended_loads.clear()
        return failed

    def _given_up_names(self, job_ids: Iterable[JobId]) -> list[str]:
        return [name for job_id in job_ids if (name := self._media.load_of(job_id)) is not None]
