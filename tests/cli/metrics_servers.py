"""Servers on loopback that answer as they are told, and pages of metrics to answer with."""

import contextlib
import socketserver
from collections.abc import Callable, Iterator
from threading import Thread
from typing import BinaryIO

# Times, hits, gain, standard error, seconds to the first token.
ROWS = (
    ("0.5", 25, -6.2, 0.3, 1.9),
    ("1", 31.2, 0, 0, 1.7),
    ("2", 40.3, 9.1, 0.4, 0.9),
    ("4", 40.5, 9.3, 0.4, 0.9),
)

Answer = Callable[[bytes, BinaryIO], None]
"""Takes what was asked, headers and all, and where to write."""


def page(
    engine: int = 0,
    rows: tuple[tuple[object, ...], ...] = ROWS,
    tiers: tuple[str, ...] = ("host",),
    judged: int = 10_000,
) -> str:
    """The metrics of an engine, as a server of vLLM writes them."""
    own = f'engine="{engine}",model_name="tiny"'
    lines = [
        "# HELP vllm:kvtide_pool_budget_bytes Host memory that may be used.",
        "# TYPE vllm:kvtide_pool_budget_bytes gauge",
        f"vllm:kvtide_pool_budget_bytes{{{own}}} {4 << 30}.0",
        f"vllm:kvtide_ghost_requests_total{{{own}}} 12031.0",
        f"vllm:kvtide_ghost_requests_created{{{own}}} 1.7e+09",
        f"vllm:kvtide_ghost_dropped_requests_total{{{own}}} 0.0",
        f"vllm:kvtide_ghost_judged_requests{{{own}}} {judged}",
        f"vllm:kvtide_ghost_sampled_share{{{own}}} 0.25",
        f"vllm:kvtide_ghost_queried_tokens_total{{{own}}} 1.2e+08",
    ]  # fmt: skip
    for tier in tiers:
        if tier != "host":
            lines.append(f'vllm:kvtide_tier_capacity_bytes{{{own},tier="{tier}"}} {200 << 30}.0')
        for times, *values in rows:
            names = ("hit_points", "gain_points", "error_points", "first_token_seconds")
            lines += [
                f'vllm:kvtide_ghost_{name}{{{own},tier="{tier}",times="{times}"}} {value}'
                for name, value in zip(names, values, strict=False)
            ]
    return "\n".join(lines) + "\n"


def plain(text: str | bytes, status: str = "200 OK", headers: str = "") -> Answer:
    """Answer with a text."""
    body = text.encode() if isinstance(text, str) else text

    def answer(_: bytes, out: BinaryIO) -> None:
        out.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n{headers}\r\n".encode() + body)

    return answer


@contextlib.contextmanager
def served(answer: Answer) -> Iterator[tuple[str, list[bytes]]]:
    """Run a server.

    Yields:
        Its address, and what it was asked so far.
    """
    asked: list[bytes] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            lines = []
            while (line := self.rfile.readline(65_536)).strip():
                lines.append(line)
            asked.append(b"".join(lines))
            with contextlib.suppress(ConnectionError):
                answer(asked[-1], self.wfile)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()
