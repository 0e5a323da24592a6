"""How our HTML pages look and what they may do: one file each, light or dark as the reader's screen is.

Knows HTML and nothing of what a page says. A page loads nothing: its policy forbids it, whatever got in.
"""

import html
from collections.abc import Sequence

STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #2a9d3f; --bad: #d1303f; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
h1, p, li { overflow-wrap: anywhere; }
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
POLICY = "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def document(title: str, body: Sequence[str], style: str = "", head: str = "") -> str:
    """Put a page together.

    Args:
        title: Plain text.
        body: HTML.
        style: CSS of this page beside the common one.
        head: HTML for the head, such as a script.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{text(title)}</title>'
        f"<style>{STYLE}{style}</style>{head}</head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def text(plain: str) -> str:
    """Write plain text as HTML, in an attribute, too. What no file can hold becomes a question mark."""
    return html.escape(plain.encode("utf-8", "replace").decode())
