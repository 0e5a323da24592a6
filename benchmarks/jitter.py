"""What running requests notice of others that store, load and demote.

Two real engines that are told the same, one with kvtide, one without, each in a process of its own, take
turns at the same load. In both some requests generate steadily and the time between their tokens is
taken, while others come whose prompts begin like earlier ones. With kvtide those beginnings come from
host memory and what is new goes there and on to disk; without, they are in the engine's own cache, and
plain threads copy the same bytes at the same steps. Knows what is compared and what was promised; the
load, the engine that is stepped and the plain copies are in ``jittering``.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.frame.bars import at_most
from benchmarks.frame.engines import EngineProcess
from benchmarks.frame.machine import QUIET_CORES, Bystanders, wait_quiet
from benchmarks.frame.models import model_folder
from benchmarks.frame.plots import Line, Plot
from benchmarks.frame.registry import Bench, Sample, UnfitError, Verdict, benchmark
from benchmarks.frame.rounds import rounds, undisturbed, whole_rounds
from benchmarks.frame.statistics import ratio_interval, ratio_of_medians, spread
from benchmarks.jittering.engine_child import serve
from benchmarks.jittering.load import Load
from benchmarks.jittering.plain_copies import PlainSettings
from benchmarks.jittering.vocabulary import (
    ARMS,
    CONTROL,
    OURS,
    PREFILL_TOKENS,
    RUNNERS,
    TOKENS_PER_BLOCK,
    Ready,
    Turn,
    TurnResult,
)

P95_BAR = 1.05
P50, P95, P99 = 0.50, 0.95, 0.99

SAME_WORK = 0.03
"""By so much the arms may differ in what they compute and copy, over all rounds that count."""

ROUNDS = 10
SESSION_ROUNDS_ALONE = (14, 14)  # where a process's pages lie is luck that lasts as long as it does
MIN_ROUNDS = 10
WARM_UP_ROUNDS = 1
SESSION_LIMIT_S = 50.0  # on a busy machine: then the rounds there are have to do, once they are enough
WAIT_LIMIT_S = 5.0  # for quiet, before each round
SEED = 11
ROUND_STRIDE = 1000  # rounds of different sessions have different numbers

# Between two prompts of the same beginning so many other blocks are used that with kvtide it has left the
# engine's own cache, and in the control it has not; ``test_bench_jitter`` counts them.
BEGINNINGS: Mapping[str, int] = {OURS: 10, CONTROL: 3}
BLOCKS = 224
HOST_BYTES = 192 << 20  # the beginnings, and what is new between two uses: then as much leaves as comes
DISK_BYTES = 512 << 20
DISK_THREADS = 4

ENGINE: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "block_size": TOKENS_PER_BLOCK,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 192 << 20,
    "num_gpu_blocks_override": BLOCKS,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "long_prefill_token_threshold": PREFILL_TOKENS,
    "skip_tokenizer_init": True,
}


def connector(folder: Path) -> dict[str, Any]:
    """Return how kvtide is set up; LRU, since the adaptive policy learns not to store what is asked once."""
    return {
        "kv_connector": "KVTideConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "host_memory": HOST_BYTES,
            "eviction_policy": "lru",
            "disk": str(folder / "tier"),
            "disk_limit": DISK_BYTES,
            "disk_threads": DISK_THREADS,
            "disk_eviction_policy": "lru",
        },
    }


def judge(samples: Sequence[Sample]) -> Verdict:
    """Compare the arms.

    Raises:
        UnfitError: The samples are not of what the bar is about.
    """
    found = whole_rounds(samples, ARMS)
    if len(found) < MIN_ROUNDS:
        raise UnfitError(f"{len(found)} rounds; {MIN_ROUNDS} are needed: is the machine busy?")
    quiet = undisturbed(found, QUIET_CORES)
    used = quiet if len(quiet) >= MIN_ROUNDS else found
    try:
        _check(used)
        p95 = _of_rounds(used, P95)
        ratio = ratio_of_medians(p95[OURS], p95[CONTROL])
        low, high = ratio_interval(p95[OURS], p95[CONTROL])
        notes = (
            _quiet_note(len(found), len(quiet)),
            f"p95 ratio: {low:.3f} to {high:.3f} in 95 % of resampled rounds;"
            f" of all gaps together {_pooled(used, OURS, P95) / _pooled(used, CONTROL, P95):.3f}",
            *(_arm_note(used, arm) for arm in ARMS),
        )
        plots = _plots(used, p95)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnfitError(f"a sample is damaged: {type(error).__name__}: {error}") from None
    return Verdict((at_most("inter-token latency, p95: kvtide / control", ratio, P95_BAR),), notes, plots)


Rounds = Sequence[Mapping[str, Sample]]

WORK = ("computed_tokens", "cached_tokens", "output_tokens", "loaded_bytes", "stored_bytes", "written_bytes")


def _check(used: Rounds) -> None:
    """Refuse arms that did not do the same."""
    for what in WORK:
        ours, control = (sum(one[arm][what] for one in used) for arm in ARMS)
        if min(ours, control) <= 0:
            raise UnfitError(f"{what}: {ours} with kvtide, {control} in the control; nothing is compared")
        if abs(ours - control) > SAME_WORK * control:
            raise UnfitError(f"{what}: {ours} with kvtide, {control} in the control: not the same work")
    for one in used:
        for arm, sample in one.items():
            if len(sample["gaps_us"]) != sample["step_count"] * RUNNERS:
                raise UnfitError(
                    f"round {sample['round']}, {arm}: {len(sample['gaps_us'])} gaps in"
                    f" {sample['step_count']} steps; a runner was held up"
                )
    if not sum(one[OURS]["evicted_chunks"] for one in used):
        raise UnfitError("kvtide did not evict; nothing would be measured of it")


def _of_rounds(used: Rounds, quantile: float) -> dict[str, list[float]]:
    return {arm: [float(np.quantile(one[arm]["gaps_us"], quantile)) / 1e3 for one in used] for arm in ARMS}


def _pooled(used: Rounds, arm: str, quantile: float) -> float:
    return float(np.quantile(_gaps(used, arm), quantile)) / 1e3


def _gaps(used: Rounds, arm: str) -> np.ndarray:
    return np.concatenate([np.asarray(one[arm]["gaps_us"], dtype=np.float64) for one in used])


def _quiet_note(count: int, quiet_count: int) -> str:
    if quiet_count >= MIN_ROUNDS:
        return f"{quiet_count} of {count} rounds were undisturbed and count"
    return (
        f"NOT A QUIET MACHINE: only {quiet_count} of {count} rounds were undisturbed, so all count;"
        " a missed bar may be the neighbours'"
    )


def _arm_note(used: Rounds, arm: str) -> str:
    p50, p95 = (spread(_of_rounds(used, quantile)[arm]) for quantile in (P50, P95))
    worst = float(_gaps(used, arm).max()) / 1e3
    cpu = spread([one[arm]["cpu_s"] / one[arm]["output_tokens"] * 1e3 for one in used]).median
    wall_s = sum(one[arm]["wall_s"] for one in used)
    rates = ", ".join(
        f"{sum(one[arm][what] for one in used) / wall_s / 1e6:.0f} {verb}"
        for what, verb in (
            ("loaded_bytes", "loaded"),
            ("stored_bytes", "stored"),
            ("written_bytes", "demoted"),
        )
    )
    return (
        f"{arm}: ms between tokens p50 {p50}, p95 {p95}, of all rounds p99 {_pooled(used, arm, P99):.4g},"
        f" worst {worst:.4g}; {cpu:.4g} CPU ms/token; MB/s: {rates}"
    )


LABELS = {OURS: "kvtide", CONTROL: "plain copies"}
SHARES = tuple(index / 200 for index in range(1, 200))


def _plots(used: Rounds, p95: Mapping[str, Sequence[float]]) -> tuple[Plot, ...]:
    places = list(range(1, len(used) + 1))
    return (
        Plot(
            "Time between two tokens of a running request: so many of 100 are shorter",
            "ms",
            "% shorter",
            tuple(
                Line(
                    LABELS[arm],
                    [float(value) / 1e3 for value in np.quantile(_gaps(used, arm), SHARES)],
                    [100 * share for share in SHARES],
                )
                for arm in ARMS
            ),
            (("p95", 100 * P95),),
        ),
        Plot(
            "p95 of the time between two tokens, round by round",
            "round",
            "ms",
            tuple(Line(LABELS[arm], places, p95[arm]) for arm in ARMS),
        ),
    )


@benchmark(
    "jitter",
    asks="What do running requests notice of others that store, load and demote?",
    about_s=85,
    alone_s=170,
    judge=judge,
)
def measure(bench: Bench) -> list[Sample]:
    """Start both engines, warm them up, and let them take turns; twice, when it is asked for by name."""
    sessions = SESSION_ROUNDS_ALONE if bench.alone else (ROUNDS,)
    model = model_folder(bench.model, lambda text: bench.progress(text, 0, sum(sessions)))
    samples: list[Sample] = []
    for session, wanted in enumerate(sessions):
        done = sum(sessions[:session])
        bench.progress(f"session {session + 1}: starting two engines", done, sum(sessions))
        with contextlib.ExitStack() as running:
            # A folder of its own: what an earlier run has left on disk would be found and brought back.
            folder = running.enter_context(TemporaryDirectory(prefix="jitter-", dir=bench.folder))
            engines = {
                arm: running.enter_context(_engine(arm, Path(folder), bench.folder, model))
                # The same luck for both: who starts first has the emptier machine.
                for arm in (ARMS if session % 2 == 0 else ARMS[::-1])
            }
            ready = {arm: engine.first(Ready) for arm, engine in engines.items()}
            if ready[OURS] != ready[CONTROL]:
                raise UnfitError(f"the engines differ: {ready}")
            loads = {
                arm: Load(ready[OURS].vocabulary, BEGINNINGS[arm], SEED + 2 * session + place)
                for place, arm in enumerate(ARMS)
            }
            bench.progress(f"session {session + 1}: warming up", done, sum(sessions))
            _warm_up(engines, loads)
            samples += _session(bench, engines, loads, session, wanted, (done, sum(sessions)))
    return samples


def _engine(arm: str, folder: Path, logs: Path, model: Path) -> EngineProcess:
    arguments = {"model": str(model), **ENGINE}
    inside = partial(serve, plain=PlainSettings(folder, HOST_BYTES, DISK_BYTES, DISK_THREADS))
    if arm == OURS:
        arguments["kv_transfer_config"] = connector(folder)
        inside = partial(serve, plain=None)
    return EngineProcess(arm, logs / f"engine-jitter-{arm}.log", arguments, inside)


def _warm_up(engines: Mapping[str, EngineProcess], loads: Mapping[str, Load]) -> None:
    for arm, engine in engines.items():
        engine.ask(loads[arm].introduction(), TurnResult)
    for _, order in rounds(ARMS, WARM_UP_ROUNDS):
        for arm in order:
            engines[arm].ask(loads[arm].turn(), TurnResult)


def _session(
    bench: Bench,
    engines: Mapping[str, EngineProcess],
    loads: Mapping[str, Load],
    session: int,
    wanted: int,
    progress: tuple[int, int],
) -> list[Sample]:
    samples: list[Sample] = []
    give_up_s = time.monotonic() + SESSION_LIMIT_S
    quiet_count = 0
    for index, order in rounds(ARMS):
        late = time.monotonic() > give_up_s and index >= min(wanted, MIN_ROUNDS)
        if quiet_count >= wanted or late:
            break
        bench.progress(f"session {session + 1}, round {index + 1}", progress[0] + quiet_count, progress[1])
        wait_quiet(WAIT_LIMIT_S)
        one = [
            {"session": session, "round": ROUND_STRIDE * session + index, "place": place, "arm": arm}
            | _measured(engines[arm], loads[arm].turn())
            for place, arm in enumerate(order)
        ]
        samples += one
        quiet_count += len(undisturbed(whole_rounds(one, ARMS), QUIET_CORES))
    return samples


def _measured(engine: EngineProcess, turn: Turn) -> dict[str, Any]:
    with Bystanders() as bystanders:
        result = engine.ask(turn, TurnResult)
    return {
        "gaps_us": list(result.gaps_us),
        "step_count": result.step_count,
        "wall_s": result.wall_s,
        "cpu_s": result.cpu_s,
        "rested": result.rested,
        "computed_tokens": result.computed_tokens,
        "cached_tokens": result.cached_tokens,
        "output_tokens": result.output_tokens,
        **asdict(result.moved),
        **{f"due_{name}": value for name, value in asdict(result.due).items()},
        "evicted_chunks": _counted(result, "vllm:kvtide_evicted_chunks"),
        "skipped_chunks": _counted(result, "vllm:kvtide_skipped_store_chunks"),
        "not_demoted_chunks": _counted(result, "vllm:kvtide_tier_skipped_chunks"),
        "others_cores": bystanders.others_cores,
        "stolen_cores": bystanders.stolen_cores,
    }


def _counted(result: TurnResult, name: str) -> float:
    return sum(value for key, value in result.counters.items() if key.partition("{")[0] == name)
