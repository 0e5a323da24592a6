"""What the scheduler half tells the adviser: once when a request comes, once when it ends."""

from collections.abc import Mapping, Sequence

import pytest
from fakes import FakeRequest, FakeStep

from kvtide.adviser.ghosts import Ghosts, split
from kvtide.advising import Adviser, Arrival, GhostPlan, GhostTier, Growth, HashView
from kvtide.config import KVTideConfig, TierSettings
from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry
from kvtide.jobs import OffloadingWorkerMetadata, PoolReport
from kvtide.manager.cpu import CPUOffloadingManager
from kvtide.metrics import MetricsDelta
from kvtide.policies import LRUPolicy
from kvtide.scheduler.pace import LoadPace
from kvtide.scheduler.scheduler import OffloadingConnectorScheduler
from kvtide.scheduler.state import SchedulerOffloadConfig
from kvtide.spec_tiers import ghost_tiers

FULL = GroupGeometry(0, GroupKind.FULL_ATTENTION, 4, 2, 4)
WINDOW = GroupGeometry(1, GroupKind.SLIDING_WINDOW, 4, 4, 4, window_tokens=33)
HOST = GhostTier("host", "lru", 0)


class Listener(Adviser):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.plans: list[GhostPlan] = []
        self.arrivals: list[Arrival] = []
        self.growths: list[Growth] = []
        self.resets = 0
        self.answers: list[Mapping[str, float]] = []
        self.closed = False

    def planned(self, plan: GhostPlan) -> None:
        self.plans.append(plan)

    def arrived(self, arrival: Arrival, chunks: HashView) -> None:
        assert chunks.chunk_count == len(split(chunks.fingerprints()))
        self.arrivals.append(arrival._replace(chunks=chunks.fingerprints()))

    def grown(self, growth: Growth, chunks: HashView) -> None:
        assert chunks.chunk_count == len(split(chunks.fingerprints()))
        self.growths.append(growth._replace(chunks=chunks.fingerprints()))

    def forget(self) -> None:
        self.resets += 1

    def take(self) -> Sequence[Mapping[str, float]]:
        answers, self.answers = self.answers, []
        return answers

    def close(self) -> None:
        self.closed = True


def scheduler_of(
    listener: Listener, groups: tuple[GroupGeometry, ...] = (FULL,), slots: int = 40, **limits: object
) -> OffloadingConnectorScheduler:
    config = SchedulerOffloadConfig(KVGeometry(groups), **limits)  # type: ignore[arg-type]
    scheduler = OffloadingConnectorScheduler(
        config, CPUOffloadingManager(LRUPolicy()), MetricsDelta(), adviser=listener, ghost_tiers=[HOST]
    )
    report_pool(scheduler, slots)
    return scheduler


def report_pool(scheduler: OffloadingConnectorScheduler, slots: int) -> None:
    pools = {0: PoolReport(1, slots, 64)}
    scheduler.update_connector_output(OffloadingWorkerMetadata({}, pools=pools), 0.0)


def ended(scheduler: OffloadingConnectorScheduler, request: FakeRequest, computed: int, more: int) -> None:
    """Let a request compute so many tokens, answer with more, and end."""
    request.tokens += range(9000, 9000 + more)
    request.__post_init__()
    request.num_computed_tokens = computed
    scheduler.request_finished_all_groups(request, ([],), 9.0)


def test_an_arrival_names_every_whole_chunk_of_the_prompt_once() -> None:
    listener = Listener()
    scheduler = scheduler_of(listener)
    request = FakeRequest("a", list(range(27)))
    for _ in range(2):
        scheduler.on_new_request(request, 5.0)
    [arrival] = listener.arrivals
    assert (arrival.now_s, arrival.token_count) == (5.0, 27)
    assert split(arrival.chunks) == [request.block_hashes[at][:8] for at in (1, 3, 5)]


def test_what_was_generated_follows_as_far_as_it_was_computed() -> None:
    listener = Listener()
    scheduler = scheduler_of(listener)
    request = FakeRequest("a", list(range(20)))
    scheduler.on_new_request(request, 0.0)
    ended(scheduler, request, computed=39, more=20)
    [growth] = listener.growths
    assert growth.visit == listener.arrivals[0].visit
    assert split(growth.chunks) == [request.block_hashes[at][:8] for at in (5, 7)]


def test_with_offload_prompt_only_nothing_has_grown() -> None:
    listener = Listener()
    scheduler = scheduler_of(listener, offload_prompt_only=True)
    request = FakeRequest("a", list(range(20)))
    scheduler.on_new_request(request, 0.0)
    ended(scheduler, request, computed=39, more=20)
    assert listener.growths == [Growth(1, b"")]


def test_a_request_that_reads_no_cache_is_nobody_s_miss() -> None:
    listener = Listener()
    scheduler = scheduler_of(listener)
    request = FakeRequest("a", list(range(20)), skip_reading_prefix_cache=True)
    scheduler.on_new_request(request, 0.0)
    ended(scheduler, request, computed=20, more=0)
    assert listener.arrivals == listener.growths == []


def test_an_adviser_that_is_off_is_told_nothing() -> None:
    listener = Listener()
    scheduler = scheduler_of(listener)
    scheduler.on_new_request(FakeRequest("a", list(range(20))), 0.0)
    listener.is_on = False
    scheduler.on_new_request(FakeRequest("b", list(range(20))), 0.0)
    assert len(listener.arrivals) == 1


def test_sizes_are_what_host_memory_will_be_and_are_said_again_when_they_have_changed() -> None:
    listener = Listener()
    scheduler = scheduler_of(listener, slots=40)
    for index in range(65):
        scheduler.on_new_request(FakeRequest(f"a{index}", list(range(9))), 0.0)
    report_pool(scheduler, 49)  # not worth beginning anew
    for index in range(65):
        scheduler.on_new_request(FakeRequest(f"b{index}", list(range(9))), 0.0)
    report_pool(scheduler, 80)
    for index in range(65):
        scheduler.on_new_request(FakeRequest(f"c{index}", list(range(9))), 0.0)
    assert [plan.tiers[0].chunk_count for plan in listener.plans] == [40, 80]
    assert {plan.tokens_per_chunk for plan in listener.plans} == {8}


@pytest.mark.parametrize(("interval", "chunks"), [(0, 40), (64, 60)])
def test_several_groups_share_the_slots(interval: int, chunks: int) -> None:
    listener = Listener()
    scheduler = scheduler_of(listener, (FULL, WINDOW), slots=60, restore_interval_tokens=interval)
    scheduler.on_new_request(FakeRequest("a", list(range(40))), 0.0)
    assert listener.plans[0].tiers[0].chunk_count == chunks


def test_a_reset_is_told_and_answers_join_the_metrics() -> None:
    listener = Listener()
    scheduler = scheduler_of(listener)
    scheduler.metrics().take()
    scheduler.reset_cache()
    listener.answers = [{"ghost_requests|": 2}, {"ghost_requests|": 3}]
    assert scheduler.metrics().take()["ghost_requests|"] == 5
    scheduler.close()
    assert (listener.resets, listener.closed) == (1, True)


def test_the_pace_of_computing_goes_along() -> None:
    listener = Listener()
    scheduler = scheduler_of(listener)
    scheduler.build_connector_meta(FakeStep({"a": 500}), 10.0)
    scheduler.update_connector_output(None, 11.0)
    scheduler.on_new_request(FakeRequest("a", list(range(9))), 0.0)
    assert listener.arrivals[0].paces.compute_s == pytest.approx(1 / 500)
    assert listener.arrivals[0].paces.load_s == 0.0


def test_the_pace_of_loads_is_that_of_the_last_ones() -> None:
    pace = LoadPace()
    assert pace.seconds_for(1) is None
    pace.loaded(1000, 1.0)
    assert pace.seconds_for(10) == pytest.approx(0.01)
    for _ in range(200):
        pace.loaded(1000, 2.0)
    assert pace.seconds_for(1000) == pytest.approx(2.0, rel=1e-3)


def test_what_the_next_turn_asks_for_is_what_the_last_one_left() -> None:
    """Ghosts that hear what the scheduler says hit prompt and answer."""
    listener = Listener()
    scheduler = scheduler_of(listener)
    first = FakeRequest("a", list(range(20)))
    scheduler.on_new_request(first, 0.0)
    ended(scheduler, first, computed=39, more=20)
    scheduler.on_new_request(FakeRequest("b", [*first.tokens, *range(70, 90)]), 10.0)
    ghosts = Ghosts(listener.plans[0])
    ghosts.feed(listener.arrivals[0])
    ghosts.grown(listener.growths[0])
    ghosts.feed(listener.arrivals[1])
    assert ghosts.answers()["ghost_hit_tokens|host,1"] == 32


def test_ghosts_are_kept_of_private_tiers_alone() -> None:
    config = KVTideConfig.model_validate(
        {
            "host_memory": "1GiB",
            "store_threshold": 2,
            "disk": "/tmp/x",
            "disk_limit": "1GiB",
            "disk_demotion": "on_eviction",
            "disk_eviction_policy": "lru",
            "tiers": [TierSettings.model_validate({"class": "directory", "options": {"path": "/tmp/y"}})],
        }
    )
    assert ghost_tiers(config) == [
        GhostTier("host", "adaptive", 0, 2),
        GhostTier("disk", "lru", 0, 2, extends_host=True),
    ]
