"""What ``kvtide replay`` shows of policies against sizes.

Knows bars, tables and JSON; what is replayed is ``kvtide.sim.fractions``.
"""

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from kvtide.cli.folders import bar, counted, print_json, show_under, table, tell
from kvtide.cli.output import MAX_WIDTH, note
from kvtide.cli.replay_page import show_page
from kvtide.cli.replay_reading import Reading, shown
from kvtide.errors import ConfigError
from kvtide.sim.accesses import accesses_of
from kvtide.sim.fractions import Sweep, sweep
from kvtide.sim.outcome import Outcome
from kvtide.sim.traces import Trace
from kvtide.transfer.memory import humanised

Head = tuple[str, ...]
"""What is told of a size above its figures, a line each: share, blocks and, where that is known, bytes."""


def replay_fractions(
    reading: Reading,
    policies: Sequence[str],
    fractions: Sequence[str],
    jobs: int | None,
    as_json: bool,
    html: Path | None = None,
    token_bytes: int | None = None,
) -> None:
    """Replay a trace and show what came of it, on a page in the file ``html``, too.

    Args:
        reading: Of the trace.
        policies: Names of ``known``.
        fractions: As they were given.
        jobs: Processes at once; None for one a core, where that is worth it.
        as_json: For programs.
        html: File for a page.
        token_bytes: Of KV cache; sizes are told in bytes then, too.

    Raises:
        KVTideError: It cannot be read, or not be replayed.
    """
    trace = reading.trace()
    accesses = accesses_of(shown(trace))
    if not accesses.access_count:
        named = ", ".join(map(str, reading.paths))
        raise ConfigError("TRACE", named, f"no full block in {counted(accesses.request_count, 'request')}")
    with bar("replaying requests", accesses.request_count * len(policies) * len(fractions)) as tick:
        found = sweep(accesses, policies, fractions, jobs, tick)
    for fraction, size in found.capacities.items():
        if not size:
            note(
                f"--fractions {fraction} of {found.unique_count:,} different blocks is none: nothing can hit"
            )
    block_bytes = None if token_bytes is None else token_bytes * found.block_tokens
    if html is not None:
        show_page(html, as_plain(trace, found, block_bytes))
    if as_json:
        print_json(as_plain(trace, found, block_bytes))
    else:
        _print(found, block_bytes)


def as_plain(trace: Trace, found: Sweep, block_bytes: int | None = None) -> dict[str, Any]:
    """Put what came of it into plain types for JSON."""
    in_bytes = (
        {}
        if block_bytes is None
        else {
            "block_bytes": block_bytes,
            "capacity_bytes": {one: size * block_bytes for one, size in found.capacities.items()},
        }
    )
    return {
        "traces": [str(file) for file in trace.files],
        "format": trace.format,
        "skipped_records": trace.skipped_count,
        "requests": found.request_count,
        "accesses": found.access_count,
        "unique_blocks": found.unique_count,
        "block_tokens": found.block_tokens,
        "capacity_blocks": dict(found.capacities),
        **in_bytes,
        "unbounded": round(found.unbounded.hit_ratio, 6),
        "hit_ratio": {
            policy: {fraction: round(one.hit_ratio, 6) for fraction, one in outcomes.items()}
            for policy, outcomes in found.outcomes.items()
        },
        "writes_per_access": {
            policy: {fraction: round(one.writes_per_access, 6) for fraction, one in outcomes.items()}
            for policy, outcomes in found.outcomes.items()
        },
    }


def _print(found: Sweep, block_bytes: int | None) -> None:
    asked = f"{counted(found.request_count, 'request')}, {counted(found.access_count, 'full block')}"
    whole = "" if block_bytes is None else f": {humanised(found.unique_count * block_bytes)} of KV cache"
    tell("trace", f"{asked} of {found.block_tokens} tokens, {found.unique_count:,} different ones{whole}")
    typer.echo()
    heads = {one: _head(one, size, block_bytes) for one, size in found.capacities.items()}
    fractions = list(heads)
    at_once = _side_by_side(found, heads)
    for first in range(0, len(fractions), at_once):
        some = {one: heads[one] for one in fractions[first : first + at_once]}
        show_under("Hits of 100 full blocks asked for", _rows(found, some, lambda one: one.hit_ratio, 2))
        written = _rows(found, some, lambda one: one.writes_per_access, 1)
        show_under("Blocks written for 100 asked for", written)
    tell("most", f"{100 * found.unbounded.hit_ratio:.2f} is what a cache that keeps everything would hit")


def _head(fraction: str, size: int, block_bytes: int | None) -> Head:
    return (
        percent(fraction),
        f"{size:,}",
        *(() if block_bytes is None else (humanised(size * block_bytes),)),
    )


def _side_by_side(found: Sweep, heads: Mapping[str, Head]) -> int:
    """Say how many sizes a table has room for; the others come in another one."""
    figures = [len(text) for head in heads.values() for text in head]
    room = min(Console().width, MAX_WIDTH) - max(map(len, ("blocks", *found.outcomes)))
    return max(1, room // (max(*figures, len("100.00")) + 2))


def _rows(found: Sweep, heads: Mapping[str, Head], figure: Callable[[Outcome], float], digits: int) -> Table:
    names = ("share", "blocks", "memory")[: len(next(iter(heads.values())))]
    rows = table(["\n".join(names)], ["\n".join(head) for head in heads.values()])
    for policy, outcomes in found.outcomes.items():
        rows.add_row(policy, *(f"{100 * figure(outcomes[one]):.{digits}f}" for one in heads))
    return rows


def percent(fraction: str) -> str:
    """Write a share for people."""
    return f"{(100 * Decimal(fraction)).normalize():f} %"
