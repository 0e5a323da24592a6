"""What came out of trials, for people.

Knows reports as they are written to files; does not know how they came about.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from frozen.judge import ARMS, MAX_HOOK_MS, MAX_TTFT_RATIO, TIER, WITHOUT

Report = Mapping[str, Any]

COUNTED = (
    ("brought back all the same", "tier_hit_chunks{"),
    ("computed, as the tier is slower", "tier_passed_over_chunks{"),
    ("written", "tier_stored_chunks{"),
)
"""What is told of kvtide's counters, and how their names begin."""


def lines(report: Report) -> list[str]:
    """Tell one report in a few lines."""
    name = report["kind"]
    if "unfit" in report:
        return [f"{name}: could not be judged: {report['unfit']}"]
    slowest, told = report["slowest"], []
    for arm in ARMS:
        times = f"p50 {report['p50_ms'][arm]:.0f} ms, p95 {report['p95_ms'][arm]:.0f} ms"
        told.append(f"{arm}: {report['requests'][arm]} requests, time to first token {times}")
    told.append(f"medium: {report['medium']}; left out by kvtide after round {report['left_out_after']}")
    counted = [f"{title} {_sum(report, name):.0f}" for title, name in COUNTED]
    told.append(f"chunks: {', '.join(counted)}")
    told.append(
        f"slowest of {report['call_count']:,} hooks: {slowest['hook']}, {slowest['own_ms']:.2f} ms"
        f" (on the wall {slowest['wall_ms']:.2f}, of its own work {slowest['cpu_ms']:.2f})"
    )
    count = len({one["index"] for one in report["rounds"]})
    if 2 * report["quiet_rounds"] < count:
        told.append(f"NOT A QUIET MACHINE: {report['quiet_rounds']} of {count} rounds were undisturbed")
    return [f"{name}: {line}" for line in [*told, *report["failures"][:10]]]


def table(reports: Sequence[Report]) -> Table:
    """Put reports side by side, with what is allowed in the heads."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("", no_wrap=True)
    for head in (
        "requests\na side",
        "p95 ms\nwith tier",
        "p95 ms\nwithout",
        f"ratio\n≤ {MAX_TTFT_RATIO:.2f}",
        f"slowest hook\n≤ {MAX_HOOK_MS:g} ms",
        "failed\n0",
        "",
    ):
        shown.add_column(head, justify="right")
    for report in reports:
        if "unfit" in report:
            shown.add_row(report["kind"], *[""] * 6, "not judged")
            continue
        shown.add_row(
            report["kind"],
            str(report["requests"][TIER]),
            f"{report['p95_ms'][TIER]:.0f}",
            f"{report['p95_ms'][WITHOUT]:.0f}",
            f"{report['ttft_ratio']:.3f}",
            f"{report['slowest']['own_ms']:.2f} ms",
            str(len(report["failures"])),
            "met" if report["passed"] else "MISSED",
        )
    return shown


def _sum(report: Report, beginning: str) -> float:
    return sum(value for name, value in report["counted"].items() if name.startswith(beginning))
