"""Pictures as data, and their drawing.

A benchmark says what to draw; only this module knows matplotlib.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE_INCH = (7.2, 3.6)
COLOURS = ("#0f766e", "#9a3412", "#4338ca", "#a16207", "#64748b", "#be185d")
BAR_COLOUR = "#b91c1c"


@dataclass(frozen=True, slots=True)
class Line:
    """One series.

    Attributes:
        label: For the legend.
        x: Positions.
        y: Values, as many.
        joined: Whether neighbours are connected.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture.

    Attributes:
        title: What it shows.
        x_label: With unit.
        y_label: With unit.
        lines: What is drawn.
        limits: Horizontal lines to compare with, by label.
        log_x: Whether the x axis is logarithmic.
        log_y: Whether the y axis is.
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    limits: tuple[tuple[str, float], ...] = ()
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """One picture of horizontal bars in groups.

    Attributes:
        title: What it shows.
        x_label: With unit.
        groups: Names, from the top down.
        series: A label and one value per group, each.
        log_x: Whether the x axis is logarithmic.
    """

    title: str
    x_label: str
    groups: tuple[str, ...]
    series: tuple[tuple[str, tuple[float, ...]], ...]
    log_x: bool = False


def png(plot: Plot | Bars) -> bytes:
    """Draw ``plot``; returns a PNG file."""
    return _bars(plot) if isinstance(plot, Bars) else _lines(plot)


def _bars(plot: Bars) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    thickness = 0.8 / len(plot.series)
    height_inch = 1.2 + 0.24 * len(plot.groups) * len(plot.series)
    figure = Figure(figsize=(SIZE_INCH[0], height_inch), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, ((label, values), colour) in enumerate(
        zip(plot.series, _colours(len(plot.series)), strict=True)
    ):
        places = [group + (index - (len(plot.series) - 1) / 2) * thickness for group in range(len(values))]
        drawn = axes.barh(places, values, height=thickness, color=colour, label=label)
        axes.bar_label(drawn, fmt="{:,.3g}", fontsize=7, padding=2)
    axes.set(title=plot.title, xlabel=plot.x_label)
    axes.set_yticks(range(len(plot.groups)), plot.groups, fontsize=8)
    axes.invert_yaxis()
    if plot.log_x:
        axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return _drawn(figure)


def _lines(plot: Plot) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCH, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for line, colour in zip(plot.lines, _colours(len(plot.lines)), strict=True):
        axes.plot(
            line.x, line.y, marker="o", markersize=4, color=colour, label=line.label,
            linestyle="-" if line.joined else "none", linewidth=1.2,
        )  # fmt: skip
    for index, (label, value) in enumerate(plot.limits):
        axes.axhline(
            value, color=BAR_COLOUR, linewidth=1, linestyle=("--", ":", "-.")[index % 3], label=label
        )
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    if plot.log_x:
        axes.set_xscale("log", base=2)
    if plot.log_y:
        axes.set_yscale("log")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _drawn(figure)


def _drawn(figure: "Figure") -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def data_url(picture: bytes) -> str:
    """Pack a PNG file so that a page can carry it."""
    return "data:image/png;base64," + base64.b64encode(picture).decode("ascii")


def _colours(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]
