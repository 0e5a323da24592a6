"""Real servers on loopback, each in a session of its own: started, asked, watched and always ended.

Knows processes, ``/proc`` and HTTP. Does not know what is tested with them.
"""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

START_LIMIT_S = 300.0
END_LIMIT_S = 20.0
POLL_S = 0.1

# Loopback needs no proxy, whatever the environment says.
_OPENER = build_opener(ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Process:
    """One process, told apart from a later one with the same id."""

    pid: int
    started_ticks: int
    name: str

    def is_alive(self) -> bool:
        """Whether it is there and not a zombie that its new parent has yet to reap."""
        return (now := _process(self.pid)) is not None and now.started_ticks == self.started_ticks


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of a process's memory map: private and without a file."""

    size_bytes: int
    resident_bytes: int


class Server:
    """A server that runs, by its first process.

    Attributes:
        log: What it has printed.
    """

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        self.log = log
        self._address = f"http://127.0.0.1:{port}"
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )

    def get(self, path: str) -> str:
        """Fetch a page."""
        with _OPENER.open(self._address + path, timeout=10) as response:
            return str(response.read().decode())

    def generate(self, token_ids: Sequence[int], new_tokens: int = 8) -> tuple[list[int], list[float]]:
        """Put a prompt of token ids; token ids and log-probabilities come back."""
        sampling = {"temperature": 0, "max_tokens": new_tokens, "ignore_eos": True, "logprobs": 1}
        body = json.dumps({"token_ids": list(token_ids), "sampling_params": sampling}).encode()
        request = Request(
            self._address + "/inference/v1/generate", body, {"Content-Type": "application/json"}
        )
        with _OPENER.open(request, timeout=60) as response:
            (choice,) = json.load(response)["choices"]
        return choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]]

    def wait_until_ready(self) -> None:
        """Wait for its first answer."""
        give_up_s = time.monotonic() + START_LIMIT_S
        while True:
            assert self.process.poll() is None, f"ended while starting\n{self.log_tail()}"
            try:
                self.get("/health")
            except (URLError, OSError):
                assert time.monotonic() < give_up_s, f"no answer\n{self.log_tail()}"
                time.sleep(POLL_S)
            else:
                return

    def log_tail(self) -> str:
        """The end of what it has printed."""
        return self.log.read_text(errors="replace")[-4000:]

    def processes(self) -> list[Process]:
        """All processes of its session."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _session_of(int(entry.name)) == self.process.pid:
                found.append(_process(int(entry.name)))
        return [process for process in found if process is not None]

    def end(self) -> None:
        """End it, whatever it is doing, with all that belongs to it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            wait_until_gone(self.processes(), END_LIMIT_S)
        for process in self.processes():
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Hold a server; none is left behind."""
    try:
        yield server
    finally:
        server.end()


def free_port() -> int:
    """Find a port of loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_gone(processes: Sequence[Process], limit_s: float) -> list[str]:
    """Wait for processes to end; names those that have not."""
    give_up_s = time.monotonic() + limit_s
    while True:
        left = [f"{process.name} ({process.pid})" for process in processes if process.is_alive()]
        if not left or time.monotonic() > give_up_s:
            return left
        time.sleep(POLL_S)


def shared_memory_of(processes: Sequence[Process]) -> set[Path]:
    """Files under /dev/shm that these processes have mapped."""
    lines = [line for process in processes for line in _read(process.pid, "maps").splitlines()]
    return {
        Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line and "(deleted)" not in line
    }


def anonymous_mappings_of(process: Process) -> list[Mapping]:
    """Private mappings without a file, in order."""
    mappings = []
    for block in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", _read(process.pid, "smaps"))[1:]:
        head, *_ = block.splitlines()
        fields = head.split()
        if fields[1].endswith("p") and len(fields) == 5:
            sizes = dict(re.findall(r"(?m)^(\w+): +(\d+) kB$", block))
            mappings.append(Mapping(int(sizes["Size"]) << 10, int(sizes["Rss"]) << 10))
    return mappings


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTIDE_")}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # As in ``tiny_engine``: no compiler for one function of the sampler, one thread for a tiny model.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _stat(pid: int) -> tuple[str, list[str]] | None:
    """Name and the fields after it, from the third on; the name may hold anything."""
    text = _read(pid, "stat")
    if not text:
        return None
    name = text[text.index("(") + 1 : text.rindex(")")]
    return name, text[text.rindex(")") + 2 :].split()


def _session_of(pid: int) -> int | None:
    stat = _stat(pid)
    return None if stat is None else int(stat[1][3])


def _process(pid: int) -> Process | None:
    stat = _stat(pid)
    if stat is None or stat[1][0] in "ZX":
        return None
    return Process(pid, int(stat[1][19]), stat[0])


def metrics_of(page: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Read a page of Prometheus: series of kvtide by name and labels, without those of vLLM's own."""
    from prometheus_client.parser import text_string_to_metric_families

    series: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith("vllm:kvtide_"):
                labels: Any = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
                series[sample.name, frozenset(labels.items())] = sample.value
    return series
