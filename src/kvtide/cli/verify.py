"""``kvtide verify``: whether everything that is stored is what was written.

Knows what is asked of every record, and tells what came of it. Changes nothing unless it is told to.
"""

import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from typer.colors import GREEN, RED

from kvtide.cli.folders import (
    JsonOption,
    PathArgument,
    bar,
    counted,
    print_json,
    refusing,
    show_under,
    table,
    tell,
    tell_what_was_left_aside,
    trouble_of,
)
from kvtide.cli.options import NO_METAVAR
from kvtide.tiers.audit import Damage, Finding, auditing, confirmed
from kvtide.tiers.removal import drop_index, forget, held
from kvtide.tiers.slabs import Place, slot_bytes_of
from kvtide.tiers.survey import DiskFolder, opened
from kvtide.transfer.memory import humanised

DAMAGE_FOUND = 1
LISTED = 1000
"""So many damaged records are named in JSON."""

SETTLING_S = 0.2
"""An instance that overwrites a slot has said so in the index by then."""

EPILOG = """Examples:

* `kvtide verify /var/cache/kvtide` reads everything and says whether it is what was written
* `kvtide verify /var/cache/kvtide --discard` forgets what is damaged; the instance has to be stopped
* `kvtide verify /var/cache/kvtide --json > report.json || mail -s 'disk damaged' ops < report.json`

A damaged record is no danger to answers: whoever reads it finds out, forgets it and computes. Many of them
are a medium that fails.
"""


@dataclass(slots=True)
class Verdict:
    """What came of reading everything.

    Attributes:
        record_count: Read.
        byte_count: Of their slots.
        findings: Those that are not what was written.
        damaged_indexes: Those that cannot be read, and why.
        discarded_count: Findings that were forgotten.
        took_s: Seconds.
    """

    record_count: int = 0
    byte_count: int = 0
    findings: list[Finding] = field(default_factory=list)
    damaged_indexes: list[str] = field(default_factory=list)
    discarded_count: int = 0
    took_s: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether all is well."""
        return not self.findings and not self.damaged_indexes


def verify(
    path: PathArgument,
    discard: Annotated[
        bool,
        typer.Option(
            "--discard", metavar=NO_METAVAR, help="Forget what is damaged. Refused while an instance runs."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every record in the folder of a disk tier and hold it against its checksums.

    Covers header, key and payload, every model and generation. Past the page cache where the file system
    lets us, so that it is the medium that is asked. May be run while an instance uses the folder, but then
    takes its share of the disk.

    Exit code 0: everything is what was written. 1: something is damaged. 2: it could not be asked.
    """
    with refusing(as_json):
        with (held if discard else opened)(path) as folder:
            verdict = verified(folder)
            if discard:
                _discard(folder, verdict)
            if as_json:
                print_json(as_plain(path, verdict))
            else:
                tell_what_was_left_aside(folder)
                _print(path, verdict)
        if not verdict.clean:
            raise typer.Exit(DAMAGE_FOUND)


def verified(folder: DiskFolder) -> Verdict:
    """Read everything."""
    verdict, begun_s = Verdict(), time.monotonic()
    for rank in folder.ranks:
        rank.check_index()
    with bar("reading records", folder.record_count()) as tick, auditing() as auditor:
        for rank, stored in folder.records():
            tick(1)
            verdict.record_count += 1
            verdict.byte_count += slot_bytes_of(max(0, stored.place.payload_bytes))
            damage = auditor.check(rank, stored)
            if damage is not None:
                verdict.findings.append(Finding(rank, stored, damage))
        if verdict.findings:
            # For an instance that is at work, and also for one that has just ended.
            time.sleep(SETTLING_S)
            verdict.findings = list(confirmed(verdict.findings, auditor))
    verdict.damaged_indexes = _damaged_indexes(folder)
    verdict.took_s = time.monotonic() - begun_s
    return verdict


def as_plain(path: Path, verdict: Verdict) -> dict[str, Any]:
    """Put a verdict into plain types for JSON."""
    kinds = Counter(finding.damage for finding in verdict.findings)
    return {
        "ok": verdict.clean,
        "path": str(path),
        "records": verdict.record_count,
        "bytes": verdict.byte_count,
        "seconds": round(verdict.took_s, 3),
        "damaged": {kind.name.lower(): kinds[kind] for kind in Damage},
        "damaged_records": [_plain_finding(finding) for finding in verdict.findings[:LISTED]],
        "damaged_indexes": verdict.damaged_indexes,
        "discarded": verdict.discarded_count,
    }


def _plain_finding(finding: Finding) -> dict[str, Any]:
    header, place = finding.stored.header, finding.stored.place
    return {
        "rank": finding.rank.rank,
        "slab": f"slab-{place.payload_bytes}",
        "slot": place.slot,
        "damage": finding.damage.name.lower(),
        "fingerprint": header and header.fingerprint.hex(),
        "key": header and header.name.key.hex(),
    }


def _discard(folder: DiskFolder, verdict: Verdict) -> None:
    """Forget what is damaged, the folder's locks being held."""
    by_rank: dict[int, list[Place]] = {}
    for finding in verdict.findings:
        by_rank.setdefault(finding.rank.rank, []).append(finding.stored.place)
    with bar("forgetting what is damaged", len(verdict.findings)) as tick:
        for rank in folder.ranks:
            # A slot that cannot be written either is not read again all the same: no row names it.
            with contextlib.suppress(OSError):
                forget(rank, by_rank.get(rank.rank, []), tick)
            if rank.index_trouble is not None:
                drop_index(rank)
            verdict.discarded_count += len(by_rank.get(rank.rank, []))
    verdict.damaged_indexes = _damaged_indexes(folder)


def _damaged_indexes(folder: DiskFolder) -> list[str]:
    return [trouble_of(rank) for rank in folder.ranks if rank.index_trouble and not rank.index_gone]


def _print(path: Path, verdict: Verdict) -> None:
    kinds = Counter(finding.damage for finding in verdict.findings)
    if kinds:
        rows = table(["what is wrong"], ["records"])
        for kind in Damage:
            if kinds[kind]:
                rows.add_row(kind.value, f"{kinds[kind]:,}")
        show_under("Damaged records", rows)
    rate = humanised(int(verdict.byte_count / max(verdict.took_s, 1e-6)))
    took = f"{humanised(verdict.byte_count)} in {verdict.took_s:.1f} s, {rate}/s"
    tell("read", f"{counted(verdict.record_count, 'record')}, {took}")
    for trouble in verdict.damaged_indexes:
        tell("wrong", f"{trouble}; it is made anew from the slots when an instance starts", RED)
    if verdict.clean:
        tell("fine", "everything is what was written", GREEN)
        return
    share = f"{len(verdict.findings):,} of {verdict.record_count:,} records are damaged"
    if verdict.discarded_count:
        tell("wrong", f"{share}; {verdict.discarded_count:,} were forgotten", RED)
    elif verdict.findings:
        tell("wrong", f"{share}; kvtide verify {quote(str(path))} --discard forgets them", RED)
