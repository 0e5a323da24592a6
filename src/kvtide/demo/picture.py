"""The report as a picture.

Knows axes and colours. Does not know how a figure came about.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtide.demo.figures import percentile, ttft_ms_of
from kvtide.demo.phases import KVTIDE, RECOMPUTE, REFERENCE, Exchange
from kvtide.demo.report import Report
from kvtide.demo.table import LABELS, headline

COLOURS = {RECOMPUTE: "#c8553d", KVTIDE: "#0b7a75", REFERENCE: "#e0a458"}
_SOURCE_COLOURS = {"computed": "#c8553d", "loaded from host memory": "#0b7a75", "engine's own hit": "#e0a458"}
_ORDER = (RECOMPUTE, KVTIDE, REFERENCE)
_INK = "#222831"
STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "text.color": _INK}


def write_picture(report: Report, path: Path) -> None:
    """Draw times to first token and the origin of prompt tokens into the PNG file ``path``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, grid = pyplot.subplot_mosaic(
            [["length", "spread"], ["sources", "sources"]],
            figsize=(12, 7.6),
            height_ratios=[2.6, 1],
            width_ratios=[1.35, 1],
            layout="constrained",
        )
        figure.suptitle(headline(report), x=0.01, ha="left", fontweight="bold")
        draw_by_length(grid["length"], [one for one in report.exchanges if one.turn > 0], LABELS)
        draw_spread(grid["spread"], report.exchanges, LABELS)
        _sources(grid["sources"], report)
        figure.savefig(path, dpi=150, facecolor="white")
        pyplot.close(figure)


def draw_by_length(axes: Any, exchanges: Sequence[Exchange], labels: Mapping[str, str]) -> None:
    """Draw each time to first token over the length of its prompt."""
    for name in _ORDER:
        points = [
            (exchange.replies[name].prompt_tokens, exchange.replies[name].ttft_ms)
            for exchange in exchanges
            if name in exchange.replies
        ]
        marker = {RECOMPUTE: "o", KVTIDE: "o", REFERENCE: "x"}[name]
        axes.scatter(*zip(*points, strict=True), s=22, alpha=0.75, color=COLOURS[name], marker=marker,
                     label=labels[name])  # fmt: skip
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)
    axes.set_xlabel("prompt length (tokens)")
    axes.set_ylabel("time to first token (ms, log scale)")
    axes.set_title(
        "Time to first token by length of the prompt; each mark a request", loc="left", fontsize=10
    )
    axes.grid(axis="y", which="both", alpha=0.15)
    axes.legend(edgecolor="none", loc="best", framealpha=0.8)


def draw_spread(axes: Any, exchanges: Sequence[Exchange], labels: Mapping[str, str]) -> None:
    """Draw how times to first token are spread, a row to each server."""
    names = [name for name in reversed(_ORDER) if ttft_ms_of(exchanges, name)]
    for row, name in enumerate(names):
        values = sorted(ttft_ms_of(exchanges, name))
        # Spread over the row by rank: every request is seen, and nothing is drawn by chance.
        rows = [row - 0.28 + 0.56 * ((i * 0.618034) % 1) for i in range(len(values))]
        axes.scatter(values, rows, s=14, alpha=0.4, color=COLOURS[name], linewidths=0)
        low, first, median, third, high = (percentile(values, percent) for percent in (5, 25, 50, 75, 95))
        axes.hlines(row, low, high, color=COLOURS[name], linewidth=1.2)
        axes.hlines(row, first, third, color=COLOURS[name], linewidth=9, alpha=0.55)
        axes.vlines(median, row - 0.3, row + 0.3, color=_INK, linewidth=1.8)
        axes.annotate(f"{median:,.0f} ms", (median, row + 0.33), ha="center", va="bottom", fontweight="bold")
    axes.set_yticks(range(len(names)), [labels[name] for name in names])
    axes.set_ylim(-0.6, max(len(names), 1) - 0.3)
    axes.set_xscale("log")
    _plain_ticks(axes.xaxis)
    axes.set_xlabel("time to first token (ms, log scale)")
    axes.set_title("Bar: middle half; line: 5 % to 95 %; mark: median", loc="left", fontsize=10)
    axes.grid(axis="x", which="both", alpha=0.15)


def _sources(axes: Any, report: Report) -> None:
    names = list(reversed(_ORDER))
    sources = [report.figures.sources[name] for name in names]
    left = [0] * len(names)
    for label, counts in (
        ("computed", [one.computed for one in sources]),
        ("loaded from host memory", [one.loaded for one in sources]),
        ("engine's own hit", [one.engine_hit for one in sources]),
    ):
        axes.barh(
            range(len(names)), counts, left=left, height=0.62, color=_SOURCE_COLOURS[label], label=label
        )
        left = [start + count for start, count in zip(left, counts, strict=True)]
    axes.set_yticks(range(len(names)), [LABELS[name] for name in names])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("prompt tokens (first turns, computed everywhere, not counted)")
    axes.set_title("Where prompt tokens came from", loc="left", fontsize=10)
    axes.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))


def _plain_ticks(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_minor_formatter(NullFormatter())
