"""Draws what the adviser says of some sizes over what a replay hits at more: docs/images/adviser.png.

kvtide advise --replay TRACE --model BYTES --host-memory SIZE --json > advice.json
kvtide replay TRACE --policies adaptive --fractions ... --json > replay.json
scripts/adviser_picture.py BYTES replay.json docs/images/adviser.png advice.json [another.json]
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

GIB = 1 << 30
REPLAY_COLOUR, SAID_COLOURS = "#64748b", ("#0f766e", "#9a3412")


def main(bytes_per_token: str, replay_path: str, picture: str, *advice_paths: str) -> None:
    """Read all of them, and write the picture."""
    replay = json.loads(Path(replay_path).read_text())
    (hits,) = replay["hit_ratio"].values()
    block_bytes = int(bytes_per_token) * replay["block_tokens"]

    figure = Figure(figsize=(7.2, 3.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sizes = [replay["capacity_blocks"][one] * block_bytes / GIB for one in hits]
    shares = [100 * ratio for ratio in hits.values()]
    axes.plot(sizes, shares, color=REPLAY_COLOUR, marker=".", label="a replay of each size, whole trace")
    axes.axhline(
        100 * replay["unbounded"], color=REPLAY_COLOUR, linestyle="--", label="the same, all memory there is"
    )
    for path, colour in zip(advice_paths, SAID_COLOURS, strict=False):
        _said(axes, json.loads(Path(path).read_text()), colour)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(_size))
    axes.set(xlabel="host memory", ylabel="hits, of 100 prompt tokens", ylim=(0, None))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(picture)


def _said(axes: Axes, advice: dict[str, Any], colour: str) -> None:
    """Draw each size with the error bar of its gain; the one that is there has none, and is a square."""
    said = advice["models"][0]["tiers"][0]["sizes"]
    for others in (True, False):
        some = [one for one in said if (one["times"] != 1) is others]
        now = _size(next(one["size_bytes"] for one in said if one["times"] == 1) / GIB, None)
        axes.errorbar(
            [one["size_bytes"] / GIB for one in some],
            [one["hit_points"] for one in some],
            yerr=[one["bar_points"] for one in some],
            fmt="o" if others else "s", color=colour, capsize=4, markersize=4 if others else 7,
            label=None if others else f"the adviser of a server with {now}",
        )  # fmt: skip


def _size(gibibytes: float, _: object) -> str:
    return f"{gibibytes / 1024:g} TiB" if gibibytes >= 1024 else f"{gibibytes:g} GiB"


if __name__ == "__main__":
    main(*sys.argv[1:])
