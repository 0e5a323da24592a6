"""``kvtide inspect``: what is stored in the folder of a disk tier.

Knows how to count and to tell. Reads the names of records alone, and disturbs no instance that runs.
"""

import os
import time
from typing import Any

from rich.table import Table
from typer.colors import RED

from kvtide.cli.folders import (
    JsonOption,
    PathArgument,
    age,
    bar,
    counted,
    in_doubt,
    model_of,
    print_json,
    printable,
    refusing,
    short,
    show_under,
    spans,
    table,
    tell,
    tell_what_was_left_aside,
    trouble_of,
    written,
)
from kvtide.tiers.survey import DiskFolder, Holding, Holdings, number_of, opened
from kvtide.transfer.memory import humanised

EPILOG = """Examples:

* `kvtide inspect /var/cache/kvtide` says which models' KV cache is there, how much, and how old
* `kvtide inspect /var/cache/kvtide --json | jq '.slab_bytes + .index_bytes'` says what it takes

A *record* is what one rank keeps of a *chunk*; only a chunk that is whole, with every rank's part, can be
brought back. A *generation* ends with a reset of the cache: records of earlier ones are never served and make
room by and by.
"""


def inspect(path: PathArgument, as_json: JsonOption = False) -> None:
    """Show what is stored in the folder of a disk tier: models, generations, bytes, ages.

    Changes nothing, and may be run while an instance uses the folder. Payloads are not read: kvtide verify
    does that.

    Exit code 0: it could be read. 2: it could not, or is no such folder.
    """
    with refusing(as_json), opened(path) as folder:
        holdings, unreadable = counted_up(folder)
        if as_json:
            print_json(as_plain(folder, holdings, unreadable))
            return
        tell_what_was_left_aside(folder)
        _print(folder, holdings, unreadable)


def counted_up(folder: DiskFolder) -> tuple[Holdings, int]:
    """Count all records by fingerprint and generation, and those that say nothing."""
    holdings: Holdings = {}
    unreadable = 0
    with bar("counting records", folder.record_count()) as tick:
        for rank, stored in folder.records():
            tick(1)
            header = stored.header
            if header is None:
                unreadable += 1
                continue
            named = header.fingerprint, header.generation
            holdings.setdefault(named, Holding()).add(rank.rank, stored.place, header)
    return holdings, unreadable


def as_plain(folder: DiskFolder, holdings: Holdings, unreadable: int) -> dict[str, Any]:
    """Put what was found into plain types for JSON; sizes in bytes, times in seconds since the epoch."""
    served = folder.served()
    return {
        "ok": True,
        "path": str(folder.path),
        "in_use": folder.in_use(),
        "slab_bytes": folder.slab_bytes,
        "index_bytes": sum(rank.index_bytes for rank in folder.ranks),
        "free_bytes": _free_bytes(folder),
        "ranks": [
            {
                "rank": rank.rank,
                "in_use": rank.in_use(),
                "slab_bytes": rank.slab_bytes,
                "index_bytes": rank.index_bytes,
                "index_trouble": rank.index_trouble,
            }
            for rank in folder.ranks
        ],
        "fingerprints": [
            {
                "fingerprint": fingerprint.hex(),
                "model": known.model if (known := folder.models.get(fingerprint)) else None,
                "last_used_s": known.last_used_s if known else None,
                "generations": [
                    _plain_holding(generation, holding, served.get(fingerprint))
                    for generation, holding in _of(holdings, fingerprint)
                ],
            }
            for fingerprint in _fingerprints(folder, holdings)
        ],
        "unreadable_records": unreadable,
        "left_aside": folder.left_aside,
    }


def _plain_holding(generation: int, holding: Holding, served: set[int] | None) -> dict[str, Any]:
    return {
        "generation": number_of(generation),
        "doubtful": in_doubt(generation),
        "served": generation in served if served else None,
        "records": holding.record_count,
        "chunks": holding.chunk_count,
        "whole_chunks": holding.whole_chunk_count,
        "bytes": holding.byte_count,
        "oldest_s": holding.oldest_s,
        "newest_s": holding.newest_s,
        "groups": sorted(holding.groups),
        "ranks": sorted(holding.ranks),
    }


def _print(folder: DiskFolder, holdings: Holdings, unreadable: int) -> None:
    served = folder.served()
    for fingerprint in _fingerprints(folder, holdings):
        generations = _of(holdings, fingerprint)
        show_under(
            _heading(folder, fingerprint, bool(generations)), _table(generations, served.get(fingerprint))
        )
    byte_count = sum(holding.byte_count for holding in holdings.values())
    in_part = sum(holding.chunk_count - holding.whole_chunk_count for holding in holdings.values())
    use = "an instance uses it" if folder.in_use() else "no instance uses it"
    tell("folder", f"{printable(str(folder.path))}: {counted(len(folder.ranks), 'rank')}, {use}")
    index_bytes = sum(rank.index_bytes for rank in folder.ranks)
    slabs = f"slabs {humanised(folder.slab_bytes)} (records {humanised(byte_count)})"
    total = humanised(folder.slab_bytes + index_bytes)
    tell("takes", f"{total}: {slabs}, indexes {humanised(index_bytes)}")
    tell("free", f"{humanised(_free_bytes(folder))} on the file system")
    if in_part:
        tell("in part", f"{counted(in_part, 'chunk')}, not counted above: a rank's part is missing")
    for rank in folder.ranks:
        if rank.index_trouble:
            tell("wrong", f"{trouble_of(rank)}; counted by slots, where discarded records may still lie", RED)
    if unreadable:
        tell("wrong", f"{counted(unreadable, 'record')} whose header is none", RED)


def _heading(folder: DiskFolder, fingerprint: bytes, stored: bool) -> str:
    known = folder.models.get(fingerprint)
    used = f", last used {age(time.time() - known.last_used_s)} ago" if known and known.last_used_s else ""
    nothing = "" if stored else ": nothing stored"
    return f"{model_of(folder, fingerprint)}, fingerprint {short(fingerprint)}{used}{nothing}"


def _table(generations: list[tuple[int, Holding]], served: set[int] | None) -> Table:
    now_s = time.time()
    rows = table(["generation"], ["records", "chunks", "bytes", "oldest", "newest", "groups", "ranks"])
    for generation, holding in generations:
        rows.add_row(
            written(generation, served),
            f"{holding.record_count:,}",
            f"{holding.whole_chunk_count:,}",
            humanised(holding.byte_count),
            age(now_s - holding.oldest_s),
            age(now_s - holding.newest_s),
            spans(holding.groups),
            spans(holding.ranks),
        )
    return rows


def _of(holdings: Holdings, fingerprint: bytes) -> list[tuple[int, Holding]]:
    return sorted((named[1], holding) for named, holding in holdings.items() if named[0] == fingerprint)


def _fingerprints(folder: DiskFolder, holdings: Holdings) -> list[bytes]:
    """List those of which anything is known, by name."""
    all_of_them = {*folder.models, *(fingerprint for fingerprint, _ in holdings)}
    return sorted(all_of_them, key=lambda one: (model_of(folder, one), one))


def _free_bytes(folder: DiskFolder) -> int:
    status = os.statvfs(folder.path)
    return status.f_bavail * status.f_frsize
