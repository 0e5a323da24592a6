"""One trial: two engines, a medium that stops, and the rounds in which they take turns.

Knows in which order things happen. Does not know what the medium is, or what the rounds are good for.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.frame.machine import Bystanders
from benchmarks.frame.rounds import rounds as turns

from frozen.engine import EngineProcess, Load, LoadResult
from frozen.judge import ARMS, TIER, Round, UnfitError
from frozen.media import Medium, stuck_threads
from frozen.workload import (
    BLOCK_TOKENS,
    CONCURRENCY,
    ENGINE,
    FIRST_TOKEN_ID,
    HOST_MEMORY,
    NEW_TOKENS,
    OUTPUT_TOKENS,
    PREFIX_TOKENS,
    PREFIXES,
    ROUND_LIMIT_S,
    ROUND_REQUESTS,
    Requests,
)

STORED_SHARE = 0.75
WRITTEN_LIMIT_S, PAUSE_S = 60.0, 0.05
PORTION = 8
"""Prefixes that are computed before those before are written below: host memory holds somewhat more."""
GAUGES = ("tier_in_service", "tier_takes_writes", "tier_used", "tier_capacity", "tier_open")

Tell = Callable[[str, int, int], None]
"""Takes a sentence on what is going on, and how much of how much is done."""


def rounds_of(medium: Medium, model: Path, out: Path, request_count: int, tell: Tell) -> list[Round]:
    """Prepare, stop the medium, and let the engines take turns.

    Args:
        medium: Is thawed in the end, and not closed.
        model: A model's folder.
        out: For the engines' logs.
        request_count: At least so many a side.
        tell: Is told what goes on.

    Raises:
        UnfitError: The preparation came to nothing.
        RuntimeError: An engine died or took too long.
    """
    count = -(-request_count // ROUND_REQUESTS)
    requests, found = Requests(), []
    with contextlib.ExitStack() as stack:
        engines: dict[str, EngineProcess] = {}
        # One after the other: of two that start at once the first was seen to be some 5 % faster for good.
        for arm in ARMS:
            tell(f"starting an engine: {arm}", 0, 2 * count)
            engines[arm] = _engine(arm, out, model, medium)
            stack.callback(engines[arm].close)
            engines[arm].wait_until_ready()
        # Undone before the engines are ended: a process with a read that does not return cannot end.
        stack.callback(medium.thaw)
        tell("computing what is to be below", 0, 2 * count)
        before = _prepare(engines, requests, medium.tier)
        medium.freeze(engines[TIER].process_id)
        for index, order in turns(ARMS, count):
            load = Load(requests.round(), OUTPUT_TOKENS, CONCURRENCY, ROUND_LIMIT_S)
            for arm in order:
                tell(f"round {index + 1} of {count}: {arm}", len(found), 2 * count)
                with Bystanders() as bystanders:
                    result = engines[arm].run(load)
                others_cores = bystanders.others_cores + bystanders.stolen_cores
                found.append(
                    _round(index, arm, result, engines[arm].process_id, medium, before, others_cores)
                )
    return found


def _engine(arm: str, out: Path, model: Path, medium: Medium) -> EngineProcess:
    settings = {"host_memory": HOST_MEMORY} | (dict(medium.settings()) if arm == TIER else {})
    connector = {"kv_connector": "KVTideConnector", "kv_role": "kv_both"}
    transfer = {"kv_transfer_config": connector | {"kv_connector_extra_config": settings}}
    return EngineProcess(arm, out / f"engine-{arm}.log", {"model": str(model), **ENGINE, **transfer})


def _prepare(engines: Mapping[str, EngineProcess], requests: Requests, tier: str) -> Mapping[str, float]:
    """Compute what is to be below; returns kvtide's counters then.

    Raises:
        UnfitError: It is not there afterwards.
    """
    for arm, one in engines.items():
        for start in range(0, PREFIXES, PORTION):
            prefixes = tuple(requests.prefixes[start : start + PORTION])
            result = one.run(Load(prefixes, 1, CONCURRENCY, ROUND_LIMIT_S, settle=True))
            if any(result.failed):
                raise UnfitError(f"{arm}: the preparation failed: {set(result.failed)}")
            _wait_until_written(one)
    # A warm load as well, so that the first frozen one is not the first of all.
    warm = requests.prefixes[0] + requests.prefixes[1][:NEW_TOKENS]
    engines[TIER].run(Load((warm,), 1, 1, ROUND_LIMIT_S, settle=True))
    metrics = engines[TIER].run(Load((), 1, 1, ROUND_LIMIT_S)).metrics
    if not tier:
        return metrics
    stored = metrics.get(f"tier_stored_chunks{{{tier}}}", 0)
    # What was computed before the host pool was ready, or faster than it is written on, is not there.
    if stored < STORED_SHARE * PREFIXES * (PREFIX_TOKENS // BLOCK_TOKENS):
        raise UnfitError(f"only {stored:.0f} chunks are below: {dict(metrics)}")
    return metrics


def _wait_until_written(engine: EngineProcess) -> None:
    """Wait until nothing is on its way to the tier any more.

    An engine without work takes no steps, and learns of no end: so it is asked for a little.

    Raises:
        UnfitError: Something still is after a long while.
    """
    give_up_s = time.monotonic() + WRITTEN_LIMIT_S
    little = Load(((FIRST_TOKEN_ID,) * (BLOCK_TOKENS // 2),), 1, 1, ROUND_LIMIT_S, settle=True)
    while engine.run(little).metrics.get("open_jobs{demote}", 0):
        if time.monotonic() > give_up_s:
            raise UnfitError("what was computed is still being written below")
        time.sleep(PAUSE_S)


def _round(
    index: int,
    arm: str,
    result: LoadResult,
    process_id: int,
    medium: Medium,
    before: Mapping[str, float],
    others_cores: float,
) -> Round:
    """Make a round of what an engine has answered."""
    in_service = result.metrics.get(f"tier_in_service{{{medium.tier}}}") if arm == TIER else None
    counted = {name: value for name, value in result.metrics.items() if name.startswith("tier_")}
    return Round(
        index,
        arm,
        result.ttft_ms,
        result.failed,
        result.slowest,
        result.call_count,
        None if in_service is None else bool(in_service),
        stuck_threads(process_id),
        {name: value - before.get(name, 0) for name, value in counted.items() if not name.startswith(GAUGES)},
        others_cores,
        medium.held_count() if arm == TIER else 0,
    )
