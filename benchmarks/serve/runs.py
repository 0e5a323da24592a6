"""Engines that take turns at batches, and what one batch becomes as a sample.

Knows how a part is started and measured; what the samples mean is said by those who judge them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.frame.engine_child import Batch, BatchResult
from benchmarks.frame.engines import EngineProcess
from benchmarks.frame.machine import QUIET_CORES, Bystanders, wait_quiet
from benchmarks.frame.registry import Sample, UnfitError
from benchmarks.frame.rounds import rounds, undisturbed, whole_rounds
from benchmarks.serve.prompts import Prompts
from benchmarks.serve.vocabulary import (
    ARMS,
    COLD,
    COLD_ARMS,
    CONNECTED,
    HALF,
    LOADS,
    MOST,
    NO_HITS,
    connector,
    engine_arguments,
)

WARM_UP_ROUNDS = 2
WARM_UP_LIMIT = 5  # batches, where less comes back than should
WAIT_LIMIT_S = 30.0  # for quiet, before each round
ROUND_STRIDE = 1000  # rounds of different sessions have different numbers
SEED = 2

Say = Callable[[str], None]


@contextlib.contextmanager
def engines_of(
    part: str, arms: Sequence[str], model: Path, folder: Path
) -> Iterator[tuple[dict[str, EngineProcess], int]]:
    """Start an engine for each arm, all at once; yields them and the size of the vocabulary.

    Raises:
        UnfitError: One did not start, or they differ.
    """
    with contextlib.ExitStack() as running:
        engines = {}
        for arm in arms:
            arguments = {"model": str(model), **engine_arguments(part)}
            if (transfer := connector(part, arm)) is not None:
                arguments["kv_transfer_config"] = transfer
            log = folder / f"engine-{part}-{arm}.log"
            engines[arm] = running.enter_context(EngineProcess(arm, log, arguments))
        ready = {arm: engine.ready() for arm, engine in engines.items()}
        if len(set(ready.values())) > 1:
            raise UnfitError(f"the engines differ: {ready}")
        yield engines, next(iter(ready.values())).vocabulary


def cold_session(
    engines: Mapping[str, EngineProcess],
    vocabulary: int,
    session: int,
    pair_count: int,
    limit_s: float,
    say: Say,
) -> list[Sample]:
    """Take turns at prompts that are hits nowhere, until ``pair_count`` pairs were undisturbed."""
    prompts = Prompts(LOADS[COLD], vocabulary, SEED + session)
    for _, order in rounds(COLD_ARMS, WARM_UP_ROUNDS):
        batch = prompts.fresh(forget=False)
        for arm in order:
            engines[arm].run(batch)
    samples: list[Sample] = []
    quiet_count, give_up_s = 0, time.monotonic() + limit_s
    for index, order in rounds(COLD_ARMS):
        if quiet_count >= pair_count or time.monotonic() > give_up_s:
            break
        say(f"session {session + 1}, pair {index + 1}")
        wait_quiet(WAIT_LIMIT_S)
        batch = prompts.fresh(forget=False)
        place = {"part": COLD, "share": NO_HITS, "session": session, "round": ROUND_STRIDE * session + index}
        pair = turns(engines, order, batch, place)
        samples += pair
        quiet_count += len(undisturbed(whole_rounds(pair, COLD_ARMS), QUIET_CORES))
    return samples


def hit_rounds(
    part: str,
    engines: Mapping[str, EngineProcess],
    vocabulary: int,
    other_rounds: int,
    limit_s: float,
    say: Say,
) -> list[Sample]:
    """Take turns at prompts that begin as stored ones do, until enough rounds were undisturbed.

    Args:
        part: Which one.
        engines: By arm.
        vocabulary: Of the model.
        other_rounds: How many rounds, from the first on, also measure fewer hits.
        limit_s: After which the rounds there are have to do.
        say: Is told what is going on.
    """
    load = LOADS[part]
    prompts = Prompts(load, vocabulary, SEED)
    say("storing what will be hits")
    kept = prompts.keep(MOST)
    for arm in CONNECTED:
        engines[arm].run(kept)
    say("warming up")
    for arm in CONNECTED:
        # What was computed before a pool had its pages is stored when it is computed again.
        for _ in range(WARM_UP_LIMIT):
            found = engines[arm].run(prompts.hits(MOST)).cached_tokens
            if found == load.requests * load.prefix_tokens(MOST):
                break
    samples: list[Sample] = []
    quiet_count, give_up_s = 0, time.monotonic() + limit_s
    for index, order in rounds(CONNECTED):
        if quiet_count >= load.rounds or time.monotonic() > give_up_s:
            break
        place = {"part": part, "session": 0, "round": index}
        if index < other_rounds:
            say(f"round {index + 1}, fewer hits")
            wait_quiet(WAIT_LIMIT_S)
            everyone = order + tuple(arm for arm in ARMS if arm not in CONNECTED)
            samples += turns(engines, everyone, prompts.fresh(), place | {"share": NO_HITS})
            samples += turns(engines, order, prompts.hits(HALF), place | {"share": HALF})
        say(f"round {index + 1}")
        wait_quiet(WAIT_LIMIT_S)
        pair = turns(engines, order, prompts.hits(MOST), place | {"share": MOST})
        samples += pair
        quiet_count += len(undisturbed(whole_rounds(pair, CONNECTED), QUIET_CORES))
    return samples


def turns(
    engines: Mapping[str, EngineProcess], order: Sequence[str], batch: Batch, place: Mapping[str, Any]
) -> list[Sample]:
    """Let the arms run a batch one after another; each becomes a sample."""
    return [
        {**place, "place": index, "arm": arm} | _measured(engines[arm], batch)
        for index, arm in enumerate(order)
    ]


def _measured(engine: EngineProcess, batch: Batch) -> dict[str, Any]:
    with Bystanders() as bystanders:
        result = engine.run(batch)
    return {
        "wall_s": result.wall_s,
        "ttft_s": list(result.ttft_s),
        "cpu_s": result.cpu_s,
        "idle_s": result.idle_s,
        "idle_cpu_s": result.idle_cpu_s,
        "page_faults": result.page_faults,
        "rested": result.rested,
        "prompt_tokens": sum(map(len, batch.prompts)),
        "output_tokens": result.output_tokens,
        "cached_tokens": result.cached_tokens,
        "preemptions": _counted(result, "vllm:num_preemptions"),
        "stored_chunks": _counted(result, "vllm:kvtide_stored_chunks"),
        "evicted_chunks": _counted(result, "vllm:kvtide_evicted_chunks"),
        "skipped_chunks": _counted(result, "vllm:kvtide_skipped_store_chunks"),
        "copied_bytes": _counted(result, "vllm:kvtide_transfer_bytes"),
        "others_cores": bystanders.others_cores,
        "stolen_cores": bystanders.stolen_cores,
    }


def _counted(result: BatchResult, name: str) -> float:
    return sum(value for key, value in result.counters.items() if key.partition("{")[0] == name)
