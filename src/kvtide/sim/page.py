"""Curves as one HTML file that needs nothing else: pictures, and tables of the same figures below them.

Knows HTML. Takes pictures from ``kvtide.sim.charts``; computes nothing.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvtide.pages import document, text
from kvtide.sim import charts
from kvtide.sim.curves import OPTIMUM, Curves

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ENOUGH = 0.9
"""Of what an unbounded cache hits: where more memory has little left to bring."""

MOST_NAMES = 3
LONGEST_COMMAND = 500  # a shell may have put in a thousand files
NOTHING = "-"
_STYLE = f"""
.chart {{ min-height: {charts.HEIGHT_PX}px; }}
.caption {{ font-weight: 600; margin: 1.5rem 0 .3rem; }}
.scroll {{ overflow-x: auto; }}
.scroll table {{ width: 100%; }}
.scroll th, .scroll td {{ white-space: nowrap; padding: .3rem .5rem; }}
.scroll thead th {{ font-weight: 400; border-bottom: 0; padding-block: 0; }}
.scroll thead tr:first-child th {{ font-weight: 600; }}
.scroll thead tr:last-child th {{ border-bottom: 1px solid var(--line); padding-bottom: .3rem; }}
.scroll th:first-child {{ position: sticky; left: 0; background: Canvas; }}
.scroll th:first-child {{ max-width: 40vw; overflow: hidden; text-overflow: ellipsis; }}
.swatch {{ display: inline-block; width: .7em; height: .7em; border-radius: .15em; margin-right: .5em; }}
.best {{ font-weight: 700; }} .bound th, .bound td {{ color: color-mix(in srgb, CanvasText 70%, Canvas); }}
code {{ overflow-wrap: anywhere; }}
"""
# plotly neither inherits colours nor thins out our labels, so both are told again when the screen changes.
_FIT = """<script>
(() => {
  const [dark, narrow, finger] = ["(prefers-color-scheme: dark)", "(max-width: 640px)", "(pointer: coarse)"]
    .map((query) => matchMedia(query));
  const fit = () => {
    const ink = getComputedStyle(document.body).color;
    for (const chart of document.querySelectorAll(".js-plotly-plot")) {
      const ticks = chart.layout.meta[narrow.matches ? "narrow" : "wide"];
      Plotly.relayout(chart, {
        "font.color": ink, "font.size": narrow.matches ? 12 : 13,
        "hoverlabel.font.color": ink, "hoverlabel.bgcolor": dark.matches ? "#222" : "#fff",
        "hoverlabel.bordercolor": "#8888",
        "xaxis.tickvals": ticks.tickvals, "xaxis.ticktext": ticks.ticktext,
        "dragmode": finger.matches ? false : "zoom",
      });
    }
  };
  for (const screen of [dark, narrow, finger]) screen.addEventListener("change", fit);
  fit();
})();
</script>"""
_SCRIPTLESS = (
    '<noscript><p class="note">The curves need JavaScript; the tables have the same figures.</p></noscript>'
)
_READ = "Point at a curve for its values, click a name to hide it, drag to zoom, double-click to go back."
_SHARE = "A capacity is a share of the different blocks of the trace."
_OPTIMUM = (
    "The optimum knows what will be asked for (Belady's rule, prefixes kept whole), so no policy passes it."
)
_UNBOUNDED = "Unbounded is a cache that forgets nothing."


def write_page(path: Path, curves: Curves) -> None:
    """Write the page to ``path``, over what is there. About 5 MB, most of it the library that draws.

    Raises:
        ConfigError: plotly is not installed; nothing was written.
        OSError: The file cannot be written.
    """
    body = [
        "<h1>kvtide replay: what more memory would buy</h1>",
        f"<p>{text(' · '.join(facts(curves)))}</p>",
        f"<p><strong>{text(headline(curves))}</strong></p>",
        _SCRIPTLESS,
        *_section("hits", "Hits", charts.hits(curves), _hits(curves)),
        f'<p class="note">{text(_legend(curves))}</p>',
    ]
    if curves.ttft_s:
        body += _section("ttft", "Time to first token", charts.first_tokens(curves), _first_tokens(curves))
    if curves.writes_per_access:
        body += _section("writes", "Writes", charts.writes(curves), _writes(curves))
    if curves.written_per_day:
        body += _section("wear", "Written a day", charts.written_per_day(curves), _written_per_day(curves))
    command = charts.shortened(curves.command, LONGEST_COMMAND)
    made_by = f"<footer><p>Made by <code>{text(command)}</code></p></footer>"
    body += [_FIT, *([made_by] if curves.command else [])]
    page = document("kvtide replay", body, _STYLE, f"<script>{_library()}</script>")
    path.write_text(page, encoding="utf-8")


def facts(curves: Curves) -> list[str]:
    """Say what was replayed, as far as it is known."""
    counted = [
        (curves.requests, "requests"),
        (curves.accesses, "blocks asked for"),
        (curves.unique_blocks, "different blocks"),
    ]
    names = [Path(file).name for file in curves.traces]
    if len(names) > MOST_NAMES:
        names[MOST_NAMES:] = [f"{len(names) - MOST_NAMES:,} files more"]
    said = [*names, *(f"{count:,} {what}" for count, what in counted if count is not None)]
    if curves.unique_blocks and curves.block_bytes:
        said.append(f"{charts.size_label(curves.unique_blocks * curves.block_bytes)} of KV cache")
    return said


def headline(curves: Curves) -> str:
    """Say how much memory is worth having, and with which policy."""
    best = [(capacity, *_best(curves, capacity)) for capacity in curves.capacities]
    said = ""
    if curves.unbounded is not None:
        said = f"A cache that forgets nothing hits {_percent(curves.unbounded)} of the blocks asked for. "
        for capacity, ratio, policy in best:
            if policy and ratio >= ENOUGH * curves.unbounded > 0:
                return f"{said}Nine tenths of that take {_size(curves, capacity)} with {policy}."
    capacity, ratio, policy = max(best, key=lambda one: one[1])
    if not policy or curves.unbounded == 0:
        return said.rstrip()
    return f"{said}The best that was tried hits {_percent(ratio)}: {policy}, with {_size(curves, capacity)}."


def _legend(curves: Curves) -> str:
    return " ".join(
        [
            _READ,
            *([] if curves.memory_bytes else [_SHARE]),
            *([_OPTIMUM] if OPTIMUM in curves.hit_ratio else []),
            *([_UNBOUNDED] if curves.unbounded is not None else []),
        ]
    )


def _best(curves: Curves, capacity: str) -> tuple[float, str]:
    found = [
        (curves.hit_ratio[name][capacity], name)
        for name in curves.policies
        if capacity in curves.hit_ratio[name]
    ]
    return max(found, key=lambda one: one[0], default=(0.0, ""))


def _size(curves: Curves, capacity: str) -> str:
    share, *size = charts.capacity_lines(curves, capacity)
    if curves.memory_bytes:
        return share
    return f"{share} of its memory" + "".join(f" ({known})" for known in size)


def _section(name: str, title: str, figure: "Figure", table: str) -> list[str]:
    from plotly import io

    drawn = io.to_html(
        figure,
        config={"displayModeBar": False},
        include_plotlyjs=False,
        full_html=False,
        div_id=f"chart-{name}",
    )
    return [f"<h2>{title}</h2>", f'<div class="chart" id="{name}">{drawn}</div>', table]


def _hits(curves: Curves) -> str:
    rows = []
    for name in curves.policies:
        cells = [_percent(curves.hit_ratio[name].get(capacity)) for capacity in curves.capacities]
        best = [_percent(_best(curves, capacity)[0]) for capacity in curves.capacities]
        marks = [len(curves.policies) > 1 and cell == most for cell, most in zip(cells, best, strict=True)]
        rows.append(_row(name, charts.colour_of(curves, name), cells, marks))
    if OPTIMUM in curves.hit_ratio:
        optimum = [_percent(curves.hit_ratio[OPTIMUM].get(capacity)) for capacity in curves.capacities]
        rows.append(_row(OPTIMUM, charts.BOUND_COLOUR, optimum, bound=True))
    if curves.unbounded is not None:
        unbounded = [_percent(curves.unbounded)] * len(curves.capacities)
        rows.append(_row("unbounded", charts.BOUND_COLOUR, unbounded, bound=True))
    return _table(curves, "hits", "Block accesses that hit; the most at each capacity is bold", rows)


def _first_tokens(curves: Curves) -> str:
    return _table(curves, "ttft", "Seconds to the first token", _by_part(curves, curves.ttft_s, _amount))


def _written_per_day(curves: Curves) -> str:
    rows = _by_part(curves, curves.written_per_day, _gigabytes)
    return _table(curves, "wear", "GB written a day, by tier, if every day were like this", rows)


def _by_part(curves: Curves, table: charts.Parted, written: Callable[[float | None], str]) -> list[str]:
    return [
        _row(
            f"{name} {part}",
            charts.colour_of(curves, name),
            [written(row.get(capacity, {}).get(part)) for capacity in curves.capacities],
        )
        for name, row in table.items()
        for part in charts.parts(table)
    ]


def _writes(curves: Curves) -> str:
    rows = [
        _row(
            name,
            charts.colour_of(curves, name),
            [_amount(row.get(capacity)) for capacity in curves.capacities],
            bound=name == OPTIMUM,
        )
        for name, row in curves.writes_per_access.items()
    ]
    return _table(curves, "writes", "Blocks written for each block asked for", rows)


def _table(curves: Curves, name: str, caption: str, rows: Sequence[str]) -> str:
    return (
        f'<p class="caption" id="{name}-caption">{text(caption)}</p>'
        f'<div class="scroll" tabindex="0"><table id="{name}-table" aria-labelledby="{name}-caption">'
        f"<thead>{_heads(curves)}</thead><tbody>\n" + "\n".join(rows) + "\n</tbody></table></div>"
    )


def _heads(curves: Curves) -> str:
    """Say each capacity in every unit known, a row to each."""
    lines = [charts.capacity_lines(curves, capacity) for capacity in curves.capacities]
    names = ("memory",) if curves.memory_bytes else ("capacity", "memory")
    rows = dict(zip(names, zip(*lines, strict=True), strict=False))
    if not curves.memory_bytes and curves.unique_blocks is not None:
        rows["blocks"] = tuple(f"{curves.blocks_at(capacity):,}" for capacity in curves.capacities)
    return "".join(
        f'<tr><th scope="row">{name}</th>' + "".join(f'<th scope="col">{cell}</th>' for cell in row) + "</tr>"
        for name, row in rows.items()
    )


def _row(
    label: str, colour: str, cells: Sequence[str], marks: Sequence[bool] = (), bound: bool = False
) -> str:
    marked = marks or [False] * len(cells)
    said = "".join(
        f'<td class="best">{cell}</td>' if mark else f"<td>{cell}</td>"
        for cell, mark in zip(cells, marked, strict=True)
    )
    swatch = f'<span class="swatch" style="background:{colour}"></span>'
    kind = ' class="bound"' if bound else ""
    return f'<tr{kind}><th scope="row">{swatch}{text(label)}</th>{said}</tr>'


def _percent(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"{100 * ratio:.2f}{charts.NO_BREAK}%"


def _amount(amount: float | None) -> str:
    return NOTHING if amount is None else f"{amount:.3f}"


def _gigabytes(size_bytes: float | None) -> str:
    return NOTHING if size_bytes is None else f"{size_bytes / 1e9:,.1f}"


def _library() -> str:
    from plotly import offline

    return str(offline.get_plotlyjs())
