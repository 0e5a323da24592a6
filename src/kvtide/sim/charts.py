"""Curves as pictures that answer to the mouse: what stands where, in which colour.

Knows plotly. Does not know HTML, and does not judge the figures.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtide.errors import ConfigError
from kvtide.pages import text
from kvtide.sim.curves import OPTIMUM, Curves

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Readable on white and on near black, since a page follows the reader's screen.
BOUND_COLOUR = "#7d8590"
BOUND_SYMBOL = "line-ew-open"  # part of its line, and still seen where there is one capacity and no line
COLOURS = {
    "adaptive": "#0b9488",
    "lru": "#c8553d",
    "arc": "#d0902f",
    "s3fifo": "#5b7fd6",
    "sieve": "#a06bc4",
    "lfu": "#7f9139",
    "gdsf": "#cc5c97",
    "second_sight": "#9c755f",
}
OTHER_COLOURS = ("#3c9dcc", "#5c9e6f", "#b0596b", "#6f7fb0")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "x", "pentagon", "star")
DASHES = ("solid", "dot", "dash", "longdash")
SHARE_TITLE = "capacity (% of unique blocks, log)"
SIZE_TITLE = "host memory (log)"
LEADING = "adaptive"
HEIGHT_PX = 470
LONGEST_LABEL = 40
LEAST_TICK_GAPS = (0.08, 0.25)
"""Between labels, in lengths of the axis: on a wide screen, and on a phone. Closer, they would touch."""

NO_BREAK = "\u00a0"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


Parted = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Policy, capacity, percentile or tier: a figure."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line to draw.

    Attributes:
        label: Plain text.
        values: Capacity: y. What is left out is a gap.
        colour: CSS.
        symbol: Of a mark, plotly's name.
        dash: plotly's name.
        width_px: Of the line.
    """

    label: str
    values: Mapping[str, float]
    colour: str
    symbol: str
    dash: str = "solid"
    width_px: float = 1.6


def hits(curves: Curves) -> "Figure":
    """Draw hits over capacity, in percent, below what no cache can pass."""
    drawn = [_of_policy(curves, name, _percent(row)) for name, row in curves.hit_ratio.items()]
    if curves.unbounded is not None:
        everywhere = dict.fromkeys(curves.capacities, 100 * curves.unbounded)
        drawn.append(Curve("unbounded", everywhere, BOUND_COLOUR, BOUND_SYMBOL, "dot", 2))
    return _figure(curves, drawn, "block accesses that hit (%)", ".2f", " %")


def writes(curves: Curves) -> "Figure":
    """Draw what each policy writes to get its hits."""
    drawn = [_of_policy(curves, name, row) for name, row in curves.writes_per_access.items()]
    return _figure(curves, drawn, "blocks written per block asked for", ".3f", "")


def written_per_day(curves: Curves) -> "Figure":
    """Draw what each tier is written, in units of 10^9 bytes as disks are sold."""
    scaled = {
        name: {at: {tier: size / 1e9 for tier, size in tiers.items()} for at, tiers in row.items()}
        for name, row in curves.written_per_day.items()
    }
    return _figure(curves, _by_part(curves, scaled), "written a day (GB)", ",.1f", " GB")


def first_tokens(curves: Curves) -> "Figure":
    """Draw times to first token, a line to each policy and percentile."""
    return _figure(curves, _by_part(curves, curves.ttft_s), "time to first token (s)", ".3~s", "s")


def parts(table: Parted) -> tuple[str, ...]:
    """List the percentiles or tiers there are, in the order given."""
    return tuple(dict.fromkeys(part for row in table.values() for at in row.values() for part in at))


def colour_of(curves: Curves, policy: str) -> str:
    """Give a policy its colour: a known one its own, any other one that is free."""
    if policy in COLOURS:
        return COLOURS[policy]
    tables: tuple[Mapping[str, object], ...] = (
        curves.hit_ratio,
        curves.writes_per_access,
        curves.written_per_day,
        curves.ttft_s,
    )
    names = [name for table in tables for name in table]
    others = list(dict.fromkeys(name for name in names if name not in COLOURS and name != OPTIMUM))
    return OTHER_COLOURS[others.index(policy) % len(OTHER_COLOURS)] if policy in others else BOUND_COLOUR


def capacity_lines(curves: Curves, capacity: str) -> list[str]:
    """Write a capacity in every unit known: ``["0.5 %", "66.7 GiB"]``."""
    size_bytes = curves.bytes_at(capacity)
    share = [] if curves.memory_bytes else [f"{100 * float(capacity):g}{NO_BREAK}%"]
    return [*share, *([] if size_bytes is None else [size_label(size_bytes)])]


def size_label(size_bytes: int) -> str:
    """Write a size in three digits, where an axis has no room for more: ``66.7 GiB``."""
    power = min(max(size_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    size = size_bytes / (1 << 10 * power)
    return (f"{size:,.0f}" if size >= 100 else f"{size:.3g}") + NO_BREAK + _UNITS[power]


def shortened(plain: str, most: int) -> str:
    """Leave out the end of a text that is longer than ``most`` characters, and show that."""
    return plain if len(plain) <= most else plain[: most - 1] + "\u2026"


def plotly_objects() -> Any:
    """Load what draws: half a second, so not before something is drawn.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise ConfigError("plotly", None, "a page is drawn with it: pip install 'kvtide[replay]'") from error
    return graph_objects


def _of_policy(
    curves: Curves, name: str, values: Mapping[str, float], label: str = "", dash: str = "solid"
) -> Curve:
    if name == OPTIMUM:
        return Curve(label or name, values, BOUND_COLOUR, BOUND_SYMBOL, "dash", 2)
    names = (*COLOURS, *curves.policies)
    symbol = SYMBOLS[names.index(name) % len(SYMBOLS)] if name in names else SYMBOLS[0]
    return Curve(label or name, values, colour_of(curves, name), symbol, dash, 3 if name == LEADING else 1.6)


def _by_part(curves: Curves, table: Parted) -> list[Curve]:
    drawn = []
    for name, row in table.items():
        for index, part in enumerate(parts(table)):
            values = {capacity: at[part] for capacity, at in row.items() if part in at}
            drawn.append(_of_policy(curves, name, values, f"{name} {part}", DASHES[index % len(DASHES)]))
    return drawn


def _x(curves: Curves, capacity: str) -> float:
    """Percent, or GiB where capacities are sizes."""
    place = curves.place_of(capacity)
    return float(place / (1 << 30) if curves.memory_bytes else 100 * place)


def _figure(curves: Curves, drawn: Sequence[Curve], y_title: str, y_format: str, y_unit: str) -> "Figure":
    go = plotly_objects()
    figure = go.Figure()
    for curve in drawn:
        x = [_x(curves, capacity) for capacity in curves.capacities]
        y = [curve.values.get(capacity) for capacity in curves.capacities]
        figure.add_trace(
            go.Scatter(
                x=x,
                y=y,
                name=text(shortened(curve.label, LONGEST_LABEL)),
                mode="lines+markers",
                line={"color": curve.colour, "dash": curve.dash, "width": curve.width_px},
                marker={"symbol": curve.symbol, "size": 7},
                hovertemplate=f"%{{y:{y_format}}}{y_unit}",
            )
        )
    figure.update_layout(**_layout(curves, y_title))
    return figure


def _layout(curves: Curves, y_title: str) -> dict[str, Any]:
    grid = {"gridcolor": "rgba(128,128,128,.22)", "zeroline": False, "showline": False}
    wide, narrow = (_ticks(curves, least) for least in LEAST_TICK_GAPS)
    return {
        "template": "none",
        "height": HEIGHT_PX,
        "margin": {"l": 56, "r": 12, "t": 8, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": BOUND_COLOUR},
        "hovermode": "x unified",
        "hoversort": "value descending",
        "hoverlabel": {"namelength": -1},
        "showlegend": True,  # of a single curve, too
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        "xaxis": {
            **grid,
            **wide,
            "type": "log",
            "title": {"text": SIZE_TITLE if curves.memory_bytes else SHARE_TITLE, "standoff": 12},
            "tickangle": 0,
            "ticksuffix": " GiB" if curves.memory_bytes else " %",
            "hoverformat": ".3~f",
            "spikecolor": BOUND_COLOUR,
            "spikethickness": 1,
            "spikedash": "dot",
            "automargin": True,
        },
        "yaxis": {
            **grid,
            "title": {"text": y_title, "standoff": 8},
            "rangemode": "tozero",
            "automargin": True,
        },
        "meta": {"wide": wide, "narrow": narrow},
    }


def _ticks(curves: Curves, least_gap: float) -> dict[str, list[float] | list[str]]:
    """Choose whose labels find room: the first, the last, and those between that are far enough off."""
    places = [math.log(_x(curves, capacity)) for capacity in curves.capacities]
    least = least_gap * (places[-1] - places[0])
    chosen = [0]
    for index, place in enumerate(places[1:-1], 1):
        if place - places[chosen[-1]] >= least and places[-1] - place >= least:
            chosen.append(index)
    if places[-1] > places[0]:
        chosen.append(len(places) - 1)
    shown = [curves.capacities[index] for index in chosen]
    return {
        "tickvals": [_x(curves, capacity) for capacity in shown],
        "ticktext": ["<br>".join(capacity_lines(curves, capacity)) for capacity in shown],
    }


def _percent(row: Mapping[str, float]) -> dict[str, float]:
    return {capacity: 100 * ratio for capacity, ratio in row.items()}
