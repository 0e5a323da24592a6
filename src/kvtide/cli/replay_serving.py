"""What ``kvtide replay`` shows of a whole server: hits by tier, times to first token, bytes written.

Knows options, tables and JSON; what is served is ``kvtide.sim.serving``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from kvtide.cli.folders import bar, counted, print_json, show_under, table, tell
from kvtide.cli.replay_page import show_page
from kvtide.cli.replay_reading import Reading, shown
from kvtide.config import KVTideConfig, queue_for
from kvtide.errors import ConfigError
from kvtide.sim.model_bytes import bytes_per_token
from kvtide.sim.processes import available_cores
from kvtide.sim.serving import ServingSetup, TierSetup, policy_names
from kvtide.sim.serving_curves import figures_of_serving
from kvtide.sim.serving_media import MediumRates
from kvtide.sim.serving_queue import EngineLimits
from kvtide.sim.serving_rates import known_rates, rates_named
from kvtide.sim.serving_result import ENGINE, ServingResult
from kvtide.sim.serving_sweep import serve_all
from kvtide.sim.traces import Trace, TraceRequest
from kvtide.transfer.memory import humanised

PANEL = "A whole server, with times (needs --model and --host-memory; --model alone tells shares in bytes)"

option = partial(typer.Option, show_default=False, rich_help_panel=PANEL)
"""Those of this panel that say in words what happens without them."""

OVERLOADED = 0.98
"""Busy for so much of the time, an engine has a queue that grows as long as the trace lasts."""

QUEUE_SHARE = 0.1
"""So many refusals for a full queue, for each block asked for, are worth a word."""

WORTH_PROCESSES = 2000
"""With so many requests in all, several processes are worth their start."""

DEFAULT_RATES = "llama-3.1-8b-h100"
DEFAULT_ENGINE_BYTES = 40 << 30
"""What an accelerator of 80 GiB has left for KV cache beside a model of medium size."""

ModelOption = Annotated[
    str | None,
    option(
        "--model",
        metavar="CONFIG|BYTES",
        help="The model's config.json, a name that kvtide plan knows, or bytes of KV cache per token.",
    ),
]
HostMemoryOption = Annotated[
    str | None,
    option(
        "--host-memory",
        metavar="SIZE,...",
        help="Host memory for KV cache: 64GiB, or several sizes, each of which is replayed.",
    ),
]
DiskOption = Annotated[
    list[str] | None,
    option(
        "--disk",
        metavar="SIZE@PACE",
        help="A disk below host memory: 1TiB@6GB/s. Again for one below that.",
    ),
]
DiskQueueOption = Annotated[
    str | None,
    option(
        "--disk-queue",
        metavar="SIZE",
        help="Writes to each disk that may wait; more are skipped. Default: four steps, as in a server.",
    ),
]
EngineBlocksOption = Annotated[
    int | None,
    option(
        "--engine-blocks",
        metavar="N",
        help="Blocks of the engine's own pool, as long as the trace's. Default: what 40 GiB hold.",
    ),
]
RatesOption = Annotated[
    str | None,
    option(
        "--rates",
        metavar="NAME|FILE",
        help=f"How fast it is: {', '.join(known_rates())}; JSON; or the /metrics page of a vLLM server."
        f" Default: {DEFAULT_RATES}.",
    ),
]
SlowerOption = Annotated[
    float | None,
    option(
        "--slower",
        metavar="FACTOR",
        help="Requests come so many times further apart than in the trace: 4 for a quarter of its load.",
    ),
]


@dataclass(frozen=True, slots=True)
class ServingAsked:
    """What was said on the command line of a whole server, as it was written."""

    model: str | None
    host_memory: str | None
    disks: Sequence[str] = ()
    disk_queue: str | None = None
    engine_blocks: int | None = None
    rates: str | None = None
    slower: float | None = None

    @property
    def is_any(self) -> bool:
        """Whether anything was said of one."""
        return self != ServingAsked(None, None)

    @property
    def is_model_alone(self) -> bool:
        """Whether nothing was said but the model."""
        return self == ServingAsked(self.model, None)


def replay_serving(
    reading: Reading,
    asked: ServingAsked,
    policies: Sequence[str],
    jobs: int | None,
    as_json: bool,
    html: Path | None = None,
) -> None:
    """Serve a trace and show what came of it.

    Args:
        reading: Of the trace.
        asked: With what.
        policies: Names of ``policy_names``.
        jobs: Processes at once; None for one a core, where that is worth it.
        as_json: For programs.
        html: File for a page.

    Raises:
        KVTideError: It cannot be read, or not be served so.
    """
    sizes, base = _judged(asked)
    trace = reading.trace()
    requests = list(shown(trace))
    base = replace(base, engine=EngineLimits(_engine_blocks(asked, base, requests)))
    setups = [
        replace(_with_memory(base, asked.disk_queue, size), policy=name)
        for size in sizes.values()
        for name in policies
    ]
    with bar("serving requests", len(requests) * len(setups)) as tick:
        if jobs is None:
            jobs = available_cores() if len(requests) * len(setups) >= WORTH_PROCESSES else 1
        results = serve_all(requests, setups, jobs, tick)
    found = {label: results[at * len(policies) : (at + 1) * len(policies)] for at, label in enumerate(sizes)}
    if html is not None:
        show_page(html, figures_of_serving(_plain(trace, base, found)))
    if as_json:
        print_json(_plain(trace, base, found))
    else:
        _print(base, found)


def size_of(option: str, text: str, hint: str = "give a size such as 64GiB") -> int:
    """Read a size above 0.

    Raises:
        ConfigError: It is none.
    """
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text.strip()))
    except (ValidationError, OverflowError):
        raise ConfigError(option, text, hint) from None
    if size < 1:
        raise ConfigError(option, text, hint)
    return size


def disk_of(text: str, number: int, queue: str | None = None) -> TierSetup:
    """Read ``1TiB@6GB/s``; threads, deadline, policy and, if not given, queue are a server's own defaults.

    Raises:
        ConfigError: It is none.
    """
    hint = "give a size and a pace such as 1TiB@6GB/s"
    size, at, pace = text.partition("@")
    if not at:
        raise ConfigError("--disk", text, hint)
    capacity = size_of("--disk", size, hint)
    bytes_per_s = size_of("--disk", pace.strip().removesuffix("/s"), hint)
    fields = KVTideConfig.model_fields
    rates = MediumRates(
        bytes_per_s,
        threads=fields["disk_threads"].default,
        deadline_s=fields["disk_deadline_s"].default,
    )
    name = "disk" if number == 1 else f"disk{number}"
    queue_bytes = int(fields["disk_queue"].default) if queue is None else size_of("--disk-queue", queue)
    policy = str(fields["disk_eviction_policy"].default)
    return TierSetup(name, capacity, rates, eviction_policy=policy, queue_bytes=queue_bytes)


def _judged(asked: ServingAsked) -> tuple[dict[str, int], ServingSetup]:
    """Judge what was said; the engine's blocks depend on the trace, too."""
    if asked.model is None:
        hint = (
            "give the model's config.json or bytes per token: a whole server needs to know what a block takes"
        )
        raise ConfigError("--model", None, hint)
    if asked.host_memory is None:
        raise ConfigError("--host-memory", None, "give a size such as 64GiB, or several: 64GiB,256GiB")
    written = [part.strip() for part in asked.host_memory.split(",") if part.strip()]
    sizes = {part: size_of("--host-memory", part) for part in written}
    if not sizes:
        raise ConfigError("--host-memory", asked.host_memory, "give a size such as 64GiB")
    if asked.engine_blocks is not None and asked.engine_blocks < 2:
        raise ConfigError("--engine-blocks", asked.engine_blocks, "give 2 or more")
    factor = 1.0 if asked.slower is None else asked.slower
    if not 0 < factor < 1e9:
        raise ConfigError("--slower", factor, "give a number above 0")
    setup = ServingSetup(
        bytes_per_token(asked.model),
        next(iter(sizes.values())),
        EngineLimits(2),
        rates_named(DEFAULT_RATES if asked.rates is None else asked.rates),
        tiers=tuple(disk_of(text, number, asked.disk_queue) for number, text in enumerate(asked.disks, 1)),
        arrival_factor=factor,
    )
    return sizes, setup


def _with_memory(setup: ServingSetup, disk_queue: str | None, host_memory: int) -> ServingSetup:
    """Give a server its host memory and, unless it was given, a disk's queue of the size that it has then."""
    tiers = setup.tiers
    if disk_queue is None:
        step_bytes = setup.bytes_per_token * setup.engine.step_tokens
        tiers = tuple(
            replace(tier, queue_bytes=queue_for(tier.queue_bytes, step_bytes, host_memory)) for tier in tiers
        )
    return replace(setup, host_memory=host_memory, tiers=tiers)


def _engine_blocks(asked: ServingAsked, setup: ServingSetup, requests: Sequence[TraceRequest]) -> int:
    if asked.engine_blocks is not None or not requests:
        return asked.engine_blocks or 2
    size = requests[0].block_tokens
    longest = max(one.prompt_tokens + max(1, one.output_tokens) for one in requests)
    return max(2 + longest // size, DEFAULT_ENGINE_BYTES // (size * setup.bytes_per_token)) + 1


def _plain(trace: Trace, setup: ServingSetup, found: Mapping[str, Sequence[ServingResult]]) -> dict[str, Any]:
    """Put what came of it into plain types for JSON."""
    return {
        "traces": [str(file) for file in trace.files],
        "format": trace.format,
        "skipped_records": trace.skipped_count,
        "bytes_per_token": setup.bytes_per_token,
        "engine_blocks": setup.engine.block_count,
        "rates": setup.rates.source,
        "results": {
            label: {one.policy: one.as_json() for one in results} for label, results in found.items()
        },
    }


def _print(setup: ServingSetup, found: Mapping[str, Sequence[ServingResult]]) -> None:
    first = next(iter(found.values()))[0]
    blocks = f"{first.prompt_blocks:,} full blocks, {first.prompt_tokens:,} prompt tokens"
    tell("trace", f"{counted(first.request_count, 'request')}, {blocks}")
    tell("rates", setup.rates.source)
    typer.echo()
    for label, results in found.items():
        tiers = list(results[0].hit_tokens)
        hits = table(["policy"], [*tiers, "all", "blocks", "p50", "p95", "p99", "computed"])
        for one in results:
            shares = [one.hit_tokens[tier] / max(1, one.prompt_tokens) for tier in tiers]
            ratios = [f"{100 * ratio:.2f}" for ratio in (*shares, one.token_hit_ratio, one.block_hit_ratio)]
            times = [seconds(one.ttft_s[name]) for name in ("p50", "p95", "p99")]
            hits.add_row(one.policy, *ratios, *times, millions(one.computed_tokens))
        show_under(f"{label}: hits of 100 prompt tokens; time to first token; prompt tokens computed", hits)
        below = [tier for tier in tiers if tier != ENGINE]
        heads = [*(f"{tier}\na day" for tier in below), *(f"{tier}\nevicted" for tier in below), "refused"]
        writes = table(["policy"], [*heads, "busy"])
        for one in results:
            writes.add_row(
                one.policy,
                *(humanised(round(one.written_per_day(tier))) for tier in below),
                *(f"{one.evicted_chunks[tier]:,}" for tier in below),
                f"{sum(one.skipped_chunks.values()):,}",
                f"{100 * one.busy_s / one.served_s:.0f} %",
            )
        show_under(f"{label}: bytes written a day; chunks that left; offers of chunks refused", writes)
    busiest = max(one.busy_s / one.served_s for results in found.values() for one in results)
    full = {
        reason
        for results in found.values()
        for one in results
        for reason, count in one.skipped_chunks.items()
        if reason.endswith("queue_full") and count > one.prompt_blocks * QUEUE_SHARE
    }
    if full:
        what = ", ".join(sorted(full))
        tell("queue", f"a step computes more than may be written at once, and much is offered again ({what})")
    if busiest > OVERLOADED:
        tell("load", "the engine is never idle and times are those of a queue: see --slower and --rates")


def seconds(value: float) -> str:
    """Write a time for people."""
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s" if value < 100 else f"{value:,.0f} s"


def millions(count: int) -> str:
    """Write a count for people."""
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count:,}"


def serving_policies(names: Sequence[str], were_given: bool) -> list[str]:
    """Choose, of policies that were asked for, those that can be served with.

    Args:
        names: All that ``kvtide replay`` knows, or what was asked for.
        were_given: Whether somebody asked for each by its name.

    Raises:
        ConfigError: One of those knows the future.
    """
    served = policy_names()
    for name in names:
        if were_given and name not in served:
            raise ConfigError("--policies", name, f"is for --fractions alone; give {', '.join(served)}")
    return [name for name in names if name in served]
