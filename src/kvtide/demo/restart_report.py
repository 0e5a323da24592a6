"""What ``kvtide demo --restart`` found: bars, JSON fields, tables.

Knows fields, rows and limits. Does not know servers. ``scripts/check_exact.py`` reads ``report-restart.json``
as it reads the other report.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from kvtide.demo.bars import MAX_WALL_S, MIN_LOADED_SHARE, Bar, Sense
from kvtide.demo.exactness import MIN_LOADED_TOKENS, Verdict, judge
from kvtide.demo.figures import Sources, Spread, record_of, sources_of, spread, ttft_ms_of
from kvtide.demo.phases import KVTIDE, RECOMPUTE, RECOMPUTE_TOKENS, REFERENCE, Exchange, Script
from kvtide.demo.report import bar_json, request_json
from kvtide.demo.servers import BLOCK_TOKENS, Plan
from kvtide.demo.table import NOT_TAKEN, Section, bar_section, equality_rows, milliseconds, size

MAX_OF_RECOMPUTE = 1 / 5

LABELS = {RECOMPUTE: "recompute", KVTIDE: "disk hit (kvtide)", REFERENCE: "engine hit"}
_TTFT_FIELDS = {RECOMPUTE: "recompute", KVTIDE: "disk_hit", REFERENCE: "engine_hit"}


@dataclass(frozen=True, slots=True)
class RestartReport:
    """What was found.

    Attributes:
        plans: The three servers.
        connector: Name of the connector on kvtide's server.
        exchanges: Each user's last prompt, asked again after the restart.
        restart_s: Until the new server said that it was healthy.
        disk_bytes_used: What the disk's folder took when the server had been killed; None without a folder.
        disk_bytes_limit: What it may take.
        disk_chunks: Chunks that were brought back from disk for these prompts; None when nothing counts it.
        versions: By package.
        machine: Processor, cores, memory and load when the demo began.
        setup_s: Fetching and converting the model.
        wall_s: All the rest.
    """

    script: Script
    plans: Sequence[Plan]
    connector: str
    exchanges: Sequence[Exchange]
    restart_s: float
    disk_bytes_used: int | None
    disk_bytes_limit: int
    disk_chunks: int | None
    versions: Mapping[str, str]
    machine: Mapping[str, str]
    setup_s: float
    wall_s: float

    @property
    def verdict(self) -> Verdict:
        """Whether the answers are those of the reference."""
        return judge([record_of(exchange) for exchange in self.exchanges])

    @property
    def ttft_ms(self) -> dict[str, Spread]:
        """Times to first token by server, of the prompts that came from disk."""
        return {name: spread(ttft_ms_of(self.exchanges, name)) for name in LABELS}

    @property
    def sources(self) -> dict[str, Sources]:
        """Where prompt tokens came from, by server."""
        return {name: sources_of(self.exchanges, name) for name in LABELS}

    @property
    def bars(self) -> list[Bar]:
        """Figures held against the limits."""
        verdict, ttft_ms = self.verdict, self.ttft_ms
        equal = max(0, verdict.compared_requests - verdict.diverging_requests)
        loaded = verdict.loaded_tokens / verdict.prompt_tokens if verdict.prompt_tokens else None
        disk, recompute = ttft_ms[KVTIDE].p50, ttft_ms[RECOMPUTE].p50
        ratio = disk / recompute if disk is not None and recompute else None
        return [
            # Every user's: a conversation that did not survive is none that was answered faster.
            Bar("answers equal to the reference's", equal, Sense.AT_LEAST, self.script.user_count),
            Bar("prompt tokens of these loaded", loaded, Sense.AT_LEAST, MIN_LOADED_SHARE),
            Bar("first token after the restart: disk / recompute, p50", ratio, Sense.AT_MOST,
                MAX_OF_RECOMPUTE),
            Bar("disk used", self.disk_bytes_used, Sense.AT_MOST, self.disk_bytes_limit, "bytes"),
            Bar("whole demo after set-up", self.wall_s, Sense.AT_MOST, MAX_WALL_S, "s"),
        ]  # fmt: skip

    @property
    def passed(self) -> bool:
        """Whether every bar is met."""
        return all(bar.met for bar in self.bars)

    def context_tokens(self) -> tuple[int, int]:
        """Shortest and longest prompt that was asked again."""
        lengths = [reply.prompt_tokens for exchange in self.exchanges for reply in exchange.replies.values()]
        return min(lengths), max(lengths)


def headline(report: RestartReport) -> str:
    """Say in one line what ran."""
    shortest, longest = report.context_tokens()
    script, cores = report.script, report.machine.get("cores", "?")
    return (
        f"Killed and restarted: SmolLM2-135M, vLLM {report.versions.get('vllm', '?')} on {cores} cores, "
        f"{script.user_count} users, {shortest:,}-{longest:,} tokens"
    )


def sections(report: RestartReport) -> list[Section]:
    """Lay out every figure."""
    pools = {plan.name: plan.pool_tokens for plan in report.plans}
    rows = []
    for name, label in LABELS.items():
        sources = report.sources[name]
        counts = (sources.computed, sources.engine_hit, sources.loaded)
        rows.append(
            (label, f"{pools[name]:,}", *milliseconds(report.ttft_ms[name]), *(f"{one:,}" for one in counts))
        )
    used, limit = size(report.disk_bytes_used), size(report.disk_bytes_limit)
    chunks = NOT_TAKEN if report.disk_chunks is None else f"{report.disk_chunks:,}"
    facts = [
        *equality_rows(report.verdict),
        ("disk used when the server was killed / limit", f"{used} / {limit}"),
        ("chunks brought back from disk", chunks),
        ("new server healthy after", f"{report.restart_s:.1f} s"),
        ("connector", report.connector),
    ]
    turns = report.script.turn_count
    return [
        Section(
            "Each user's last prompt, asked again",
            ("", "engine's pool,\ntokens", "first token\np50, ms", "\np95, ms",
             "prompt tokens\ncomputed", "\nengine hit", "\nloaded"),
            tuple(rows),
            f"After {turns} turns kvtide's server was killed (SIGKILL) and started again with the same"
            " folder; nothing of these prompts was in its memory. While one server answers, the others are"
            " paused.",
        ),
        Section("Exactness and disk", ("", ""), tuple(facts)),
        bar_section(report.bars),
    ]  # fmt: skip


def as_json(report: RestartReport) -> dict[str, object]:
    """Make the fields of ``report-restart.json``."""
    verdict = report.verdict
    shortest, longest = report.context_tokens()
    return {
        "passed": report.passed,
        "exact": verdict.exact,
        "compared_requests": verdict.compared_requests,
        "diverging_requests": verdict.diverging_requests,
        "first_divergence": None if verdict.first_divergence is None else str(verdict.first_divergence),
        "not_comparable": [asdict(odd) for odd in verdict.not_comparable],
        "prompt_tokens": verdict.prompt_tokens,
        "loaded_tokens": verdict.loaded_tokens,
        "ttft_ms": {_TTFT_FIELDS[name]: asdict(one) for name, one in report.ttft_ms.items()},
        "token_sources": {name: asdict(sources) for name, sources in report.sources.items()},
        "restart_s": report.restart_s,
        "disk_chunks": report.disk_chunks,
        "disk_bytes_used": report.disk_bytes_used,
        "disk_bytes_limit": report.disk_bytes_limit,
        "bars": [bar_json(bar) for bar in report.bars],
        "setup_s": report.setup_s,
        "wall_s": report.wall_s,
        "versions": dict(report.versions),
        "machine": dict(report.machine),
        "connector": report.connector,
        "asked": {
            "user_count": report.script.user_count,
            "turn_count": report.script.turn_count,
            "new_tokens": report.script.new_tokens,
            "recompute_new_tokens": RECOMPUTE_TOKENS,
            "block_tokens": BLOCK_TOKENS,
            "engine_pool_tokens": {plan.name: plan.pool_tokens for plan in report.plans},
            "shortest_prompt_tokens": shortest,
            "longest_prompt_tokens": longest,
        },
        "meaning": MEANING,
        "requests": [request_json(exchange) for exchange in report.exchanges],
    }


MEANING = {
    "compared_requests": f"requests after the restart that loaded at least {MIN_LOADED_TOKENS} prompt tokens"
    " and whose cached length is that of the reference",
    "loaded_tokens": "sum over compared requests, by vLLM's own counter read before and after each; all of it"
    " comes from disk, since nothing of these prompts was in the new server's memory",
    "ttft_ms": "of one request at a time, the other two servers being paused (SIGSTOP); the same prompts on"
    " all three: those that were loaded on kvtide's server",
    "disk_chunks": "chunks that kvtide brought back from disk for these prompts, by its own counter",
    "restart_s": "from starting the new server to its saying that it is healthy",
    "disk_bytes_used": "what all files in the disk's folder took on the file system after the kill",
    "wall_s": "everything after the model was there: starting and ending the servers included",
}
