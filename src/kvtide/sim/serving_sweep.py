"""The same trace served with several setups, in processes side by side.

Knows how a sweep is spread and told; a setup and what comes of it are ``serving``'s.
"""

from collections.abc import Callable, Sequence
from contextlib import closing

from kvtide.sim.processes import spread
from kvtide.sim.serving import ServingSetup, serve
from kvtide.sim.serving_result import ServingResult
from kvtide.sim.traces.request import TraceRequest


def serve_all(
    requests: Sequence[TraceRequest],
    setups: Sequence[ServingSetup],
    jobs: int = 1,
    passed: Callable[[int], object] = lambda _: None,
) -> list[ServingResult]:
    """Serve a trace with every setup.

    Args:
        requests: The trace.
        setups: With what.
        jobs: Processes at once; 1 uses none but this one.
        passed: Told how many requests have ended since it was told last, and now and then of none.

    Returns:
        A result for each setup, in their order.

    Raises:
        ConfigError: Of ``serve``.
        KVTideError: A process died.
    """
    jobs = min(jobs, len(setups))
    if jobs <= 1:
        return [_here(requests, setup, passed) for setup in setups]
    found: dict[int, ServingResult] = {}
    with closing(spread(serve, requests, setups, jobs, lambda: passed(0))) as ended:
        for index, result in ended:
            found[index] = result
            passed(len(requests))
    return [found[index] for index in range(len(setups))]


def _here(
    requests: Sequence[TraceRequest], setup: ServingSetup, passed: Callable[[int], object]
) -> ServingResult:
    told = 0

    def seen(count: int) -> None:
        nonlocal told
        passed(count - told)
        told = count

    return serve(requests, setup, seen)
