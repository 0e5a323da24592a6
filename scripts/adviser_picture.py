"""Draws what the adviser says of some sizes over what a replay hits at more: docs/images/adviser.png.

kvtide advise --replay TRACE --model BYTES --host-memory SIZE --json > advice.json
kvtide replay TRACE --policies adaptive --fractions ... --json > replay.json
scripts/adviser_picture.py advice.json replay.json BYTES docs/images/adviser.png
"""

import json
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

GIB = 1 << 30
REPLAY_COLOUR, SAID_COLOUR, TAKEN_COLOUR = "#64748b", "#0f766e", "#9a3412"


def main(advice_path: str, replay_path: str, bytes_per_token: str, picture: str) -> None:
    """Read both, and write the picture."""
    (model,) = json.loads(Path(advice_path).read_text())["models"]
    (tier,) = model["tiers"]
    replay = json.loads(Path(replay_path).read_text())
    (hits,) = replay["hit_ratio"].values()
    block_bytes = int(bytes_per_token) * replay["block_tokens"]

    figure = Figure(figsize=(7.2, 3.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sizes = [replay["capacity_blocks"][one] * block_bytes / GIB for one in hits]
    shares = [100 * ratio for ratio in hits.values()]
    axes.plot(sizes, shares, color=REPLAY_COLOUR, marker=".", label="a replay of each size, whole trace")
    said = tier["sizes"]
    axes.errorbar(
        [one["size_bytes"] / GIB for one in said],
        [one["hit_points"] for one in said],
        yerr=[one["bar_points"] for one in said],
        fmt="o", color=SAID_COLOUR, capsize=4, label="the adviser; bar of the gain over what there is",
    )  # fmt: skip
    taken = next(one for one in said if one["times"] == tier["advice"]["times"])
    axes.axvline(taken["size_bytes"] / GIB, color=TAKEN_COLOUR, linestyle=":", label="its advice")
    axes.axhline(100 * replay["unbounded"], color=REPLAY_COLOUR, linestyle="--", label="all memory there is")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(_size))
    axes.set(xlabel="host memory", ylabel="hits, of 100 prompt tokens", ylim=(0, None))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(picture)


def _size(gibibytes: float, _: object) -> str:
    return f"{gibibytes / 1024:g} TiB" if gibibytes >= 1024 else f"{gibibytes:g} GiB"


if __name__ == "__main__":
    main(*sys.argv[1:])
