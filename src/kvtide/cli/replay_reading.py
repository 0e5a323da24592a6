"""How a trace is named on the command line of ``kvtide replay``, and read.

Knows the options and what is said about what was left out; formats are ``kvtide.sim.traces``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvtide.cli.folders import bar, counted
from kvtide.cli.options import NO_METAVAR
from kvtide.cli.output import note
from kvtide.errors import ConfigError
from kvtide.sim.traces import Trace, TraceOptions, TraceRequest, read_trace
from kvtide.sim.traces.formats import FORMATS

PANEL = "How the trace is read"

option = partial(typer.Option, show_default=False, rich_help_panel=PANEL)
"""Those of this panel that say in words what happens without them."""

FAULTS_SHOWN = 3
MOST_HOURS = 24 * 366

TracesArgument = Annotated[
    list[Path],
    typer.Argument(metavar="TRACE", help="Files or folders of one trace, packed or not.", show_default=False),
]
FormatOption = Annotated[
    str | None,
    option(
        "--format",
        metavar="NAME",
        help=f"One of {', '.join(FORMATS)}. Default: told by how the first file begins.",
    ),
]
SkipOption = Annotated[
    bool,
    typer.Option(
        "--skip-bad-records",
        metavar=NO_METAVAR,
        help="Leave out what cannot be read and say how much that was; otherwise the first ends it.",
        rich_help_panel=PANEL,
    ),
]
ContinuedOption = Annotated[
    bool,
    typer.Option(
        "--continued",
        metavar=NO_METAVAR,
        help="Several files are parts of one trace, one after another; otherwise servers beside each other.",
        rich_help_panel=PANEL,
    ),
]
BlockOption = Annotated[
    int | None,
    option(
        "--block-tokens",
        metavar="N",
        help="Tokens of a block: a multiple of those the trace has. Default: as the trace has them.",
    ),
]
SpanOption = Annotated[
    float | None,
    option(
        "--session-span",
        metavar="HOURS",
        help="Sessions that do not say when they began begin at random within so many hours. Default: 3.",
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", metavar="N", help="Of what is at random.", rich_help_panel=PANEL)
]
TokenizerOption = Annotated[
    str | None,
    option(
        "--tokenizer",
        metavar="FILE",
        help="For prompts as text: a tokenizer's file or folder, or `bytes` for one token a byte.",
    ),
]


@dataclass(frozen=True, slots=True)
class Reading:
    """What was said on the command line.

    Attributes:
        paths: Files and folders.
        format: None to be told by the content.
        skips: Whether bad records are left out.
        options: For the readers.
    """

    paths: list[Path]
    format: str | None
    skips: bool
    options: TraceOptions

    def trace(self) -> Trace:
        """Open it.

        Raises:
            KVTideError: It is not there, or nobody knows its format.
        """
        return read_trace(self.paths, self.format, "skip" if self.skips else "stop", self.options)


def reading_of(
    paths: list[Path],
    format: str | None,
    skips: bool,
    continued: bool,
    block_tokens: int | None,
    session_span_h: float | None,
    seed: int,
    tokenizer: str | None,
) -> Reading:
    """Judge what was said.

    Raises:
        ConfigError: One of it cannot be; named as on the command line.
    """
    if block_tokens is not None and block_tokens < 1:
        raise ConfigError("--block-tokens", block_tokens, "give a whole number of tokens from 1 up")
    if session_span_h is not None and not 0 <= session_span_h <= MOST_HOURS:
        raise ConfigError("--session-span", session_span_h, f"give hours from 0 to {MOST_HOURS}")
    options = TraceOptions(block_tokens, seed, tokenizer=tokenizer, continued=continued)
    if session_span_h is not None:
        options = replace(options, session_span_s=3600 * session_span_h)
    return Reading(paths, format, skips, options)


def shown(trace: Trace) -> Iterator[TraceRequest]:
    """Go through a trace with a bar, and say in the end what was left out."""
    with bar("reading requests", None) as tick:
        for request in trace:
            tick(1)
            yield request
    for faults in trace.faults:
        for fault in faults.first[:FAULTS_SHOWN]:
            note(f"left out: {fault}")
    if trace.skipped_count:
        note(f"left out: {counted(trace.skipped_count, 'bad record')} in all")
