"""The page ``index.html``: bars, notes and pictures of a run, in one file that needs no other.

Knows results and how to write them as HTML. Does not know what they mean.
"""

from collections.abc import Mapping, Sequence

from benchmarks.frame.bars import Bar
from benchmarks.frame.plots import Bars, Plot, data_url, png
from benchmarks.frame.results import Result
from kvtide.pages import document, text

STYLE = """
table { width: 100%; margin: 1rem 0; }
th, td { text-align: left; padding: .35rem .6rem; vertical-align: top; }
td.number { text-align: right; white-space: nowrap; }
"""


def page(environment: Mapping[str, object], results: Sequence[Result]) -> str:
    """Return the page as text."""
    body = [
        f"<h1>kvtide: benchmarks</h1><p>{text(summary(results))}</p>",
        *(_section(result) for result in results),
        f"<h2>Where this was measured</h2>{_environment(environment)}",
    ]
    return document("kvtide: benchmarks", body, STYLE)


def summary(results: Sequence[Result]) -> str:
    """Say in a sentence how it went."""
    bars = [bar for result in results for bar in result.bars]
    unfit = sum(result.verdict is None for result in results)
    met = sum(bar.met for bar in bars)
    said = f"{met} of {len(bars)} bars met."
    return said if not unfit else f"{said} {unfit} of {len(results)} benchmarks could not be judged."


def _section(result: Result) -> str:
    head = f"<h2>{text(result.name)}</h2><p>{text(result.asks)}</p>"
    if result.verdict is None:
        return f'{head}<p class="missed">Not judged: {text(result.unfit)}</p>'
    notes = "".join(f"<li>{text(note)}</li>" for note in result.verdict.notes)
    pictures = "".join(_picture(plot) for plot in result.verdict.plots)
    took = f'<p class="note">{len(result.samples)} samples, {result.wall_s:.0f} s</p>'
    return f"{head}{_bars(result.bars)}<ul>{notes}</ul>{pictures}{took}"


def _bars(bars: Sequence[Bar]) -> str:
    rows = "".join(
        f'<tr><td>{text(bar.name)}</td><td class="number">{bar.ratio:.3f}</td>'
        f'<td class="number">{bar.sense.value} {bar.bar:g}</td>'
        f'<td class="{"met" if bar.met else "missed"}">{"met" if bar.met else "missed"}</td></tr>'
        for bar in bars
    )
    return f"<table><tr><th>what</th><th>ratio</th><th>bar</th><th></th></tr>{rows}</table>"


def _picture(plot: Plot | Bars) -> str:
    return f'<img alt="{text(plot.title)}" src="{data_url(png(plot))}">'


def _environment(environment: Mapping[str, object]) -> str:
    rows = "".join(
        f"<tr><td>{text(name)}</td><td>{text(_plain(value))}</td></tr>" for name, value in environment.items()
    )
    return f"<table>{rows}</table>"


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(one) for one in value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)
