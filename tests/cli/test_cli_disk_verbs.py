"""``kvtide inspect`` and ``verify`` on folders that real disk tiers wrote."""

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_folders import (
    DAY_S,
    LARGE,
    QWEN,
    SMALL,
    change,
    found,
    listing,
    readable,
    rewrite,
    run,
    store,
    tier_at,
    write,
)

from kvtide.cli import folders, verify
from kvtide.testing.tiers import name_of
from kvtide.tiers.slabs import ALIGNMENT, slot_bytes_of


def test_inspect_tells_models_generations_bytes_and_ages(two_models: Path) -> None:
    told = found("inspect", two_models)
    assert told["ok"] is True
    assert told["in_use"] is False
    on_disk = sum(path.stat().st_blocks * 512 for path in two_models.rglob("slab-*"))
    assert told["slab_bytes"] == told["ranks"][0]["slab_bytes"] == on_disk
    in_indexes = sum(path.stat().st_blocks * 512 for path in two_models.rglob("index.sqlite*"))
    assert 0 < told["index_bytes"] <= in_indexes
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


def test_an_index_that_a_tier_would_make_anew_is_damage(tmp_path: Path) -> None:
    store(tmp_path, range(9))
    rewrite(tmp_path, "CREATE TABLE theirs (x)")
    told = found("verify", tmp_path, exit_code=1)
    assert told["damaged_indexes"] == ["rank-0/index.sqlite: there are tables that are not ours"]
    assert found("clear", tmp_path, "--older-than", "1d")["removed"] == []
    assert found("verify", tmp_path, "--discard", exit_code=1)["damaged_indexes"] == told["damaged_indexes"]
    assert found("verify", tmp_path)["ok"] is True
    assert readable(tmp_path, range(9)) == list(range(9))


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
