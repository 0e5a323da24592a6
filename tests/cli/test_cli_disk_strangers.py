"""The verbs on folders that somebody spoilt, or that are none of a disk tier."""

import os
import tempfile
import time
from pathlib import Path

import pytest
from disk_folders import LARGE, LLAMA, SMALL, found, listing, name_model, run, store


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
