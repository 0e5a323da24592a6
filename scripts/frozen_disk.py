#!/usr/bin/env python3
"""Freeze the disk under a loaded engine, and look whether anybody notices.

Two real vLLM engines with SmolLM2-135M and kvtide, one of them with a disk tier, get the same requests in
turn, a few of them running at any time. First many prompts are computed, so that on the one side they are on
disk and on neither side in memory. Then the disk stops answering: its reads never return. From
then on half of all requests begin like a prompt that only the disk has.

Bars: time to first token, 95th percentile, at most 1.10 times that of the engine without the tier, in the
same run; no hook of the connector above 5 ms; no request fails. A hook's time is the wall's less what its
thread was ready to run and had no core (as the kernel counts it): waiting for a disk or a lock counts,
neighbours do not. Ends with 0 when every bar is met, 1 when one is missed, 2 when it could not be judged.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.frame.machine import Bystanders  # noqa: E402
from benchmarks.frame.models import model_folder  # noqa: E402
from benchmarks.frame.rounds import rounds as turns  # noqa: E402
from frozen.engine import EngineProcess, Load, LoadResult  # noqa: E402
from frozen.judge import ARMS, TIER, WITHOUT, Round, UnfitError, judge  # noqa: E402
from frozen.media import HeldMemory, Medium, ThrottledDisk, stuck_threads  # noqa: E402

OUT = ROOT / "build" / "frozen-disk"
MET, MISSED, COULD_NOT = 0, 1, 2

BLOCK_TOKENS = 32
PREFIX_TOKENS = 256
NEW_TOKENS = 32
OUTPUT_TOKENS = 8
CONCURRENCY = 4
PREFIXES = 48  # 283 MB of KV cache, in a host pool of 64 MiB
STORED_SHARE = 0.75
HOST_MEMORY = "64MiB"
ROUND_REQUESTS = 20
ROUND_LIMIT_S = 300.0
FIRST_TOKEN_ID, VOCABULARY = 1_000, 49_000
SEED = 7

ENGINE: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "block_size": BLOCK_TOKENS,
    "kv_cache_memory_bytes": 64 << 20,
    "num_gpu_blocks_override": 96,  # a little more than what runs together: prefixes do not stay
    "max_model_len": 512,
    "max_num_seqs": CONCURRENCY,
    "skip_tokenizer_init": True,
}


class Requests:
    """Draws requests; the same for both engines.

    Half begin like a prefix of the preparation, a quarter like a request of a moment ago, a quarter is new.
    """

    def __init__(self) -> None:
        self._draw = random.Random(SEED)
        self.prefixes = [self._tokens(PREFIX_TOKENS) for _ in range(PREFIXES)]
        self._recent: deque[tuple[int, ...]] = deque(maxlen=3)

    def round(self) -> tuple[tuple[int, ...], ...]:
        """Draw the requests of one round."""
        return tuple(self._one() for _ in range(ROUND_REQUESTS))

    def _one(self) -> tuple[int, ...]:
        kind = self._draw.random()
        if kind < 0.5:
            prefix = self._draw.choice(self.prefixes)
        elif kind < 0.75 and self._recent:
            prefix = self._draw.choice(self._recent)
        else:
            prefix = self._tokens(PREFIX_TOKENS)
        self._recent.append(prefix)
        return prefix + self._tokens(NEW_TOKENS)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(FIRST_TOKEN_ID, VOCABULARY) for _ in range(count))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=320, help="at least so many a side (320)")
    parser.add_argument(
        "--medium",
        choices=("auto", "throttled", "held"),
        default="auto",
        help="throttled: a real disk, needs root; held: HeldTier; auto: the first that can be had",
    )
    parser.add_argument("--model", type=Path, help="a model's folder, instead of SmolLM2-135M")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for report.json and the engines' logs")
    return parser.parse_args()


def medium_of(choice: str, folder: Path) -> Medium:
    """Make the disk that will be frozen.

    Raises:
        UnfitError: It cannot be had here.
    """
    reason = ThrottledDisk.why_not()
    if choice == "held" or (choice == "auto" and reason):
        return HeldMemory(folder)
    if reason:
        raise UnfitError(f"--medium throttled: {reason}")
    return ThrottledDisk(folder)


def engine(arm: str, out: Path, model: Path, medium: Medium) -> EngineProcess:
    """Start one engine."""
    settings = {"host_memory": HOST_MEMORY} | (dict(medium.settings()) if arm == TIER else {})
    connector = {"kv_connector": "KVTideConnector", "kv_role": "kv_both"}
    transfer = {"kv_transfer_config": connector | {"kv_connector_extra_config": settings}}
    return EngineProcess(arm, out / f"engine-{arm}.log", {"model": str(model), **ENGINE, **transfer})


def taken(index: int, arm: str, result: LoadResult, process_id: int, tier: str, others_cores: float) -> Round:
    """Make a round of what an engine has answered."""
    in_service = result.metrics.get(f"tier_in_service{{{tier}}}") if arm == TIER else None
    return Round(
        index,
        arm,
        result.ttft_ms,
        result.failed,
        result.slowest,
        result.call_count,
        None if in_service is None else bool(in_service),
        stuck_threads(process_id),
        {name: value for name, value in result.metrics.items() if name.startswith("tier_")},
        others_cores,
    )


def prepare(engines: Mapping[str, EngineProcess], requests: Requests, tier: str) -> None:
    """Compute what is to be on disk.

    Raises:
        UnfitError: It is not there afterwards.
    """
    load = Load(tuple(requests.prefixes), 1, CONCURRENCY, ROUND_LIMIT_S, settle=True)
    for arm, one in engines.items():
        result = one.run(load)
        if any(result.failed):
            raise UnfitError(f"{arm}: the preparation failed: {set(result.failed)}")
    # A warm load as well, so that the first frozen one is not the first of all.
    warm = requests.prefixes[0] + requests.prefixes[1][:NEW_TOKENS]
    engines[TIER].run(Load((warm,), 1, 1, ROUND_LIMIT_S, settle=True))
    metrics = engines[TIER].run(Load((), 1, 1, ROUND_LIMIT_S)).metrics
    stored = metrics.get(f"tier_stored_chunks{{{tier}}}", 0)
    # What was computed before the host pool was ready, or faster than it is written on, is not there.
    if stored < STORED_SHARE * PREFIXES * (PREFIX_TOKENS // BLOCK_TOKENS):
        raise UnfitError(f"only {stored:.0f} chunks are on disk: {dict(metrics)}")


def run(options: argparse.Namespace, model: Path, medium: Medium) -> list[Round]:
    """Prepare, freeze, and let the engines take turns."""
    count = -(-options.requests // ROUND_REQUESTS)
    requests, found = Requests(), []
    with Progress() as progress, contextlib.ExitStack() as stack:
        task = progress.add_task("starting two engines", total=2 * count)
        engines = {arm: engine(arm, options.out, model, medium) for arm in ARMS}
        for one in engines.values():
            stack.callback(one.close)
        # Undone before the engines are ended: a process with a read that does not return cannot end.
        stack.callback(medium.thaw)
        for one in engines.values():
            one.wait_until_ready()
        progress.update(task, description="computing what is to be on disk")
        prepare(engines, requests, medium.tier)
        medium.freeze(engines[TIER].process_id)
        for index, order in turns(ARMS, count):
            load = Load(requests.round(), OUTPUT_TOKENS, CONCURRENCY, ROUND_LIMIT_S)
            for arm in order:
                progress.update(task, description=f"frozen, round {index + 1} of {count}: {arm}")
                with Bystanders() as bystanders:
                    result = engines[arm].run(load)
                others_cores = bystanders.others_cores + bystanders.stolen_cores
                process_id = engines[arm].process_id
                found.append(taken(index, arm, result, process_id, medium.tier, others_cores))
                progress.advance(task)
    return found


def write(out: Path, fields: Mapping[str, Any]) -> None:
    """Leave ``report.json``."""
    (out / "report.json").write_text(json.dumps(fields, indent=1) + "\n")


def main() -> int:
    """Run the trial and return the exit code."""
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        model = model_folder(options.model, print)
        with tempfile.TemporaryDirectory(dir=options.out, prefix="medium-") as folder:
            medium = medium_of(options.medium, Path(folder))
            name = medium.name
            try:
                rounds = run(options, model, medium)
            finally:
                medium.close()
        report = {"medium": name, "rounds": [asdict(one) for one in rounds]}
        write(options.out, report)  # also what is then refused can be looked at
        verdict = judge(rounds)
    except (UnfitError, RuntimeError) as error:
        print(f"frozen-disk: {error}", file=sys.stderr)
        return COULD_NOT
    write(options.out, verdict.record() | report)
    for arm in (TIER, WITHOUT):
        times = f"p50 {verdict.p50_ms[arm]:.0f} ms, p95 {verdict.p95_ms[arm]:.0f} ms"
        print(f"{arm}: {verdict.requests[arm]} requests, time to first token {times}")
    print(f"medium: {name}; left out by kvtide after round {verdict.left_out_after}")
    print(f"slowest of {verdict.call_count:,} hooks: {verdict.slowest}")
    count = len({one.index for one in rounds})
    if 2 * verdict.quiet_rounds < count:
        print(f"NOT A QUIET MACHINE: {verdict.quiet_rounds} of {count} rounds were undisturbed; all count")
    for failure in verdict.failures[:10]:
        print(failure)
    print(f"{os.path.relpath(options.out / 'report.json')}")
    print(verdict)
    return MET if verdict.passed else MISSED


if __name__ == "__main__":
    sys.exit(main())
