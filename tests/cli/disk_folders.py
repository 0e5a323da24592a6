"""Folders that real disk tiers wrote, and the command that is run on them."""

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from kvtide.cli.main import app
from kvtide.testing.tiers import DEADLINE_S, name_of, payload_of
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.records import RecordIdentity, Shard
from kvtide.tiers.slabs import slot_bytes_of

LIMIT_BYTES = 64 << 20
SMALL, LARGE = 4096, 20_000
LLAMA, QWEN = bytes([0xAA, *range(31)]), bytes([0xAB, *range(31)])
DAY_S = 86_400


def run(*arguments: object, columns: int = 100) -> Result:
    result = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": str(columns)})
    # What is long by itself, a path that was given, is not cut.
    tables = [line for line in result.stdout.splitlines() if not any(str(one) in line for one in arguments)]
    assert "--json" in arguments or max(map(len, tables), default=0) <= columns, result.stdout
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def found(*arguments: object, exit_code: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def tier_at(folder: Path, fingerprint: bytes = LLAMA, rank: int = 0, ranks: int = 1) -> DiskTier:
    tier = DiskTier(folder, RecordIdentity(fingerprint, (Shard(rank, ranks),)), LIMIT_BYTES, rank=rank)
    tier.open()
    return tier


def write(tier: DiskTier, numbers: Iterable[int], payload_bytes: int = SMALL) -> None:
    for number in numbers:
        payload = memoryview(payload_of(number, payload_bytes))
        tier.write(name_of(number, group_index=number % 2), payload, DEADLINE_S)


def store(folder: Path, numbers: Iterable[int], payload_bytes: int = SMALL, **which: Any) -> None:
    tier = tier_at(folder, **which)
    write(tier, numbers, payload_bytes)
    tier.close()


def readable(folder: Path, numbers: Iterable[int], payload_bytes: int = SMALL, **which: Any) -> list[int]:
    tier = tier_at(folder, **which)
    served = []
    for number in numbers:
        payload = bytearray(payload_bytes)
        if tier.read_into(name_of(number, number % 2).key, memoryview(payload), DEADLINE_S):
            assert payload == payload_of(number, payload_bytes)
            served.append(number)
    tier.close()
    return served


def change(folder: Path, slot: int, offset: int, content: bytes, payload_bytes: int = SMALL) -> None:
    with (folder / "rank-0" / f"slab-{payload_bytes}").open("r+b") as file:
        file.seek(slot * slot_bytes_of(payload_bytes) + offset)
        file.write(content)


def listing(folder: Path) -> dict[str, int]:
    """Every file and its length, but for what SQLite keeps beside a file that it reads."""
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix not in (".sqlite-shm", ".sqlite-wal")]
    return {str(path.relative_to(folder)): path.lstat().st_size for path in paths}


def name_model(folder: Path, fingerprint: bytes, model: str, last_used_s: float) -> None:
    (folder / "fingerprints").mkdir(exist_ok=True)
    said = {"model": model, "text": "{}", "last_used_s": last_used_s}
    (folder / "fingerprints" / f"{fingerprint.hex()}.json").write_text(json.dumps(said))


def rewrite(folder: Path, statement: str) -> None:
    rows = sqlite3.connect(folder / "rank-0" / "index.sqlite")
    rows.execute(statement)
    rows.commit()
    rows.close()


def kept(folder: Path) -> dict[tuple[str, int], int]:
    return {
        (one["fingerprint"][:2], generation["generation"]): generation["records"]
        for one in found("inspect", folder)["fingerprints"]
        for generation in one["generations"]
    }
