"""The examples that need no engine run as they are; what they say is what they claim."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

# Runs a script as a program of its own, then tells which of the heavy packages it has brought in.
RUN_AND_TELL = """
import runpy, sys
runpy.run_path(sys.argv[1], run_name="__main__")
print("imported:", sorted({"torch", "vllm", "numba"} & set(sys.modules)))
"""


def run(name: str) -> str:
    command = [sys.executable, "-W", "error", "-c", RUN_AND_TELL, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_manager_alone_needs_neither_vllm_nor_torch() -> None:
    said = run("manager_alone.py")
    assert "imported: []" in said
    assert "afterwards it finds 4 chunks, 128 tokens" in said
    assert "of 4 chunks of a novel 2 fit" in said
    assert "{'report': 4, 'novel': 1, 'poem': 1}" in said


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_the_copies_alone_need_no_vllm() -> None:
    said = run("copy_alone.py")
    assert "vllm" not in said
    assert "the very same: True" in said
    stored, loaded = (int(count) for count in re.findall(r"(\d+) bytes: True", said))
    assert loaded == stored * 3 // 4  # the reader had one of four blocks already
