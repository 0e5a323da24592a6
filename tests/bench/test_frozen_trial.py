"""The judge of frozen tiers, on planted rounds; and that what is frozen really hangs."""

import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from frozen.hooks import HookClock, SlowCall
from frozen.judge import ARMS, TIER, WITHOUT, Round, UnfitError, judge
from frozen.media import HeldMemory, ThrottledDisk, stuck_threads

NOISE = (100.0, 110.0, 90.0, 105.0, 95.0, 300.0, 120.0, 80.0, 100.0, 100.0)


def planted(rounds: int = 30) -> list[Round]:
    """Rounds in which nobody notices anything; the tier is left out from the third on."""
    return [
        Round(
            index,
            arm,
            NOISE,
            ("",) * len(NOISE),
            (
                SlowCall("scheduler.build_connector_meta", 1.5, 0.5),
                SlowCall("worker.start_load_kv", 0.2, 0.2),
            ),
            200,
            index < 2 if arm == TIER else None,
            4 if arm == TIER else 0,
            {"tier_errors{disk,late}": 4.0} if arm == TIER else {},
            0.05,
        )
        for index in range(rounds)
        for arm in ARMS
    ]


def changed(index: int, arm: str = TIER, **changes: object) -> list[Round]:
    return [replace(one, **changes) if (one.index, one.arm) == (index, arm) else one for one in planted()]


def test_nobody_noticed() -> None:
    verdict = judge(planted())
    assert verdict.passed
    assert verdict.requests == {TIER: 300, WITHOUT: 300}
    assert verdict.ttft_ratio == 1
    assert verdict.left_out_after == 2
    assert str(verdict) == (
        "requests 300 + 300, p95 time to first token 1.000 (at most 1.10),"
        " slowest hook 0.50 ms (at most 5), failed requests 0 (0)"
    )


def test_a_few_late_requests_are_within_the_95th_percentile_and_many_are_not() -> None:
    few = tuple(2_000.0 if at < 6 else one for at, one in enumerate(NOISE))
    assert judge(changed(0, ttft_ms=few)).ttft_ratio == pytest.approx(1, abs=0.01)
    many = [replace(one, ttft_ms=few) if one.arm == TIER and one.index < 5 else one for one in planted()]
    verdict = judge(many)
    assert verdict.ttft_ratio > 5
    assert not verdict.passed


@pytest.mark.parametrize(("own_ms", "passed"), [(5.0, True), (5.01, False)])
def test_one_slow_hook_is_enough_and_waiting_for_a_core_is_none(own_ms: float, passed: bool) -> None:
    verdict = judge(changed(17, slowest=(SlowCall("worker.wait_for_save", 40.0, own_ms),)))
    assert verdict.passed is passed
    assert verdict.slowest.hook == "worker.wait_for_save"


def test_a_slow_hook_without_the_tier_is_not_the_tiers() -> None:
    assert judge(changed(17, WITHOUT, slowest=(SlowCall("worker.wait_for_save", 40.0, 40.0),))).passed


@pytest.mark.parametrize("arm", ARMS)
def test_one_failed_request_is_enough(arm: str) -> None:
    failed = ("abort", *[""] * (len(NOISE) - 1))
    verdict = judge(changed(4, arm, failed=failed, ttft_ms=(None, *NOISE[1:])))
    assert not verdict.passed
    assert verdict.failures == (f"round 4, {arm}: abort",)


def test_a_reader_can_see_how_many_rounds_the_neighbours_spoiled() -> None:
    assert judge(planted()).quiet_rounds == 30
    assert judge(changed(3, WITHOUT, others_cores=0.5)).quiet_rounds == 29


def test_too_few_requests_are_not_judged() -> None:
    with pytest.raises(UnfitError, match="290 requests a side; 300 are needed"):
        judge(planted(29))


def test_unequal_work_is_not_judged() -> None:
    with pytest.raises(UnfitError, match="not do the same work"):
        judge(planted()[:-1])


def kept(**changes: object) -> list[Round]:
    """Rounds in which the tier is kept, and by itself nothing tells of trouble."""
    nothing = {"in_service": True, "stuck_threads": 0, "counted": {"tier_hit_chunks{disk}": 5.0}}
    return [replace(one, **(nothing | changes)) if one.arm == TIER else one for one in planted()]


def test_a_tier_that_answered_is_not_judged() -> None:
    with pytest.raises(UnfitError, match="nothing was frozen"):
        judge(kept())
    with pytest.raises(UnfitError, match="nothing was frozen"):
        judge(kept(counted={"tier_errors{disk,miss}": 3.0, "tier_probes{disk}": 3.0}))


@pytest.mark.parametrize(
    "felt",
    [
        {"stuck_threads": 1},
        {"held_count": 1},
        {"counted": {"tier_errors{valkey,unavailable}": 1.0}},
        {"counted": {"tier_errors{valkey,late}": 1.0}},
        {"counted": {"tier_probes_late{valkey}": 1.0}},
        {"counted": {"tier_passed_over_chunks{valkey}": 1.0}},
    ],
)
def test_a_tier_that_is_kept_is_judged_when_somebody_missed_it(felt: dict[str, object]) -> None:
    assert judge(kept(**felt)).left_out_after is None


def test_two_engines_without_a_tier_are_judged_too_as_a_control() -> None:
    assert judge([replace(one, in_service=None, stuck_threads=0, counted={}) for one in planted()]).passed


def test_what_came_from_the_tier_all_the_same_is_told() -> None:
    counted = {"tier_hit_chunks{disk}": 5.0, "tier_probes{disk}": 0.0}
    assert judge(kept(held_count=1, counted=counted)).counted == {"tier_hit_chunks{disk}": 5.0}


def test_hooks_that_were_never_called_are_not_judged() -> None:
    with pytest.raises(UnfitError, match="no hook was called"):
        judge([replace(one, slowest=()) for one in planted()])


def test_a_hook_that_waits_is_slow_and_its_slowest_call_is_kept() -> None:
    class Connector:
        def hook(self, wait_s: float) -> float:
            time.sleep(wait_s)
            return wait_s

    connector, clock = Connector(), HookClock()
    clock.watch(connector, "worker", ("hook",))
    assert [connector.hook(wait_s) for wait_s in (0.0, 0.02, 0.001)] == [0.0, 0.02, 0.001]
    (slowest,), count = clock.take()
    assert count == 3
    assert slowest.hook == "worker.hook"
    assert slowest.own_ms > 15
    assert clock.take() == ([], 0)


def test_held_memory_is_a_setting_and_a_file(tmp_path: Path) -> None:
    medium = HeldMemory(tmp_path)
    (tier,) = medium.settings()["tiers"]
    switch = Path(tier["options"]["switch"])
    assert not switch.exists()
    medium.freeze(os.getpid())
    assert switch.exists()
    medium.close()
    assert not switch.exists()


@pytest.mark.skipif(bool(ThrottledDisk.why_not()), reason=ThrottledDisk.why_not() or "it can be had")
def test_reads_of_a_throttled_disk_hang_until_it_thaws(tmp_path: Path) -> None:
    medium = ThrottledDisk(tmp_path)
    try:
        path = Path(medium.settings()["disk"])
        path.write_bytes(bytes(1 << 20))
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        medium.freeze(os.getpid())
        reader = threading.Thread(target=os.read, args=(descriptor, 1 << 20))
        reader.start()
        reader.join(0.5)
        assert reader.is_alive()
        assert stuck_threads(os.getpid()) == 1
        medium.thaw()
        reader.join(10)
        assert not reader.is_alive()
        os.close(descriptor)
    finally:
        medium.close()
    assert list(tmp_path.iterdir()) == [tmp_path / "disk"]
