"""Pieces of measurements in processes of their own: what comes back, and what is said when nothing does."""

import os
import time
from pathlib import Path

import pytest
from benchmarks.frame.children import Tell, in_child
from benchmarks.frame.registry import UnfitError

HERE = "tests.bench.test_bench_children"


def ask(function: str, folder: Path, *arguments: object, limit_s: float = 60, **changes: str) -> object:
    told: list[str] = []
    answer = in_child(f"{HERE}:{function}", arguments, folder / "log", told.append, limit_s, changes)
    return answer, told


def tells(tell: Tell, word: str) -> list[str]:
    print("a line for the log")
    tell(f"about to {word}")
    return [word, os.environ.get("KVTIDE_TOLD", "")]


def fails(tell: Tell) -> None:
    raise ValueError("no such chunk")


def dies(tell: Tell) -> None:
    print("last words", flush=True)
    os._exit(3)


def hangs(tell: Tell) -> None:
    time.sleep(60)


def tidies(tell: Tell, path: str) -> None:
    try:
        time.sleep(60)
    finally:
        Path(path).write_text("tidy")


def test_the_answer_and_what_was_told_come_back_and_the_rest_is_in_the_log(tmp_path: Path) -> None:
    assert ask("tells", tmp_path, "add", KVTIDE_TOLD="yes") == (["add", "yes"], ["about to add"])
    assert (tmp_path / "log").read_text() == "a line for the log\n"
    assert "KVTIDE_TOLD" not in os.environ


def test_what_is_raised_there_is_said_here(tmp_path: Path) -> None:
    with pytest.raises(UnfitError, match=r"(?s):fails: Traceback.*no such chunk"):
        ask("fails", tmp_path)


def test_of_a_process_that_died_the_end_of_the_log_is_shown(tmp_path: Path) -> None:
    with pytest.raises(UnfitError, match=r"(?s)its process has died.*last words"):
        ask("dies", tmp_path)


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(UnfitError, match="no answer within 1 s"):
        ask("hangs", tmp_path, limit_s=1)
    assert time.monotonic() - began_s < 20


def test_a_process_that_is_ended_ends_first_what_it_had_begun(tmp_path: Path) -> None:
    with pytest.raises(UnfitError, match="no answer within 1 s"):
        ask("tidies", tmp_path, str(tmp_path / "left"), limit_s=1)
    assert (tmp_path / "left").read_text() == "tidy"
