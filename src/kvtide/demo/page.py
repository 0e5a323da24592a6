"""The report as one HTML file that needs nothing else.

Knows HTML. Takes the tables from ``kvtide.demo.table`` and the picture as bytes; computes nothing.
"""

import base64
from pathlib import Path

from kvtide.demo.report import Report
from kvtide.demo.table import LABELS, Section, headline, sections
from kvtide.pages import document, text


def write_page(report: Report, picture: Path, path: Path) -> None:
    """Write the page to ``path``, with the file ``picture`` inside."""
    image = base64.b64encode(picture.read_bytes()).decode()
    verdict = "every bar is met" if report.passed else "a bar is missed"
    body = [
        "<h1>kvtide: KV cache to host memory and back</h1>",
        f"<p>{text(headline(report))}: <strong>{verdict}</strong>.</p>",
        f'<p><img alt="Times to first token and where prompt tokens came from" '
        f'src="data:image/png;base64,{image}"></p>',
        *(_table(section) for section in sections(report)),
        "<h2>The first user's conversation</h2>",
        *_conversation(report),
        _footer(report),
    ]
    path.write_text(document("kvtide demo", body), encoding="utf-8")


def _table(section: Section) -> str:
    header = "".join(f"<th>{text(name)}</th>" for name in section.header if any(section.header))
    rows = "\n".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in section.rows)
    note = f'<p class="note">{text(section.note)}</p>' if section.note else ""
    return (
        f"<h2>{text(section.title)}</h2>\n<table><thead><tr>{header}</tr></thead>"
        f"<tbody>\n{rows}\n</tbody></table>{note}"
    )


def _cell(cell: str) -> str:
    mark = f' class="{cell}"' if cell in ("met", "missed") else ""
    return f"<td{mark}>{text(cell)}</td>"


def _conversation(report: Report) -> list[str]:
    parts = []
    for said in report.conversation:
        times = ", ".join(f"{LABELS[name]} {ttft_ms:,.0f} ms" for name, ttft_ms in said.ttft_ms.items())
        parts.append(
            f"<p><strong>{text(said.question)}</strong><br>"
            f'<span class="note">{said.prompt_tokens:,} prompt tokens; first token: {text(times)}</span></p>'
            f"<blockquote>{text(said.answer)}</blockquote>"
        )
    return parts


def _footer(report: Report) -> str:
    facts = [f"{name} {value}" for name, value in report.versions.items()]
    facts += [f"{name}: {value}" for name, value in report.machine.items()]
    return f"<footer><p>{text(' · '.join(facts))}</p></footer>"
