"""What happens when whoever reads a result has gone, as ``head`` does."""

import os
import subprocess
import sys

import pytest

from kvtide.cli.folders import refusing

KVTIDE = (sys.executable, "-c", "from kvtide.cli.main import app; app(prog_name='kvtide')")


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "--host-memory", "16MiB"],  # a table, then lines
        ["replay", "--help"],  # what typer writes, before the verb begins
    ],
    ids=" ".join,
)
def test_a_command_whose_reader_has_gone_ends_without_a_word(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [*KVTIDE, *arguments], stdout=writing, stderr=subprocess.PIPE, check=False, timeout=60
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_command_without_an_output_does_what_it_should() -> None:
    command = 'exec "$@" >&-'
    ended = subprocess.run(
        ["sh", "-c", command, "sh", *KVTIDE, "--version"], capture_output=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("as_json", [True, False])
def test_a_reader_that_has_gone_is_nothing_that_was_given_wrong(as_json: bool) -> None:
    with pytest.raises(BrokenPipeError), refusing(as_json):
        raise BrokenPipeError
