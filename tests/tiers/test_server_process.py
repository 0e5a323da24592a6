"""Processes of servers for tests: begun and waited for, frozen, ended and begun again."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.testing.servers import process
from kvtide.testing.servers.process import (
    ServerProcess,
    free_port,
    serving,
    takes_connections,
    wait_until,
)

ECHO = """
import signal, socket, sys
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    connection, _ = listener.accept()
    with connection:
        while said := connection.recv(100):
            connection.sendall(said)
"""


def echo_at(port: int, folder: Path, *words: str) -> ServerProcess:
    command = [sys.executable, "-I", "-c", ECHO, str(port), *words]
    return ServerProcess(command, folder / "logs" / "echo", lambda: takes_connections(port))


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def server(port: int, tmp_path: Path) -> Iterator[ServerProcess]:
    with serving(echo_at(port, tmp_path)) as server:
        yield server


def answer_of(port: int, patience_s: float) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 10.0) as connection:
        connection.settimeout(patience_s)
        connection.sendall(b"hello")
        return connection.recv(5)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_it_answers_once_it_is_started_and_is_gone_after_its_block(port: int, tmp_path: Path) -> None:
    with serving(echo_at(port, tmp_path)) as server:
        assert server.runs
        assert answer_of(port, 30.0) == b"hello"
        pid = server.pid
    assert is_gone(pid)
    assert not server.runs
    with pytest.raises(RuntimeError, match="does not run"):
        assert server.pid


def test_frozen_it_takes_connections_and_does_not_answer(server: ServerProcess, port: int) -> None:
    server.freeze()
    assert server.runs
    with pytest.raises(TimeoutError):
        answer_of(port, 0.1)
    server.thaw()
    assert answer_of(port, 30.0) == b"hello"


def test_frozen_twice_and_killed_while_it_is(server: ServerProcess) -> None:
    server.freeze()
    server.freeze()
    pid = server.pid
    server.kill()
    assert is_gone(pid)
    server.thaw()
    with pytest.raises(RuntimeError, match="does not run"):
        server.freeze()


def test_killed_it_can_be_started_again_and_running_it_cannot(server: ServerProcess, port: int) -> None:
    with pytest.raises(RuntimeError, match="runs already"):
        server.start()
    server.kill()
    assert not takes_connections(port)
    server.start()
    assert answer_of(port, 30.0) == b"hello"


@pytest.mark.parametrize(
    ("words", "patience_s", "status"),
    [([], 60.0, -signal.SIGTERM), (["deaf"], 0.1, -signal.SIGKILL)],
    ids=["it ends", "it does not"],
)
def test_asked_to_end_while_it_is_frozen_it_is_gone_in_the_end(
    port: int, tmp_path: Path, words: list[str], patience_s: float, status: int
) -> None:
    with serving(echo_at(port, tmp_path, *words)) as server:
        server.freeze()
        server.end(patience_s)
        assert not server.runs
        assert server._process is not None
        assert server._process.returncode == status


def test_one_that_ends_instead_is_said_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-c", "import sys; sys.exit('x' * 5000 + 'no licence')"]
    server = ServerProcess(command, tmp_path / "log", lambda: False)
    with pytest.raises(RuntimeError, match=r"ended with 1 before it answered: x+no licence") as caught:
        server.start()
    assert len(str(caught.value)) < 3000


def test_one_that_does_not_answer_in_time_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "START_S", 0.05)
    server = ServerProcess(["sleep", "1000"], tmp_path / "log", lambda: False)
    with pytest.raises(RuntimeError, match=r"sleep: does not answer within 0\.05 s"):
        server.start()
    assert not server.runs


def test_trouble_while_it_is_waited_for_leaves_no_process(tmp_path: Path) -> None:
    def answers() -> bool:
        raise OSError("who asks?")

    server = ServerProcess(["sleep", "1000"], tmp_path / "log", answers)
    with pytest.raises(OSError, match="who asks"):
        server.start()
    assert not server.runs


def test_a_program_that_is_not_there_is_said(tmp_path: Path) -> None:
    server = ServerProcess(["/no/such/program"], tmp_path / "log", lambda: True)
    with pytest.raises(FileNotFoundError, match="/no/such/program"), serving(server):
        raise AssertionError("it was started")


def test_what_does_not_come_true_is_not_waited_for_for_ever() -> None:
    asked = iter([False, False, True])
    wait_until(lambda: next(asked), 30.0)
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        wait_until(lambda: False, 0.01)
