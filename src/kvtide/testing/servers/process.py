"""A server for tests: a process that is started, waited for, frozen, thawed and ended, by its pid alone.

Knows commands, signals and logs. What is run, where it listens and when it answers is known to who starts it.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

START_S = 60.0
"""How long a server may take until it answers."""

END_S = 30.0
"""How long one may take to end."""

POLL_S = 0.02
LOG_BYTES = 2000
"""Of a server's last words, for whoever finds that it has not started."""

S = TypeVar("S", bound="ServerProcess")


class ServerProcess:
    """One process of a server; it can be started again after it has ended.

    Args:
        command: Program and arguments.
        log: File for what it says; the folder is made when it is not there.
        answers: Says whether it can be used.
        environment: Of it; this process's own without.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        answers: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command, self._log = list(command), log
        self._answers, self._environment = answers, environment
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process that runs.

        Raises:
            RuntimeError: None does.
        """
        if not self.runs:
            raise RuntimeError(f"{self._command[0]} does not run")
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it has been started and has not ended; a frozen one runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, and wait until it answers.

        Raises:
            RuntimeError: It does not, and is gone; has the end of its log. Or it runs already.
        """
        if self.runs:
            raise RuntimeError(f"{self._command[0]} runs already")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as said:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=self._environment
            )
        try:
            wait_until(lambda: not self.runs or self._answers(), START_S)
            if self.runs:
                return
            trouble = f"ended with {self._process.returncode} before it answered"
        except TimeoutError:
            trouble = f"does not answer within {START_S:g} s"
        except BaseException:  # also an interrupt: no server is left behind
            self.kill()
            raise
        self.kill()
        raise RuntimeError(f"{self._command[0]}: {trouble}: {self._last_words()}")

    def freeze(self) -> None:
        """Stop it in its tracks: connections stay and are taken, and nobody answers.

        Raises:
            RuntimeError: It does not run.
        """
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        """Let it go on; does nothing when it is not frozen, or does not run."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a power cut would, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_S)

    def end(self, patience_s: float = END_S) -> None:
        """Ask it to end, frozen or not, and wait until it is gone; kill it when it does not end in time."""
        self.thaw()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self.kill()

    def _last_words(self) -> str:
        return self._log.read_bytes()[-LOG_BYTES:].decode(errors="replace")


@contextmanager
def serving(server: S) -> Iterator[S]:
    """Run a server while the block lasts; it is killed at its end.

    Raises:
        RuntimeError: It does not answer.
    """
    try:
        server.start()
        yield server
    finally:
        server.kill()


def wait_until(condition: Callable[[], bool], patience_s: float = START_S) -> None:
    """Ask again and again.

    Raises:
        TimeoutError: It did not come true.
    """
    end_s = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"it did not happen within {patience_s:g} s")
        time.sleep(POLL_S)


def free_port() -> int:
    """Find a port of loopback that nobody listens on; somebody may, later."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def takes_connections(port: int) -> bool:
    """Whether somebody listens on a port of loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
