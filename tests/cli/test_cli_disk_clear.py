"""``kvtide clear`` on folders that real disk tiers wrote."""

import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from disk_folders import LARGE, QWEN, SMALL, found, kept, listing, readable, run, store, tier_at, write

from kvtide.errors import ConfigError, TierError, TierFullError, TierUnavailableError
from kvtide.tiers import removal
from kvtide.tiers.disk_index import DiskIndex
from kvtide.tiers.removal import held
from kvtide.tiers.slabs import slot_bytes_of
from kvtide.tiers.survey import opened

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


def test_who_only_looks_keeps_nobody_from_clearing(tmp_path: Path) -> None:
    store(tmp_path, range(5))
    with opened(tmp_path) as folder:
        looking = os.open(folder.ranks[0].path / "lock", os.O_RDONLY)
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.02, os.close, [looking]).start()
        assert run("clear", tmp_path, "--all").exit_code == 0
