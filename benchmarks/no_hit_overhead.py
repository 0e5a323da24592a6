"""What kvtide costs when there is no hit to be had.

Two real engines with the same settings, one with kvtide and one without, each in a process of its own,
take turns at the same batches of prompts. No prompt begins like another, so nothing can be brought back:
kvtide looks up, stores and evicts for nothing. Knows what is compared and what was promised; how engines
are run and samples are taken is the frame's.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.frame.bars import at_least, at_most
from benchmarks.frame.engine_child import Batch, BatchResult
from benchmarks.frame.engines import EngineProcess
from benchmarks.frame.machine import QUIET_CORES, Bystanders, wait_quiet
from benchmarks.frame.models import model_folder
from benchmarks.frame.plots import Line, Plot
from benchmarks.frame.registry import Bench, Sample, UnfitError, Verdict, benchmark
from benchmarks.frame.rounds import rounds, undisturbed, whole_rounds
from benchmarks.frame.statistics import (
    median_lower_bound,
    paired_ratios,
    ratio_of_medians,
    spread,
)

WITH, WITHOUT = "kvtide", "none"
ARMS = (WITH, WITHOUT)

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 64
BATCH_REQUESTS = 6
CONCURRENT_REQUESTS = 6
HOST_MEMORY = "128MiB"  # less than two batches: from the third on each evicts as much as it stores

# Many short batches: the machine's own speed wanders by several percent within seconds.
# Where a process's pages lie is a matter of luck that lasts as long as the process: fresh ones are drawn.
SESSIONS = 2
SESSION_PAIRS = 16
PAIRS = SESSIONS * SESSION_PAIRS
MIN_PAIRS = 10
WARM_UP_PAIRS = 2
SESSION_LIMIT_S = 200.0  # on a busy machine: then the pairs there are have to do
WAIT_LIMIT_S = 30.0  # for quiet, before each pair
SEED = 2
SPECIAL_TOKENS = 1000  # ids below may mean something to a tokenizer; none is needed

THROUGHPUT_BAR = 0.97
LOWER_BOUND_BAR = 0.94
CPU_BAR = 1.03
IDLE_CORES = 0.05

ROUND_STRIDE = 1000  # rounds of different sessions have different numbers

ENGINE: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "block_size": 32,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 192 << 20,
    "num_gpu_blocks_override": 160,
    "max_model_len": 1024,
    "max_num_seqs": CONCURRENT_REQUESTS,
    "max_num_batched_tokens": 2048,
    "skip_tokenizer_init": True,
}
CONNECTOR: Mapping[str, Any] = {
    "kv_connector": "KVTideConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"host_memory": HOST_MEMORY},
}


def judge(samples: Sequence[Sample]) -> Verdict:
    """Compare the arms.

    Raises:
        UnfitError: The samples are not of what the bars are about.
    """
    pairs = whole_rounds(samples, ARMS)
    for pair in pairs:
        _check(pair)
    if len(pairs) < MIN_PAIRS:
        raise UnfitError(f"{len(pairs)} pairs; {MIN_PAIRS} are needed: is the machine busy?")
    quiet = undisturbed(pairs, QUIET_CORES)
    used = quiet if len(quiet) >= MIN_PAIRS else pairs
    speeds = {arm: [one[arm]["output_tokens"] / one[arm]["wall_s"] for one in used] for arm in ARMS}
    costs = {arm: [one[arm]["cpu_s"] / one[arm]["output_tokens"] for one in used] for arm in ARMS}
    ratios = paired_ratios(speeds[WITH], speeds[WITHOUT])
    cost_ratios = paired_ratios(costs[WITH], costs[WITHOUT])
    bars = (
        at_least("output throughput, median of pairs", spread(ratios).median, THROUGHPUT_BAR),
        at_least(
            "output throughput, lower bound of that median", median_lower_bound(ratios), LOWER_BOUND_BAR
        ),
        at_most("engine CPU seconds per token", ratio_of_medians(costs[WITH], costs[WITHOUT]), CPU_BAR),
    )
    notes = (
        _pairs_note(len(pairs), len(quiet)),
        f"throughput ratio of pairs: {spread(ratios)}",
        f"CPU ratio of pairs: {spread(cost_ratios)}",
        *(f"{arm}: {spread(speeds[arm])} tokens/s, {spread(costs[arm])} CPU s/token" for arm in ARMS),
    )
    return Verdict(bars, notes, _plots(speeds, ratios, cost_ratios))


def _check(pair: Mapping[str, Sample]) -> None:
    index = pair[WITH]["round"]
    for arm, sample in pair.items():
        if sample["cached_tokens"]:
            raise UnfitError(f"round {index}, {arm}: {sample['cached_tokens']} tokens were hits; none may be")
        if sample["idle_cpu_s"] > IDLE_CORES * sample["idle_s"]:
            raise UnfitError(
                f"round {index}, {arm}: took {sample['idle_cpu_s']:.2f} s while it was not asked"
            )
    if pair[WITH]["output_tokens"] != pair[WITHOUT]["output_tokens"]:
        raise UnfitError(f"round {index}: the arms did not do the same work")
    if not pair[WITH]["stored_chunks"] or not pair[WITH]["evicted_chunks"]:
        raise UnfitError(f"round {index}: kvtide did not store and evict; nothing would be measured")


def _pairs_note(count: int, quiet_count: int) -> str:
    if quiet_count >= MIN_PAIRS:
        return f"{quiet_count} of {count} pairs were undisturbed and count"
    return (
        f"NOT A QUIET MACHINE: only {quiet_count} of {count} pairs were undisturbed, so all count;"
        " a missed bar may be the neighbours'"
    )


def _plots(
    speeds: Mapping[str, Sequence[float]], ratios: Sequence[float], cost_ratios: Sequence[float]
) -> tuple[Plot, ...]:
    places = list(range(1, len(ratios) + 1))
    labels = {WITH: "with kvtide", WITHOUT: "without"}
    return (
        Plot(
            "Output throughput, pair by pair",
            "pair",
            "tokens/s",
            tuple(Line(labels[arm], places, speeds[arm]) for arm in ARMS),
        ),
        Plot(
            "With kvtide / without, in the same pair",
            "pair",
            "ratio",
            (
                Line("throughput", places, ratios, joined=False),
                Line("CPU seconds per token", places, cost_ratios, joined=False),
            ),
            (("throughput at least", THROUGHPUT_BAR), ("CPU at most", CPU_BAR)),
        ),
    )


class _Prompts:
    """Batches of prompts of which no two begin alike, so that no block of any can be a hit."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._vocabulary = vocabulary
        self._beginnings: set[tuple[int, ...]] = set()

    def batch(self) -> Batch:
        prompts: list[tuple[int, ...]] = []
        while len(prompts) < BATCH_REQUESTS:
            ids = self._random.integers(SPECIAL_TOKENS, self._vocabulary, PROMPT_TOKENS).tolist()
            beginning = tuple(ids[: ENGINE["block_size"]])
            if beginning not in self._beginnings:
                self._beginnings.add(beginning)
                prompts.append(tuple(ids))
        return Batch(tuple(prompts), OUTPUT_TOKENS)


@benchmark(
    "no_hit_overhead",
    asks="What does kvtide cost when there is no hit to be had?",
    about_s=240,
    judge=judge,
)
def measure(bench: Bench) -> list[Sample]:
    """Start both engines, warm them up, and let them take turns; twice."""
    bench.progress("the model", 0, PAIRS)
    model = model_folder(bench.model, lambda text: bench.progress(text, 0, PAIRS))
    samples: list[Sample] = []
    for session in range(SESSIONS):
        bench.progress(f"session {session + 1}: starting two engines", session * SESSION_PAIRS, PAIRS)
        with contextlib.ExitStack() as running:
            engines = {
                arm: running.enter_context(_engine(arm, bench.folder, model))
                # The same luck for both: who starts first has the emptier machine.
                for arm in (ARMS if session % 2 == 0 else ARMS[::-1])
            }
            ready = {arm: engine.ready() for arm, engine in engines.items()}
            if ready[WITH] != ready[WITHOUT]:
                raise UnfitError(f"the engines differ: {ready}")
            prompts = _Prompts(ready[WITH].vocabulary, SEED + session)
            samples += _session(bench, engines, prompts, session)
    return samples


def _engine(arm: str, folder: Path, model: Path) -> EngineProcess:
    arguments = {"model": str(model), **ENGINE}
    if arm == WITH:
        arguments["kv_transfer_config"] = dict(CONNECTOR)
    return EngineProcess(arm, folder / f"engine-{arm}.log", arguments)


def _session(
    bench: Bench, engines: Mapping[str, EngineProcess], prompts: _Prompts, session: int
) -> list[Sample]:
    done = session * SESSION_PAIRS
    for index, order in rounds(ARMS, WARM_UP_PAIRS):
        bench.progress(f"session {session + 1}: warming up {index + 1}/{WARM_UP_PAIRS}", done, PAIRS)
        batch = prompts.batch()
        for arm in order:
            engines[arm].run(batch)
    samples: list[Sample] = []
    give_up_s = time.monotonic() + SESSION_LIMIT_S
    quiet_count = 0
    for index, order in rounds(ARMS):
        if quiet_count >= SESSION_PAIRS or time.monotonic() > give_up_s:
            break
        bench.progress(f"session {session + 1}, pair {index + 1}", done + quiet_count, PAIRS)
        wait_quiet(WAIT_LIMIT_S)
        batch = prompts.batch()
        pair = [
            {"session": session, "round": ROUND_STRIDE * session + index, "place": place, "arm": arm}
            | _measured(engines[arm], batch)
            for place, arm in enumerate(order)
        ]
        samples += pair
        quiet_count += len(undisturbed(whole_rounds(pair, ARMS), QUIET_CORES))
    return samples


def _measured(engine: EngineProcess, batch: Batch) -> dict[str, Any]:
    with Bystanders() as bystanders:
        result = engine.run(batch)
    return {
        "wall_s": result.wall_s,
        "cpu_s": result.cpu_s,
        "idle_s": result.idle_s,
        "idle_cpu_s": result.idle_cpu_s,
        "page_faults": result.page_faults,
        "rested": result.rested,
        "output_tokens": result.output_tokens,
        "cached_tokens": result.cached_tokens,
        "stored_chunks": _counted(result, "vllm:kvtide_stored_chunks"),
        "evicted_chunks": _counted(result, "vllm:kvtide_evicted_chunks"),
        "skipped_chunks": _counted(result, "vllm:kvtide_skipped_store_chunks"),
        "stored_bytes": _counted(result, "vllm:kvtide_transfer_bytes"),
        "others_cores": bystanders.others_cores,
        "stolen_cores": bystanders.stolen_cores,
    }


def _counted(result: BatchResult, name: str) -> float:
    return sum(value for key, value in result.counters.items() if key.partition("{")[0] == name)
