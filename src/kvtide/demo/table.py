"""The report as tables for a terminal of 100 columns.

Knows rows and units. Does not know how a figure came about. ``sections`` are also what the page shows, so
that the two never disagree.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from kvtide.demo.bars import Bar, Sense
from kvtide.demo.exactness import Verdict
from kvtide.demo.figures import Spread
from kvtide.demo.phases import KVTIDE, RECOMPUTE, RECOMPUTE_TOKENS, REFERENCE
from kvtide.demo.report import Report

COLUMNS = 100
NOT_TAKEN = "not reported"

LABELS = {RECOMPUTE: "recompute", KVTIDE: "host hit (kvtide)", REFERENCE: "engine hit"}
_TTFT_FIELDS = {RECOMPUTE: "recompute", KVTIDE: "host_hit", REFERENCE: "engine_hit"}


@dataclass(frozen=True, slots=True)
class Section:
    """One table; the first column is text, the others are figures."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def headline(report: Report) -> str:
    """Say in one line what ran."""
    shortest, longest = report.context_tokens()
    script = report.script
    cores = report.machine.get("cores", "?")
    return (
        f"SmolLM2-135M, vLLM {report.versions.get('vllm', '?')} on {cores} cores, "
        f"{script.user_count} users x {script.turn_count} turns, prompts of {shortest:,}-{longest:,} tokens"
    )


def sections(report: Report) -> list[Section]:
    """Lay out every figure of the report."""
    return [_sequential(report), _concurrent(report), _facts(report), bar_section(report.bars)]


def show(report: Report, console: Console) -> None:
    """Print the tables."""
    show_sections(headline(report), sections(report), console)


def show_sections(heading: str, tables: Sequence[Section], console: Console) -> None:
    """Print tables under a heading."""
    console.print()
    console.print(heading, style="bold", highlight=False)
    for section in tables:
        table = Table(title=section.title, title_justify="left", title_style="bold", caption_justify="left")
        table.caption = section.note or None
        table.show_header = any(section.header)
        for index, name in enumerate(section.header):
            table.add_column(name, justify="left" if index == 0 else "right")
        for row in section.rows:
            table.add_row(*(_coloured(cell) for cell in row))
        console.print()
        console.print(table)


def _coloured(cell: str) -> str:
    return {"met": "[green]met[/green]", "missed": "[bold red]missed[/bold red]"}.get(cell, cell)


def _sequential(report: Report) -> Section:
    pools = {plan.name: plan.pool_tokens for plan in report.plans}
    rows = []
    for name in (RECOMPUTE, KVTIDE, REFERENCE):
        ttft_ms, sources = report.figures.ttft_ms[_TTFT_FIELDS[name]], report.figures.sources[name]
        counts = (sources.computed, sources.engine_hit, sources.loaded)
        pool = f"{pools[name]:,}"
        rows.append((LABELS[name], pool, *milliseconds(ttft_ms), *(f"{count:,}" for count in counts)))
    return Section(
        "One request at a time: the same prompts on three servers",
        ("", "engine's pool,\ntokens", "first token\np50, ms", "\np95, ms",
         "prompt tokens\ncomputed", "\nengine hit", "\nloaded"),
        tuple(rows),
        f"While one server answers, the others are paused. First turns are computed everywhere and not"
        f" counted. The recompute server is asked for"
        f" {RECOMPUTE_TOKENS} tokens a turn, the others for {report.script.new_tokens}.",
    )  # fmt: skip


def _concurrent(report: Report) -> Section:
    rows = [
        (
            LABELS[name],
            f"{rush.requests}",
            f"{rush.wall_s:.1f}",
            f"{rush.output_tokens_per_s:.1f}",
            *milliseconds(rush.ttft_ms),
        )
        for name, rush in report.figures.rushes.items()
    ]
    small_tokens = min(plan.pool_tokens for plan in report.plans)
    longest_tokens = report.context_tokens()[1]
    return Section(
        "All users at once: their next turns",
        ("", "requests", "seconds", "output\ntokens/s", "first token\np50, ms", "\np95, ms"),
        tuple(rows),
        f"A pool of {small_tokens:,} tokens holds {small_tokens // longest_tokens} of the longest prompts"
        " at a time: the others wait, whatever is cached.",
    )


def _facts(report: Report) -> Section:
    figures = report.figures
    rows = equality_rows(figures.verdict)
    memory = [size(figures.host_bytes_used), size(figures.host_bytes_budget)]
    resident = [size(figures.resident_bytes.get(name)) for name in (KVTIDE, RECOMPUTE)]
    rows += [
        ("host memory used / budget", " / ".join(memory)),
        ("whole server, with kvtide / without", " / ".join(resident)),
        ("copied to host memory", _copied(figures.last.stored_bytes, figures.last.stored_s)),
        ("copied back", _copied(figures.last.loaded_bytes, figures.last.loaded_s)),
        ("connector", report.connector),
    ]
    return Section("Exactness and memory", ("", ""), tuple(rows))


def equality_rows(verdict: Verdict) -> list[tuple[str, str]]:
    """Lay out what the judge of equality said."""
    counts = f"{verdict.compared_requests} compared, {verdict.diverging_requests} differ"
    equality = "equal, bit for bit" if verdict.exact else "NOT SHOWN TO BE EQUAL"
    rows = [("answers after a load", counts), ("tokens and log-probabilities", equality)]
    if verdict.first_divergence is not None:
        rows.append(("first divergence", str(verdict.first_divergence)))
    if verdict.not_comparable:
        listed = ", ".join(
            f"user {odd.user} turn {odd.turn}: {odd.kvtide_cached_tokens} / {odd.reference_cached_tokens}"
            for odd in verdict.not_comparable[:4]
        )
        count = len(verdict.not_comparable)
        rows.append((f"not comparable: {count}", f"cached with kvtide / reference: {listed}"))
    return rows


def bar_section(bars: Sequence[Bar]) -> Section:
    """Lay out bars, and whether they are met."""
    signs = {Sense.AT_LEAST: "\u2265", Sense.AT_MOST: "\u2264"}
    rows = tuple(
        (
            bar.name,
            _figure(bar.figure, bar),
            f"{signs[bar.sense]} {_figure(bar.limit, bar)}",
            "met" if bar.met else "missed",
        )
        for bar in bars
    )
    return Section("Bars", ("", "figure", "bar", ""), rows)


def _figure(value: float | None, bar: Bar) -> str:
    if value is None:
        return NOT_TAKEN
    if bar.unit == "bytes":
        return size(int(value))
    if bar.unit:
        return f"{value:,.0f} {bar.unit}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def milliseconds(spread: Spread) -> tuple[str, str]:
    """Write the median and the 95th percentile."""
    texts = [NOT_TAKEN if value is None else f"{value:,.1f}" for value in (spread.p50, spread.p95)]
    return texts[0], texts[1]


def size(count_bytes: int | None) -> str:
    """Write a size for people."""
    if count_bytes is None:
        return NOT_TAKEN
    mebibytes = count_bytes / 2**20
    return f"{mebibytes / 1024:.2f} GiB" if mebibytes >= 1024 else f"{mebibytes:,.1f} MiB"


def _copied(count_bytes: int | None, seconds: float | None) -> str:
    return size(count_bytes) + ("" if seconds is None else f" in {seconds:.2f} s")
