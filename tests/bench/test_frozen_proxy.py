"""The proxy that makes a server slow: how much, whom, and that it changes nothing else."""

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvtide.testing.servers.slow_proxy import SlowProxy, slow_proxy

DELAY_S = 0.2


class Echo(socketserver.StreamRequestHandler):
    """Says each line again."""

    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(line)


@pytest.fixture
def echo_port() -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def proxy(echo_port: int) -> Iterator[SlowProxy]:
    with slow_proxy(echo_port) as proxy:
        yield proxy


def said_again(connection: socket.socket, line: bytes) -> float:
    """Say a line, wait until it was said again; returns the seconds that took."""
    began_s = time.monotonic()
    sender = threading.Thread(target=connection.sendall, args=(line,))
    sender.start()
    said = bytearray()
    while not said.endswith(b"\n"):
        piece = connection.recv(1 << 20)
        assert piece, "it was hung up"
        said += piece
    sender.join()
    assert said == line
    return time.monotonic() - began_s


def test_a_round_trip_takes_so_much_longer_and_the_next_one_again(proxy: SlowProxy) -> None:
    with closing(socket.create_connection(("127.0.0.1", proxy.port))) as connection:
        said_again(connection, b"at once\n")
        assert proxy.hold(DELAY_S) == 0
        for _ in range(2):
            assert said_again(connection, b"later\n") >= DELAY_S
        assert proxy.hold(0) == 2
        said_again(connection, b"at once again\n")
        assert proxy.hold(0) == 2


def test_a_long_request_is_held_back_once_and_arrives_whole(proxy: SlowProxy) -> None:
    proxy.hold(DELAY_S)
    with closing(socket.create_connection(("127.0.0.1", proxy.port))) as connection:
        line = bytes(range(11, 256)) * 8_000 + b"\n"
        assert said_again(connection, line) >= DELAY_S
    assert proxy.hold(0) == 1


def test_connections_are_held_back_each_for_itself(proxy: SlowProxy) -> None:
    proxy.hold(DELAY_S)
    connections = [socket.create_connection(("127.0.0.1", proxy.port)) for _ in range(8)]
    threads = [threading.Thread(target=said_again, args=(one, b"all at once\n")) for one in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in connections:
        one.close()
    assert proxy.hold(0) == 8


def test_where_the_server_is_gone_a_connection_ends(echo_port: int) -> None:
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        with slow_proxy(nobody.getsockname()[1]) as proxy:
            with closing(socket.create_connection(("127.0.0.1", proxy.port))) as connection:
                assert connection.recv(1) == b""
            assert proxy.hold(0) == 0


def test_a_proxy_that_has_ended_is_told_of(echo_port: int) -> None:
    with slow_proxy(echo_port) as proxy:
        pass
    with pytest.raises((RuntimeError, ValueError, BrokenPipeError)):
        proxy.hold(0)
