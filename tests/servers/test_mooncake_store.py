"""The Mooncake tier against a real store, in a network where nobody else is."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.testing.servers.mooncake import in_own_network, why_not

LIMIT_S = 400
INSIDE = Path(__file__).with_name("inside_mooncake.py")


def test_the_tier_holds_what_every_tier_has_to_and_survives_bad_nights() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-x", "--durations=8", str(INSIDE)]
    process = subprocess.Popen(
        in_own_network(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=INSIDE.parents[2],
    )
    try:
        told, _ = process.communicate(timeout=LIMIT_S)
    finally:
        # With all that it has started, whether it ended well or not.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    print(told)
    assert process.returncode == 0, told[-8000:]
