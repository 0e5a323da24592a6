"""The page ``index.html``: bars, notes and pictures of a run, in one file that needs no other.

Knows results and how to write them as HTML. Does not know what they mean.
"""

from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.frame.bars import Bar
from benchmarks.frame.plots import Bars, Plot, data_url, png
from benchmarks.frame.results import Result

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 860px; margin: 2rem auto; padding: 0 1rem;
       color: #1e293b; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid #e2e8f0; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.met { color: #0f766e; } .missed { color: #b91c1c; font-weight: 600; }
img { max-width: 100%; height: auto; margin: .5rem 0; } .small { color: #64748b; font-size: .85rem; }
"""


def page(environment: Mapping[str, object], results: Sequence[Result]) -> str:
    """Return the page as text."""
    sections = "".join(_section(result) for result in results)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kvtide: benchmarks</title><style>{STYLE}</style></head><body>"
        f"<h1>kvtide: benchmarks</h1><p>{escape(summary(results))}</p>{sections}"
        f"<h2>Where this was measured</h2>{_environment(environment)}</body></html>\n"
    )


def summary(results: Sequence[Result]) -> str:
    """Say in a sentence how it went."""
    bars = [bar for result in results for bar in result.bars]
    unfit = sum(result.verdict is None for result in results)
    met = sum(bar.met for bar in bars)
    text = f"{met} of {len(bars)} bars met."
    return text if not unfit else f"{text} {unfit} of {len(results)} benchmarks could not be judged."


def _section(result: Result) -> str:
    head = f"<h2>{escape(result.name)}</h2><p>{escape(result.asks)}</p>"
    if result.verdict is None:
        return f'{head}<p class="missed">Not judged: {escape(result.unfit)}</p>'
    notes = "".join(f"<li>{escape(note)}</li>" for note in result.verdict.notes)
    pictures = "".join(_picture(plot) for plot in result.verdict.plots)
    took = f'<p class="small">{len(result.samples)} samples, {result.wall_s:.0f} s</p>'
    return f"{head}{_bars(result.bars)}<ul>{notes}</ul>{pictures}{took}"


def _bars(bars: Sequence[Bar]) -> str:
    rows = "".join(
        f'<tr><td>{escape(bar.name)}</td><td class="number">{bar.ratio:.3f}</td>'
        f'<td class="number">{bar.sense.value} {bar.bar:g}</td>'
        f'<td class="{"met" if bar.met else "missed"}">{"met" if bar.met else "missed"}</td></tr>'
        for bar in bars
    )
    return f"<table><tr><th>what</th><th>ratio</th><th>bar</th><th></th></tr>{rows}</table>"


def _picture(plot: Plot | Bars) -> str:
    return f'<img alt="{escape(plot.title, quote=True)}" src="{data_url(png(plot))}">'


def _environment(environment: Mapping[str, object]) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(_plain(value))}</td></tr>"
        for name, value in environment.items()
    )
    return f"<table>{rows}</table>"


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(one) for one in value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)
