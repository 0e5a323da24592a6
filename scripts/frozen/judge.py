"""What the trial's rounds say: pure, and able to say no.

Knows rounds, ratios and limits. Does not know how they were taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from frozen.hooks import SlowCall
from kvtide.demo.figures import percentile

TIER, WITHOUT = "tier", "without"
ARMS = (TIER, WITHOUT)

MIN_REQUESTS = 300
MAX_TTFT_RATIO = 1.10
MAX_HOOK_MS = 5.0
QUIET_CORES = 0.1

TROUBLE = ("tier_probes_late{", "tier_passed_over_chunks{")
TROUBLE_ENDS = (",late}", ",unavailable}", ",out}")
"""How kvtide's counters begin, or end, that grow when a tier does not answer, or not in time."""


class UnfitError(Exception):
    """The rounds are not of what the bars are about; says in what."""


@dataclass(frozen=True, slots=True)
class Round:
    """One load on one engine.

    Attributes:
        index: Rounds of one index are the same requests.
        arm: ``TIER`` or ``WITHOUT``.
        ttft_ms: Of each request; None where no token came.
        failed: Of each request, why it failed; "" where it did not.
        slowest: The slowest call of each hook.
        call_count: Calls of hooks.
        in_service: Whether kvtide still used the tier afterwards; None without one.
        stuck_threads: Threads that slept in the kernel afterwards and could not be woken.
        counted: kvtide's own counters of the tier, since it was frozen.
        others_cores: Processor time that others used meanwhile, over the time that passed.
        held_count: What the medium itself says it has held back since it was frozen.
    """

    index: int
    arm: str
    ttft_ms: tuple[float | None, ...]
    failed: tuple[str, ...]
    slowest: tuple[SlowCall, ...]
    call_count: int
    in_service: bool | None
    stuck_threads: int
    counted: Mapping[str, float]
    others_cores: float
    held_count: int = 0

    @property
    def was_felt(self) -> bool:
        """Whether somebody wanted something of the medium that did not come, or came late."""
        troubles = (
            value
            for name, value in self.counted.items()
            if name.startswith(TROUBLE) or name.endswith(TROUBLE_ENDS)
        )
        return self.in_service is False or self.stuck_threads > 0 or self.held_count > 0 or sum(troubles) > 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came out.

    Attributes:
        requests: By arm.
        p50_ms: Time to first token, by arm.
        p95_ms: Time to first token, by arm.
        ttft_ratio: Of the latter, with the tier over without.
        slowest: The slowest call of a hook above the frozen tier, without waiting for a core.
        call_count: Of hooks there.
        failures: What went wrong, one a failed request, both arms.
        left_out_after: Round after which kvtide had left the tier out; None when it never did.
        counted: kvtide's own counters of the tier, from the freeze to the end.
        quiet_rounds: In so many others used next to nothing of the machine, whichever side had its turn.
    """

    requests: dict[str, int]
    p50_ms: dict[str, float]
    p95_ms: dict[str, float]
    ttft_ratio: float
    slowest: SlowCall
    call_count: int
    failures: tuple[str, ...]
    left_out_after: int | None
    counted: Mapping[str, float]
    quiet_rounds: int

    @property
    def passed(self) -> bool:
        """Whether every bar is met."""
        return self.ttft_ratio <= MAX_TTFT_RATIO and self.slowest.own_ms <= MAX_HOOK_MS and not self.failures

    def __str__(self) -> str:
        """One line: what was asked, what came out, and the bars."""
        counts = " + ".join(str(self.requests[arm]) for arm in ARMS)
        return (
            f"requests {counts}, p95 time to first token {self.ttft_ratio:.3f}"
            f" (at most {MAX_TTFT_RATIO:.2f}),"
            f" slowest hook {self.slowest.own_ms:.2f} ms (at most {MAX_HOOK_MS:g}),"
            f" failed requests {len(self.failures)} (0)"
        )

    def record(self) -> dict[str, Any]:
        """Fields for a file."""
        return {"passed": self.passed, **asdict(self)}


def judge(rounds: Sequence[Round]) -> Verdict:
    """Hold the rounds against the bars.

    Raises:
        UnfitError: Too few requests, unequal work, or nothing was frozen.
    """
    by_arm = {arm: [one for one in rounds if one.arm == arm] for arm in ARMS}
    sizes = {arm: {one.index: len(one.failed) for one in found} for arm, found in by_arm.items()}
    if sizes[TIER] != sizes[WITHOUT]:
        raise UnfitError(f"the arms did not do the same work: {sizes}")
    requests = {arm: sum(one.values()) for arm, one in sizes.items()}
    if min(requests.values()) < MIN_REQUESTS:
        raise UnfitError(f"{requests[TIER]} requests a side; {MIN_REQUESTS} are needed")
    out = [one.index for one in by_arm[TIER] if one.in_service is False]
    has_tier = any(one.in_service is not None for one in by_arm[TIER])
    if has_tier and not out and not all(one.was_felt for one in by_arm[TIER]):
        raise UnfitError("nobody was seen to miss it: nothing was frozen, or nothing was wanted of it")
    slow = [call for one in by_arm[TIER] for call in one.slowest]
    if not slow:
        raise UnfitError("no hook was called")
    ttft_ms = {
        arm: [ttft for one in found for ttft in one.ttft_ms if ttft is not None]
        for arm, found in by_arm.items()
    }
    p50_ms = {arm: percentile(found, 50) or 0.0 for arm, found in ttft_ms.items()}
    p95_ms = {arm: percentile(found, 95) or 0.0 for arm, found in ttft_ms.items()}
    if not p95_ms[WITHOUT]:
        raise UnfitError("without the tier no first token came either")
    return Verdict(
        requests=requests,
        p50_ms=p50_ms,
        p95_ms=p95_ms,
        ttft_ratio=p95_ms[TIER] / p95_ms[WITHOUT],
        slowest=max(slow, key=lambda call: call.own_ms),
        call_count=sum(one.call_count for one in by_arm[TIER]),
        failures=tuple(f"round {one.index}, {one.arm}: {why}" for one in rounds for why in one.failed if why),
        left_out_after=min(out, default=None),
        counted={name: value for name, value in by_arm[TIER][-1].counted.items() if value},
        quiet_rounds=len(set(sizes[TIER]) - {one.index for one in rounds if one.others_cores > QUIET_CORES}),
    )
