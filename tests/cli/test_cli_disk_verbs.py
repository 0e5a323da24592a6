"""``kvtide inspect``, ``verify`` and ``clear`` on folders that real disk tiers wrote, and on spoilt ones."""

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvtide.cli import folders, verify
from kvtide.cli.main import app
from kvtide.errors import ConfigError, TierError, TierFullError, TierUnavailableError
from kvtide.testing.tiers import DEADLINE_S, name_of, payload_of
from kvtide.tiers import disk, removal
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.disk_index import DiskIndex
from kvtide.tiers.records import RecordIdentity, Shard
from kvtide.tiers.removal import held
from kvtide.tiers.slabs import ALIGNMENT, slot_bytes_of

LIMIT_BYTES = 64 << 20
SMALL, LARGE = 4096, 20_000
LLAMA, QWEN = bytes([0xAA, *range(31)]), bytes([0xAB, *range(31)])
DAY_S = 86_400


@pytest.fixture(autouse=True)
def nobody_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "SETTLING_S", 0)


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


@pytest.fixture
def two_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Llama in generations 0 and 1, ten days and one hour old; Qwen, two days; one rank."""
    folder, now_s = tmp_path / "kv", time.time()
    monkeypatch.setattr(DiskTier, "_free", lambda _, places: None)  # what has ended is still there
    for fingerprint, ages in ((LLAMA, (10 * DAY_S, 3600)), (QWEN, (2 * DAY_S,))):
        tier = tier_at(folder, fingerprint)
        for generation, age_s in enumerate(ages):
            monkeypatch.setattr(disk.time, "time", lambda age_s=age_s: now_s - age_s)
            if generation:
                tier.begin_generation(trusted=True)
            write(tier, range(100 * generation, 100 * generation + 40))
            write(tier, range(100 * generation + 50, 100 * generation + 60), LARGE)
        tier.close()
    monkeypatch.undo()
    name_model(folder, LLAMA, "meta-llama/Llama-3.1-8B", now_s - 3600)
    name_model(folder, QWEN, "Qwen/Qwen3-8B", now_s - 2 * DAY_S)
    return folder


# -- inspect --------------------------------------------------------------------------------------


def test_inspect_tells_models_generations_bytes_and_ages(two_models: Path) -> None:
    told = found("inspect", two_models)
    assert told["ok"] is True
    assert told["in_use"] is False
    on_disk = sum(path.stat().st_blocks * 512 for path in two_models.rglob("slab-*"))
    assert told["slab_bytes"] == told["ranks"][0]["slab_bytes"] == on_disk
    by_model = {one["model"]: one for one in told["fingerprints"]}
    assert by_model["Qwen/Qwen3-8B"]["fingerprint"] == QWEN.hex()
    (qwen,) = by_model["Qwen/Qwen3-8B"]["generations"]
    assert (qwen["records"], qwen["chunks"], qwen["whole_chunks"]) == (50, 50, 50)
    assert qwen["bytes"] == 40 * slot_bytes_of(SMALL) + 10 * slot_bytes_of(LARGE)
    assert qwen["groups"] == [0, 1]
    assert qwen["ranks"] == [0]
    assert time.time() - qwen["oldest_s"] == pytest.approx(2 * DAY_S, abs=60)
    llama = by_model["meta-llama/Llama-3.1-8B"]["generations"]
    told = [(one["generation"], one["records"], one["doubtful"], one["served"]) for one in llama]
    assert told == [(0, 50, False, False), (1, 50, False, True)]


@pytest.mark.parametrize("columns", [80, 100])
def test_inspect_shows_the_same_in_a_table_that_fits(two_models: Path, columns: int) -> None:
    shown = run("inspect", two_models, columns=columns)
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert any("meta-llama/Llama-3.1-8B, fingerprint aa0001020304, last used 1 h ago" in one for one in lines)
    rows = [one.replace(", ended", "*").split() for one in lines if one.strip()[:1].isdigit()]
    assert [row[:3] for row in rows] == [["0", "50", "50"], ["0*", "50", "50"], ["1", "50", "50"]]
    assert rows[1][5:] == ["10", "d", "10", "d", "0-1", "0"]
    assert "1 rank, no instance uses it" in " ".join(shown.stdout.split())
    assert "wrong" not in shown.stdout


def test_a_chunk_of_which_a_rank_lacks_its_part_is_not_counted_as_whole(tmp_path: Path) -> None:
    store(tmp_path, range(6), rank=0, ranks=2)
    store(tmp_path, range(4), rank=1, ranks=2)
    (one,) = found("inspect", tmp_path)["fingerprints"]
    (generation,) = one["generations"]
    assert (generation["records"], generation["chunks"], generation["whole_chunks"]) == (10, 6, 4)
    assert generation["ranks"] == [0, 1]
    assert "in part  2 chunks" in run("inspect", tmp_path).stdout


def test_a_generation_in_doubt_is_told_as_such(tmp_path: Path) -> None:
    tier = tier_at(tmp_path)
    tier.begin_generation(trusted=False)
    write(tier, range(3))
    (generation,) = found("inspect", tmp_path)["fingerprints"][0]["generations"]
    assert (generation["generation"], generation["doubtful"]) == (1, True)
    assert "1, in doubt" in run("inspect", tmp_path).stdout
    tier.close()


def test_a_running_instance_is_seen_and_not_disturbed(tmp_path: Path) -> None:
    tier = tier_at(tmp_path)
    write(tier, range(5))
    before = listing(tmp_path)
    assert found("inspect", tmp_path)["in_use"] is True
    assert found("verify", tmp_path)["records"] == 5
    assert listing(tmp_path) == before
    assert "1 rank, an instance uses it" in " ".join(run("inspect", tmp_path).stdout.split())
    write(tier, range(5, 10))
    tier.close()
    assert readable(tmp_path, range(10)) == list(range(10))


def test_what_a_killed_instance_left_can_be_read_without_it(tmp_path: Path) -> None:
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from test_cli_disk_verbs import tier_at, write\n"
        "write(tier_at(Path(sys.argv[1])), range(7)); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path, Path(__file__).parent], check=False, timeout=60)
    told = found("inspect", tmp_path)
    assert told["in_use"] is False
    assert told["fingerprints"][0]["generations"][0]["records"] == 7
    assert found("verify", tmp_path)["ok"] is True


# -- verify ---------------------------------------------------------------------------------------


def test_verify_reads_every_record_of_every_model_and_generation(two_models: Path) -> None:
    told = found("verify", two_models)
    assert told["ok"] is True
    assert told["records"] == 150
    assert sum(told["damaged"].values()) == 0
    shown = run("verify", two_models)
    assert shown.exit_code == 0
    assert "read     150 records" in shown.stdout
    assert "fine     everything is what was written" in shown.stdout


DAMAGE: dict[str, Callable[[Path], None]] = {
    "payload": lambda folder: change(folder, 2, ALIGNMENT + 1000, b"\xff\x00\xff"),
    "header": lambda folder: change(folder, 2, 40, b"\xff\x00\xff"),
    "blank": lambda folder: change(folder, 2, 0, bytes(ALIGNMENT)),
    "other": lambda folder: change(
        folder, 2, 0, (folder / "rank-0" / f"slab-{SMALL}").read_bytes()[: slot_bytes_of(SMALL)]
    ),
    "missing": lambda folder: os.truncate(
        folder / "rank-0" / f"slab-{SMALL}", 2 * slot_bytes_of(SMALL) + 4096
    ),
    "row": lambda folder: rewrite(folder, "UPDATE records SET header = zeroblob(256) WHERE slot = 2"),
}


def rewrite(folder: Path, statement: str) -> None:
    rows = sqlite3.connect(folder / "rank-0" / "index.sqlite")
    rows.execute(statement)
    rows.commit()
    rows.close()


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_named_and_forgotten(tmp_path: Path, kind: str) -> None:
    store(tmp_path, range(3))
    DAMAGE[kind](tmp_path)
    told = found("verify", tmp_path, exit_code=1)
    assert told["ok"] is False
    assert {name: count for name, count in told["damaged"].items() if count} == {kind: 1}
    assert [(one["slot"], one["damage"]) for one in told["damaged_records"]] == [(2, kind)]
    shown = run("verify", tmp_path)
    assert shown.exit_code == 1
    assert "1 of 3 records are damaged; kvtide verify" in shown.stdout
    discarded = found("verify", tmp_path, "--discard", exit_code=1)
    assert discarded["discarded"] == 1
    assert found("verify", tmp_path)["records"] == 2
    assert readable(tmp_path, range(3)) == [0, 1]


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    store(tmp_path, range(40), LARGE)
    places = [*range(0, 256, 13), *range(ALIGNMENT, ALIGNMENT + LARGE, 1009)][:40]
    for slot, at in enumerate(places):
        slab = (tmp_path / "rank-0" / f"slab-{LARGE}").read_bytes()
        byte = slab[slot * slot_bytes_of(LARGE) + at]
        change(tmp_path, slot, at, bytes([byte ^ 1 << slot % 8]), LARGE)
    told = found("verify", tmp_path, exit_code=1)
    assert sum(told["damaged"].values()) == len(places) == told["records"]


def test_verify_finds_nothing_wrong_with_what_an_instance_overwrites_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    tier, ended = tier_at(tmp_path), threading.Event()
    write(tier, range(200))

    def churn() -> None:
        number = 1000
        while not ended.is_set():
            tier.discard([name_of(number - 200 if number > 1200 else number - 1000, number % 2).key])
            write(tier, [number])
            number += 1

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        tellings = [found("verify", tmp_path) for _ in range(5)]
    finally:
        ended.set()
        thread.join()
        tier.close()
    assert all(one["ok"] for one in tellings)
    assert all(one["records"] > 100 for one in tellings)


@pytest.mark.parametrize("how", ["gone", "garbage", "torn", "another schema", "a view"])
def test_without_its_index_a_folder_is_read_by_its_slots(tmp_path: Path, how: str) -> None:
    store(tmp_path, range(9))
    index = tmp_path / "rank-0" / "index.sqlite"
    if how == "gone":
        index.unlink()
    elif how == "garbage":
        index.write_bytes(os.urandom(8192))
    elif how == "torn":
        index.write_bytes(index.read_bytes()[:5000])
    else:
        rewrite(tmp_path, "DROP TABLE records")
        if how == "a view":
            endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i, i, 0 FROM n"
            rewrite(tmp_path, f"CREATE VIEW records (payload_bytes, slot, header) AS {endless}")
    told = found("inspect", tmp_path)
    assert told["ranks"][0]["index_trouble"].startswith("index.sqlite: ")
    assert told["fingerprints"][0]["generations"][0]["records"] == 9
    assert "wrong    rank-0/index.sqlite: " in run("inspect", tmp_path).stdout
    judged = found("verify", tmp_path, exit_code=0 if how == "gone" else 1)
    assert (judged["records"], sum(judged["damaged"].values())) == (9, 0)
    assert len(judged["damaged_indexes"]) == (how != "gone")
    assert found("verify", tmp_path, "--discard", exit_code=0 if how == "gone" else 1)["discarded"] == 0
    assert found("verify", tmp_path)["ok"] is True
    assert readable(tmp_path, range(9)) == list(range(9))
    assert found("verify", tmp_path)["ok"] is True


def test_rows_of_nonsense_are_damage_and_no_more(tmp_path: Path) -> None:
    store(tmp_path, range(3))
    rewrite(tmp_path, "UPDATE records SET slot = 4611686018427387904 WHERE slot = 2")
    rows = sqlite3.connect(tmp_path / "rank-0" / "index.sqlite")
    _, _, *rest = rows.execute("SELECT * FROM records WHERE slot = 1").fetchone()
    for place in ((-5, -1), ("x", "y"), (2**62, 2**62)):
        rows.execute(f"INSERT INTO records VALUES (?, ?{', ?' * len(rest)})", (*place, *rest))
    rows.commit()
    rows.close()
    told = found("verify", tmp_path, exit_code=1)
    assert told["records"] - sum(told["damaged"].values()) == 2
    assert run("inspect", tmp_path).exit_code == 0
    found("verify", tmp_path, "--discard", exit_code=1)
    assert found("verify", tmp_path)["records"] == 2


def test_who_stops_it_is_not_told_of_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    store(tmp_path, range(3))
    monkeypatch.setattr(verify, "verified", stopped)
    assert run("verify", tmp_path).exit_code == 130


# -- clear ----------------------------------------------------------------------------------------


def kept(folder: Path) -> dict[tuple[str, int], int]:
    return {
        (one["fingerprint"][:2], generation["generation"]): generation["records"]
        for one in found("inspect", folder)["fingerprints"]
        for generation in one["generations"]
    }


ALL_THERE = {("aa", 0): 50, ("aa", 1): 50, ("ab", 0): 50}


@pytest.mark.parametrize(
    ("arguments", "gone"),
    [
        (["--fingerprint", "aa"], [("aa", 0), ("aa", 1)]),
        (["--fingerprint", "AB00"], [("ab", 0)]),
        (["--fingerprint", "aa", "--generation", "0"], [("aa", 0)]),
        (["--generation", "1"], [("aa", 1)]),
        (["--older-than", "3d"], [("aa", 0)]),
        (["--older-than", "36h"], [("aa", 0), ("ab", 0)]),
        (["--older-than", "36h", "--fingerprint", "ab"], [("ab", 0)]),
        (["--older-than", "2w"], []),
        (["--all"], list(ALL_THERE)),
    ],
)
def test_clear_removes_what_is_meant_and_nothing_else(
    two_models: Path, arguments: list[str], gone: list[tuple[str, int]]
) -> None:
    before = listing(two_models)
    told = found("clear", two_models, *arguments, "--dry-run")
    assert listing(two_models) == before
    named = {(one["fingerprint"][:2], one["generation"]): one["records"] for one in told["removed"]}
    assert named == {one: ALL_THERE[one] for one in gone}
    assert told["dry_run"] is True
    done = found("clear", two_models, *arguments)
    assert done["removed"] == told["removed"]
    assert done["slab_bytes_after"] == found("inspect", two_models)["slab_bytes"] <= told["slab_bytes_before"]
    assert kept(two_models) == {one: ALL_THERE[one] for one in ALL_THERE if one not in gone}
    named = {path.name[:2] for path in (two_models / "fingerprints").iterdir()}
    forgotten = {one for one, _ in gone} if arguments[0] in ("--all", "--fingerprint") else set()
    assert named == {"aa", "ab"} - (forgotten if len(arguments) < 3 else set())
    assert found("verify", two_models)["ok"] is True


def test_a_model_of_which_nothing_is_stored_is_named(two_models: Path) -> None:
    run("clear", two_models, "--fingerprint", "ab", "--older-than", "1d")
    shown = run("inspect", two_models).stdout
    assert "Qwen/Qwen3-8B, fingerprint ab0001020304, last used 2 d ago: nothing stored" in shown


def test_what_was_cleared_does_not_come_back_with_an_index_made_anew(two_models: Path) -> None:
    run("clear", two_models, "--fingerprint", "aa")
    for path in (two_models / "rank-0").glob("index.sqlite*"):
        path.unlink()
    assert kept(two_models) == {("ab", 0): 50}
    assert readable(two_models, range(100, 140)) == []
    assert readable(two_models, range(40), fingerprint=QWEN) == list(range(40))


def test_the_space_of_what_was_cleared_goes_back_to_the_file_system(two_models: Path) -> None:
    told = found("clear", two_models, "--generation", "1")
    (removed,) = told["removed"]
    freed_bytes = told["slab_bytes_before"] - told["slab_bytes_after"]
    assert freed_bytes >= removed["bytes"] == 40 * slot_bytes_of(SMALL) + 10 * slot_bytes_of(LARGE)


def test_where_slots_cannot_become_holes_nothing_comes_back_either(
    two_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "punched", lambda *_: False)
    run("clear", two_models, "--older-than", "3d")
    for path in (two_models / "rank-0").glob("index.sqlite*"):
        path.unlink()
    assert kept(two_models) == {("aa", 1): 50, ("ab", 0): 50}


@pytest.mark.parametrize(
    ("error", "exit_code"), [(TierFullError("full"), 0), (TierUnavailableError("malformed"), 2)]
)
def test_an_index_without_room_gets_some_and_a_damaged_one_is_told(
    two_models: Path, monkeypatch: pytest.MonkeyPatch, error: TierError, exit_code: int
) -> None:
    plain, raised = DiskIndex.remove, []

    def remove(self: DiskIndex, places: Any) -> None:
        if not raised:
            raised.append(error)
            raise error
        plain(self, places)

    monkeypatch.setattr(DiskIndex, "remove", remove)
    result = run("clear", two_models, "--fingerprint", "aa")
    assert raised
    assert result.exit_code == exit_code
    if exit_code:
        assert f"malformed; not all was removed, and kvtide verify {two_models} --discard" in result.stderr
    else:
        assert kept(two_models) == {("ab", 0): 50}


def test_an_instance_goes_on_in_what_was_cleared_in_part(two_models: Path) -> None:
    run("clear", two_models, "--older-than", "3d")
    assert readable(two_models, [*range(40), *range(100, 140)]) == list(range(100, 140))
    store(two_models, range(500, 520))
    assert readable(two_models, range(500, 520)) == list(range(500, 520))
    assert found("verify", two_models)["ok"] is True


def test_clearing_all_gives_the_space_back_and_keeps_what_is_not_ours(two_models: Path) -> None:
    (two_models / "rank-0" / "notes.txt").write_text("mine")
    shown = run("clear", two_models, "--all")
    assert shown.exit_code == 0
    assert "removed  150 records" in shown.stdout
    assert "slabs    0 B" in shown.stdout
    assert "left aside: rank-0/notes.txt" in shown.stderr
    left = [path.name for path in two_models.rglob("*") if path.is_file()]
    assert sorted(left) == ["lock", "notes.txt"]
    store(two_models, range(5))
    assert readable(two_models, range(5)) == list(range(5))


def test_clear_shows_what_goes_in_a_table_that_fits(two_models: Path) -> None:
    for columns in (80, 100):
        shown = run("clear", two_models, "--older-than", "36h", "--dry-run", columns=columns)
        assert "meta-llama/Llama-3.1-8B" in shown.stdout
        assert "would go 100 records" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "setting", "hint"),
    [
        ([], "kvtide clear", "--fingerprint, --generation, --older-than, or --all"),
        (["--all", "--generation", "0"], "--all", "give it alone"),
        (["--fingerprint", "xyz"], "--fingerprint", "hexadecimal"),
        (["--fingerprint", ""], "--fingerprint", "hexadecimal"),
        (["--fingerprint", "a"], "--fingerprint", "several begin so: aa0001020304, ab0001020304"),
        (["--fingerprint", "77"], "--fingerprint", "there are: aa0001020304, ab0001020304"),
        (["--older-than", "7"], "--older-than", "7d is seven days"),
        (["--older-than", "-7d"], "--older-than", "7d is seven days"),
    ],
)
def test_what_clear_cannot_do_is_said_and_nothing_goes(
    two_models: Path, arguments: list[str], setting: str, hint: str
) -> None:
    before = listing(two_models)
    told = found("clear", two_models, *arguments, exit_code=2)
    assert told["ok"] is False
    assert told["errors"][0]["setting"] == setting
    assert hint in told["errors"][0]["hint"]
    shown = run("clear", two_models, *arguments)
    assert shown.exit_code == 2
    assert shown.stdout == ""
    assert hint in shown.stderr
    assert listing(two_models) == before


@pytest.mark.parametrize("command", [["verify", "--discard"], ["clear", "--all"]])
def test_nothing_is_removed_under_a_running_instance(tmp_path: Path, command: list[str]) -> None:
    tier = tier_at(tmp_path, rank=1, ranks=2)
    write(tier, range(5))
    store(tmp_path, range(5), rank=0, ranks=2)
    result = run(command[0], tmp_path, *command[1:])
    assert result.exit_code == 2
    assert f"PATH = '{tmp_path}/rank-1': an instance uses this folder" in result.stderr
    assert run("clear", tmp_path, "--all", "--dry-run").exit_code == 0
    tier.close()
    assert readable(tmp_path, range(5), rank=0, ranks=2) == list(range(5))
    assert readable(tmp_path, range(5), rank=1, ranks=2) == list(range(5))
    assert run(command[0], tmp_path, *command[1:]).exit_code == 0


def test_an_instance_is_refused_while_records_are_removed(tmp_path: Path) -> None:
    store(tmp_path, range(5))
    with (
        held(tmp_path),
        pytest.raises(ConfigError, match="another instance uses this folder"),
    ):
        tier_at(tmp_path)
    tier_at(tmp_path).close()


# -- folders of somebody else ---------------------------------------------------------------------


@pytest.mark.parametrize("verb", [["inspect"], ["verify"], ["clear", "--all"]])
@pytest.mark.parametrize("what", ["nothing", "a file", "an empty folder", "a rank", "other things"])
def test_what_is_no_folder_of_a_disk_tier_is_refused(tmp_path: Path, what: str, verb: list[str]) -> None:
    path = tmp_path / "kv"
    hint = "nothing like rank-0 is in it"
    if what == "nothing":
        hint = "No such file or directory"
    elif what == "a file":
        path.write_text("x")
        hint = "Not a directory"
    elif what == "a rank":
        store(path, range(2))
        path, hint = path / "rank-0", f"give the whole: {path}"
    else:
        path.mkdir()
        if what == "other things":
            for name in ("rank-x", "rank-01", "rank-0.bak", "rank-99999", "Rank-0"):
                (path / name).mkdir()
    before = listing(tmp_path)
    assert hint in found(verb[0], path, *verb[1:], exit_code=2)["errors"][0]["hint"]
    assert hint in run(verb[0], path, *verb[1:]).stderr
    assert listing(tmp_path) == before


def test_links_and_pipes_are_named_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    store(outside, range(3))
    before = listing(outside)
    folder = tmp_path / "kv"
    store(folder, range(3))
    store(folder, range(50, 53), LARGE)
    rank = folder / "rank-0"
    (folder / "rank-1").symlink_to(outside / "rank-0")
    (folder / "fingerprints").symlink_to(outside)
    (rank / f"slab-{SMALL}").unlink()
    (rank / f"slab-{SMALL}").symlink_to(outside / "rank-0" / f"slab-{SMALL}")
    (rank / "slab-8192").symlink_to("/dev/zero")
    os.mkfifo(rank / "slab-12288")
    (rank / "slab-007").write_text("x")
    (rank / "slab-16384").mkdir()
    told = found("inspect", folder)
    assert [one["rank"] for one in told["ranks"]] == [0]
    assert len(told["left_aside"]) == 7
    assert f"rank-0/slab-{SMALL}: not a regular file" in told["left_aside"]
    judged = found("verify", folder, exit_code=1)
    assert judged["damaged"]["missing"] == 3
    assert found("verify", folder, "--discard", exit_code=1)["discarded"] == 3
    assert run("clear", folder, "--older-than", "0s").exit_code == 0
    assert run("clear", folder, "--all").exit_code == 0
    assert listing(outside) == before
    assert (folder / "rank-1").is_symlink()


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal", "lock"])
def test_a_link_in_place_of_an_index_or_a_lock_is_not_followed(tmp_path: Path, name: str) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "kv"
    store(outside, range(30))
    store(folder, range(3))
    (folder / "rank-0" / name).unlink(missing_ok=True)
    target = outside / "rank-0" / name
    target.touch()
    before = listing(outside)
    (folder / "rank-0" / name).symlink_to(target)
    told = found("inspect", folder)
    assert told["fingerprints"][0]["generations"][0]["records"] == 3
    assert f"rank-0/{name}: not a regular file" in told["left_aside"]
    found("verify", folder, exit_code=0 if name == "lock" else 1)
    result = run("clear", folder, "--fingerprint", "aa")
    assert result.exit_code == (2 if name == "lock" else 0)
    assert listing(outside) == before


def test_a_slab_of_holes_costs_no_time(tmp_path: Path) -> None:
    store(tmp_path, range(3))
    (tmp_path / "rank-0" / "index.sqlite").unlink()
    with (tmp_path / "rank-0" / "slab-8192").open("wb") as file:
        file.truncate(1 << 42)
    begun_s = time.monotonic()
    assert found("inspect", tmp_path)["fingerprints"][0]["generations"][0]["records"] == 3
    assert time.monotonic() - begun_s < 5


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'{"model": 3}',
        b"[" * 100_000,
        b'{"model": "' + b"x" * (2 << 20) + b'"}',
        b"\xff\xfe",
    ],
    ids=["empty", "cut off", "a list", "a number", "deep", "long", "no text"],
)
def test_a_note_that_is_none_is_left_aside(tmp_path: Path, text: bytes) -> None:
    store(tmp_path, range(3))
    (tmp_path / "fingerprints").mkdir(exist_ok=True)
    (tmp_path / "fingerprints" / f"{LLAMA.hex()}.json").write_bytes(text)
    told = found("inspect", tmp_path)
    assert told["fingerprints"][0]["model"] is None
    assert len(told["left_aside"]) == 1
    assert "a model not named, fingerprint aa00" in run("inspect", tmp_path).stdout


def test_names_from_a_folder_do_nothing_to_a_terminal(tmp_path: Path) -> None:
    store(tmp_path, range(3))
    name_model(tmp_path, LLAMA, "\x1b[2J[bold]evil[/bold]\nname", 10**400)
    (tmp_path / "\x1b]0;title\x07").mkdir()
    shown = run("inspect", tmp_path)
    assert "\x1b" not in shown.output
    assert "\x07" not in shown.output
    assert "?[2J[bold]evil[/bold]?name, fingerprint" in shown.stdout
    assert found("inspect", tmp_path)["fingerprints"][0]["last_used_s"] is None
    dry = run("clear", tmp_path, "--all", "--dry-run")
    assert "\x1b" not in dry.output
    assert "[bold]evil" in dry.stdout


def test_a_folder_that_may_not_be_read_is_not_told_in_part() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "kv"
        store(folder, range(3))
        folder.chmod(0o755)
        Path(place).chmod(0o755)
        (folder / "rank-0").chmod(0)
        us = os.geteuid()
        try:
            if us == 0:
                os.seteuid(65534)  # root may read everything
            result = run("inspect", folder)
        finally:
            os.seteuid(us)
            (folder / "rank-0").chmod(0o700)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "run this as the user that runs the server" in result.stderr


# -- what is shown --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-5, "0 s"), (0, "0 s"), (59, "59 s"), (60, "1 min"), (7300, "2 h"), (2e6, "23 d")]
)
def test_ages_are_written_for_people(seconds: float, shown: str) -> None:
    assert folders.age(seconds) == shown


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("12h", 43_200), ("7d", 604_800), ("2W", 1_209_600)]
)
def test_ages_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert folders.seconds_of(text) == seconds


def test_neighbouring_numbers_are_written_as_one() -> None:
    assert folders.spans([7, 0, 1, 2, 9, 10]) == "0-2, 7, 9-10"
    assert folders.spans([]) == ""


def test_large_numbers_fit_80_columns() -> None:
    rows = folders.table(["generation"], ["records", "chunks", "bytes", "oldest", "newest", "groups"])
    rows.add_row("12, in doubt", "1,234,567", "1,234,567", "1023.99 GiB", "365 d", "59 min", "0-3")
    assert rows.columns[1].no_wrap
    from rich.console import Console

    console = Console(width=80)
    with console.capture() as capture:
        console.print(rows)
    assert "1,234,567  1,234,567  1023.99 GiB" in capture.get()


@pytest.mark.parametrize("verb", ["inspect", "verify", "clear"])
def test_help_teaches_with_examples_and_exit_codes(verb: str) -> None:
    for columns in (80, 100):
        shown = run(verb, "--help", columns=columns)
        assert shown.exit_code == 0
        assert shown.stdout.count(f"kvtide {verb} /var") >= 2
        assert "Exit code 0" in shown.stdout


def test_the_verbs_import_neither_vllm_nor_torch(tmp_path: Path) -> None:
    store(tmp_path, range(2))
    code = (
        "import sys\nfrom kvtide.cli.main import app\n"
        "for verb in (['inspect'], ['verify'], ['clear', '--all']):\n"
        "    try: app([*verb, sys.argv[1]])\n"
        "    except SystemExit as end: assert end.code == 0, end.code\n"
        "assert not {'vllm', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
