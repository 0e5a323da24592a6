"""A way to a server on loopback that takes as long as one wants: a TCP proxy in a process of its own.

Each time the client speaks after the server has, its first byte is held back; what follows goes on at once,
and answers do. So a round trip takes that much longer, however many bytes it carries. Knows bytes and turns;
does not know what is said.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

PIECE_BYTES = 1 << 18


class SlowProxy:
    """Goes between; ended by ``close``.

    Args:
        target_port: Of the server, on loopback.

    Attributes:
        port: Where to connect to instead.

    Raises:
        RuntimeError: It does not start.
    """

    def __init__(self, target_port: int) -> None:
        # Alone, so that its turns are not held up by whoever is measured; isolated, it needs nothing of ours.
        command = [sys.executable, "-I", __file__, str(target_port)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        try:
            self.port = self._number()
        except BaseException:  # also an interrupt: no process is left behind
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def hold(self, delay_s: float) -> int:
        """Let each round trip that begins from now on take so much longer; 0 for no longer at all.

        Returns:
            Round trips that were held back so far.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{delay_s!r}\n".encode())
        self._process.stdin.flush()
        return self._number()

    def close(self) -> None:
        """End it, and every connection through it."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self._process.kill()
        self._process.wait()

    def _number(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.strip().isdigit():
            raise RuntimeError("the proxy has ended")
        return int(line)


@contextmanager
def slow_proxy(target_port: int) -> Iterator[SlowProxy]:
    """Run one; it holds nothing back until it is told to.

    Args:
        target_port: Of the server, on loopback.
    """
    proxy = SlowProxy(target_port)
    try:
        yield proxy
    finally:
        proxy.close()


class _Between:
    """All connections, and how long their turns are held back.

    Args:
        target_port: Where they go on to.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.delay_s = 0.0
        self.held_count = 0

    async def connect(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """Carry one connection until either side ends it."""
        try:
            server, to_server = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            to_client.close()
            return
        turn = _Turn(self)
        carried = [
            asyncio.create_task(_carry(client, to_server, turn.client_speaks)),
            asyncio.create_task(_carry(server, to_client, turn.server_speaks)),
        ]
        try:
            await asyncio.wait(carried, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in carried:
                one.cancel()
            await asyncio.gather(*carried, return_exceptions=True)
            for writer in (to_server, to_client):
                writer.close()


class _Turn:
    """Whose turn it is on one connection.

    Args:
        between: Says for how long a turn is held back.
    """

    def __init__(self, between: _Between) -> None:
        self._between = between
        self._is_clients = False

    async def client_speaks(self) -> None:
        """Wait, if the server has spoken since."""
        if self._is_clients:
            return
        self._is_clients = True
        if self._between.delay_s > 0:
            self._between.held_count += 1
            await asyncio.sleep(self._between.delay_s)

    async def server_speaks(self) -> None:
        """Note it."""
        self._is_clients = False


async def _carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, before: Callable[[], Awaitable[None]]
) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(PIECE_BYTES):
            await before()
            writer.write(piece)
            await writer.drain()


async def _serve(target_port: int) -> None:
    between = _Between(target_port)
    server = await asyncio.start_server(between.connect, "127.0.0.1", 0, limit=PIECE_BYTES)
    print(server.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        between.delay_s = float(line)
        print(between.held_count, flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
