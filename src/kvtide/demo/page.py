"""The report as one HTML file that needs nothing else.

Knows HTML. Takes the tables from ``kvtide.demo.table`` and the picture as bytes; computes nothing.
"""

import base64
import html
from pathlib import Path

from kvtide.demo.report import Report
from kvtide.demo.table import LABELS, Section, headline, sections

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #2a9d3f; --bad: #d1303f; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; text-align: right; vertical-align: bottom; }
th, td { border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; white-space: pre-line; }
img { width: 100%; height: auto; background: #fff; border-radius: .4rem; }
.note, footer { opacity: .75; font-size: .9rem; }
.met { color: var(--good); } .missed { color: var(--bad); font-weight: 700; }
blockquote { margin: .2rem 0 1.2rem; padding-left: .8rem; border-left: 3px solid var(--line); }
"""


def write_page(report: Report, picture: Path, path: Path) -> None:
    """Write the page to ``path``, with the file ``picture`` inside."""
    image = base64.b64encode(picture.read_bytes()).decode()
    verdict = "every bar is met" if report.passed else "a bar is missed"
    body = [
        "<h1>kvtide: KV cache to host memory and back</h1>",
        f"<p>{_text(headline(report))}: <strong>{verdict}</strong>.</p>",
        f'<p><img alt="Times to first token and where prompt tokens came from" '
        f'src="data:image/png;base64,{image}"></p>',
        *(_table(section) for section in sections(report)),
        "<h2>The first user's conversation</h2>",
        *_conversation(report),
        _footer(report),
    ]
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>kvtide demo</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n",
        encoding="utf-8",
    )


def _table(section: Section) -> str:
    header = "".join(f"<th>{_text(name)}</th>" for name in section.header if any(section.header))
    rows = "\n".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in section.rows)
    note = f'<p class="note">{_text(section.note)}</p>' if section.note else ""
    return (
        f"<h2>{_text(section.title)}</h2>\n<table><thead><tr>{header}</tr></thead>"
        f"<tbody>\n{rows}\n</tbody></table>{note}"
    )


def _cell(cell: str) -> str:
    mark = f' class="{cell}"' if cell in ("met", "missed") else ""
    return f"<td{mark}>{_text(cell)}</td>"


def _conversation(report: Report) -> list[str]:
    parts = []
    for said in report.conversation:
        times = ", ".join(f"{LABELS[name]} {ttft_ms:,.0f} ms" for name, ttft_ms in said.ttft_ms.items())
        parts.append(
            f"<p><strong>{_text(said.question)}</strong><br>"
            f'<span class="note">{said.prompt_tokens:,} prompt tokens; first token: {_text(times)}</span></p>'
            f"<blockquote>{_text(said.answer)}</blockquote>"
        )
    return parts


def _footer(report: Report) -> str:
    facts = [f"{name} {value}" for name, value in report.versions.items()]
    facts += [f"{name}: {value}" for name, value in report.machine.items()]
    return f"<footer><p>{_text(' · '.join(facts))}</p></footer>"


def _text(text: str) -> str:
    return html.escape(text)
