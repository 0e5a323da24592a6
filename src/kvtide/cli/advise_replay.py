"""``kvtide advise --replay TRACE``: the ghosts of a server that there is not, or not yet.

Knows options and how a trace is fed. Without a pace the ghosts of host memory are asked, request by request,
as a server would; with one (``--rates``) a whole server of each size is replayed in virtual time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer
import xxhash

from kvtide.adviser.ghosts import Ghosts
from kvtide.adviser.reading import EngineEstimates, Estimate, TierEstimates
from kvtide.adviser.sessions import SessionPaths
from kvtide.adviser.tier_ghosts import REFERENCE
from kvtide.adviser.window import BUCKETS, Window
from kvtide.advising import Arrival, GhostPlan, GhostTier, Growth, fingerprints
from kvtide.cli.folders import bar
from kvtide.cli.output import note
from kvtide.cli.replay import policies_of
from kvtide.cli.replay_reading import Reading, shown
from kvtide.cli.replay_serving import (
    DEFAULT_ENGINE_BYTES,
    OVERLOADED,
    WORTH_PROCESSES,
    serving_policies,
    size_of,
)
from kvtide.errors import ConfigError, KVTideError
from kvtide.metrics import GHOST_TIMES, HOST
from kvtide.sim.model_bytes import bytes_per_token
from kvtide.sim.processes import available_cores
from kvtide.sim.serving import ServingSetup
from kvtide.sim.serving_queue import EngineLimits
from kvtide.sim.serving_rates import known_rates, rates_named
from kvtide.sim.serving_result import ServingResult
from kvtide.sim.serving_sweep import serve_all
from kvtide.sim.traces import TraceRequest
from kvtide.transfer.memory import humanised

PANEL = "Instead of a server (--replay)"
DEFAULT_POLICY = "adaptive"
UNBOUNDED = 1 << 40
"""Chunks: a replay follows every session."""

ReplayOption = Annotated[
    list[str] | None,
    typer.Option(
        "--replay",
        metavar="TRACE",
        help="Ask a recorded trace instead: a file or folder; again for more of them.",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="CONFIG|BYTES",
        help="The model's config.json, a name that kvtide plan knows, or bytes of KV cache per token.",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]
HostMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        metavar="SIZE",
        help="Host memory for KV cache that others are held against: 64GiB.",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]
PolicyOption = Annotated[
    str,
    typer.Option("--policy", metavar="NAME", help="Who decides what is kept.", rich_help_panel=PANEL),
]
RatesOption = Annotated[
    str | None,
    typer.Option(
        "--rates",
        metavar="NAME|FILE",
        help="Replay a whole server that is so fast, with its own pool and its queue, and say how soon the"
        f" first token comes: {', '.join(known_rates())}; JSON; or the /metrics page of a vLLM server.",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]
SlowerOption = Annotated[
    float | None,
    typer.Option(
        "--slower",
        metavar="FACTOR",
        help="With --rates: requests come so many times further apart than in the trace.",
        show_default=False,
        rich_help_panel=PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class ReplayAsked:
    """What was said of a replay on the command line, as it was written."""

    model: str | None = None
    host_memory: str | None = None
    policy: str = DEFAULT_POLICY
    rates: str | None = None
    slower: float | None = None

    def refuse(self) -> None:
        """Refuse, beside a server, what is for a trace.

        Raises:
            ConfigError: Something was said of one.
        """
        for option, value, default in (
            ("--model", self.model, None),
            ("--host-memory", self.host_memory, None),
            ("--policy", self.policy, DEFAULT_POLICY),
            ("--rates", self.rates, None),
            ("--slower", self.slower, None),
        ):
            if value != default:
                raise ConfigError(option, value, "is for --replay: a server knows its own")


def replayed(reading: Reading, asked: ReplayAsked) -> EngineEstimates:
    """Feed a trace to ghosts, or to servers of each size.

    Raises:
        KVTideError: It cannot be read, or not be replayed so.
    """
    setup = _judged(asked)
    requests = list(shown(reading.trace()))
    named = ", ".join(map(str, reading.paths))
    if not any(request.block_hashes for request in requests):
        raise ConfigError("--replay", named, "has no full block")
    size = requests[0].block_tokens
    if any(request.block_tokens != size for request in requests):
        raise KVTideError("the trace has blocks of several sizes: replay one at a time, see --block-tokens")
    block_bytes = size * setup.bytes_per_token
    smallest = setup.host_memory // 2
    if smallest < block_bytes:
        hint = (
            f"half of it holds no block of {size} tokens, {humanised(block_bytes)}: give twice that or more"
        )
        raise ConfigError("--host-memory", asked.host_memory, hint)
    if asked.rates is None:
        return _with_ghosts(requests, setup, setup.host_memory // block_bytes)
    return _with_servers(requests, setup)


def _judged(asked: ReplayAsked) -> ServingSetup:
    if asked.model is None:
        raise ConfigError("--model", None, "give the model's config.json or bytes of KV cache per token")
    if asked.host_memory is None or "," in asked.host_memory:
        raise ConfigError(
            "--host-memory", asked.host_memory, "give the one size others are held against: 64GiB"
        )
    policies = serving_policies(policies_of(asked.policy), were_given=True)
    if policies[1:]:
        raise ConfigError("--policy", asked.policy, f"give one of {', '.join(policies)}")
    factor = 1.0 if asked.slower is None else asked.slower
    if not 0 < factor < 1e9:
        raise ConfigError("--slower", factor, "give a number above 0")
    if asked.slower is not None and asked.rates is None:
        raise ConfigError("--slower", factor, "is for --rates: without, nothing takes any time")
    return ServingSetup(
        bytes_per_token(asked.model),
        size_of("--host-memory", asked.host_memory),
        EngineLimits(2),
        rates_named(next(iter(known_rates())) if asked.rates is None else asked.rates),
        policy=policies[0],
        arrival_factor=factor,
    )


def _with_ghosts(requests: Sequence[TraceRequest], setup: ServingSetup, chunk_count: int) -> EngineEstimates:
    """Ask ghosts of host memory alone, and of every session."""
    size = requests[0].block_tokens
    ghosts = Ghosts(GhostPlan(size, (GhostTier(HOST, setup.policy, chunk_count),), UNBOUNDED))
    with bar("replaying requests", len(requests)) as tick:
        for visit, request in enumerate(requests, start=1):
            chunks = _chunks_of(request.block_hashes)
            ghosts.feed(Arrival(visit, request.arrival_s, request.prompt_tokens, chunks))
            ghosts.grown(Growth(visit, _chunks_of(request.generated_hashes)))
            tick(1)
    (tier,) = ghosts.tiers
    return _estimates_of(tier.window, len(requests), setup)


def _with_servers(requests: Sequence[TraceRequest], setup: ServingSetup) -> EngineEstimates:
    """Replay a server of each size: hits of the engine's own pool count, and requests wait for each other."""
    size = requests[0].block_tokens
    longest = max(one.prompt_tokens + max(1, one.output_tokens) for one in requests)
    blocks = max(2 + longest // size, DEFAULT_ENGINE_BYTES // (size * setup.bytes_per_token)) + 1
    setups = [
        replace(setup, host_memory=int(float(times) * setup.host_memory), engine=EngineLimits(blocks))
        for times in GHOST_TIMES
    ]
    jobs = available_cores() if len(requests) * len(setups) >= WORTH_PROCESSES else 1
    with bar("serving requests", len(requests) * len(setups)) as tick:
        results = serve_all(requests, setups, jobs, tick)
    busiest = max(one.busy_s / one.served_s for one in results)
    if busiest > OVERLOADED:
        note("the engine is never idle and times are those of a queue: see --slower and --rates")
    return _estimates_of(_window_of(requests, results), len(requests), setup)


def _window_of(requests: Sequence[TraceRequest], results: Sequence[ServingResult]) -> Window:
    window, sessions = Window(len(GHOST_TIMES), REFERENCE), SessionPaths()
    for index, request in enumerate(requests):
        chunks = _chunks_of(request.block_hashes)
        session = sessions.session_of(chunks) if chunks else index.to_bytes(8, "little")
        hits = [sum(one.hit_tokens_by_request[index]) for one in results]
        window.add(xxhash.xxh3_64_intdigest(session) % BUCKETS, request.prompt_tokens, hits)
        window.add_waits([one.ttft_by_request_s[index] for one in results])
    return window


def _estimates_of(window: Window, request_count: int, setup: ServingSetup) -> EngineEstimates:
    """Say what a window says, as the page of a server would."""
    estimates: tuple[Estimate, ...] = ()
    if window.is_telling:
        waits = window.waits_s()
        rows = zip(GHOST_TIMES, window.points(), window.gains(), window.errors(), strict=True)
        estimates = tuple(
            Estimate(
                float(times),
                float(points),
                float(gain),
                float(error),
                None if waits is None else float(waits[at]),
            )
            for at, (times, points, gain, error) in enumerate(rows)
        )
    name = f"{setup.bytes_per_token:,} bytes of KV cache per token"
    tier = TierEstimates(HOST, setup.host_memory, estimates)
    return EngineEstimates(
        name, ("0",), request_count, 0, window.request_count, 1.0, float(request_count), (tier,)
    )


def _chunks_of(hashes: Sequence[bytes]) -> bytes:
    return fingerprints(hashes, 0, len(hashes), 1)
