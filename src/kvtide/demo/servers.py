"""Real vLLM servers on loopback: started together, ended always.

Knows processes, ports, logs and the flags that make the three servers differ in nothing but their pool and
their connector. Does not know what they are asked.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from kvtide.demo.errors import DemoError
from kvtide.demo.model import KV_BYTES_PER_TOKEN

BLOCK_TOKENS = 32
MAX_MODEL_TOKENS = 2_304
MAX_BATCHED_TOKENS = 4_096
SERVED_NAME = "smollm2-135m"

START_LIMIT_S = 240.0
TERM_LIMIT_S = 12.0
POLL_S = 0.1
LOG_TAIL_LINES = 25

# Loopback needs no proxy, whatever the environment says.
_OPENER = build_opener(ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Plan:
    """What one server is to be.

    Attributes:
        name: For people and for the log file.
        pool_blocks: Blocks of the engine's own pool, ``BLOCK_TOKENS`` tokens each.
        kv_transfer_config: JSON for ``--kv-transfer-config``; "" for a server without a connector.
    """

    name: str
    pool_blocks: int
    kv_transfer_config: str = ""

    @property
    def pool_tokens(self) -> int:
        """Tokens that fit the engine's own pool."""
        return self.pool_blocks * BLOCK_TOKENS


def command_of(plan: Plan, model: Path, port: int) -> list[str]:
    """Write the command line of one server."""
    # Not "vllm serve": with the CPU package that command asks for metadata of a package named vllm and ends.
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", SERVED_NAME),
        *("--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "warning"),
        *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", str(MAX_MODEL_TOKENS)),
        # A prompt is computed in one piece, so that no chunk border depends on what else is going on.
        *("--max-num-batched-tokens", str(MAX_BATCHED_TOKENS), "--block-size", str(BLOCK_TOKENS)),
        *("--num-gpu-blocks-override", str(plan.pool_blocks)),
        *("--kv-cache-memory-bytes", str(plan.pool_tokens * KV_BYTES_PER_TOKEN)),
        "--enable-prompt-tokens-details",
        *(("--kv-transfer-config", plan.kv_transfer_config) if plan.kv_transfer_config else ()),
    ]


def environment_of(inherited: Mapping[str, str], core_count: int) -> dict[str, str]:
    """Make the environment that all three servers share."""
    # A KVTIDE_ variable of the user's shell would be a setting that the report does not show.
    kept = {name: value for name, value in inherited.items() if not name.startswith("KVTIDE_")}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # Left alone, vLLM keeps one core more free beside a connector: other thread counts, other speed,
        # other last bits. On two cores that would be the whole comparison.
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0" if core_count <= 2 else "1",
        # vLLM compiles one small function of the sampler when log-probabilities are asked for: fifteen
        # seconds in the first request, and a C++ compiler that a fresh machine does not have.
        "TORCHDYNAMO_DISABLE": "1",
        # A connection that the server closes just as a question is sent on it would be a lost request.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
    }


class Server:
    """One running server; owns its process group."""

    def __init__(self, plan: Plan, model: Path, port: int, log: Path, environment: Mapping[str, str]) -> None:
        self.plan = plan
        self.address = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command_of(plan, model, port),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                # Ctrl-C must reach us alone: we end the servers, in order.
                start_new_session=True,
            )

    def get(self, path: str, limit_s: float = 10.0) -> str:
        """Fetch ``path`` from the server.

        Raises:
            DemoError: No answer, or not a good one.
        """
        try:
            with _OPENER.open(self.address + path, timeout=limit_s) as response:
                return str(response.read().decode())
        except (URLError, OSError) as error:
            raise DemoError(f"server {self.plan.name}, {path}: {error}") from None

    def is_ready(self) -> bool:
        """Whether it answers.

        Raises:
            DemoError: It has ended instead; carries the end of its log.
        """
        if (code := self._process.poll()) is not None:
            raise DemoError(f"server {self.plan.name} ended while starting ({code})\n{self.log_tail()}")
        try:
            self.get("/health", limit_s=1.0)
        except DemoError:
            return False
        return True

    def log_tail(self) -> str:
        """Return the last lines of its log, with the log's name."""
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"the end of {self._log}:", *(f"  {line}" for line in lines)])

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run within, and pause it after that."""
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> None:
        """Stop all its processes until it is awake again.

        vLLM's workers spin for a second after each answer, and their threads are bound to cores: the next
        server that is asked would have them on its own. A paused server takes no time from anybody.
        """
        self.signal(signal.SIGSTOP)

    def resident_bytes(self) -> int | None:
        """Memory of all its processes, what they share counted once; ``None`` if the system does not say."""
        kibibytes = [_proportional_kib(process) for process in _group(self._process.pid)]
        return sum(kibibytes) * 1024 if kibibytes and all(kibibytes) else None

    def signal(self, number: signal.Signals) -> None:
        """Send ``number`` to all its processes; SIGTERM to the first, which ends the others in order."""
        with suppress(ProcessLookupError):
            if number is not signal.SIGTERM:
                os.killpg(self._process.pid, number)
            elif self._process.poll() is None:
                self._process.send_signal(number)

    def reap(self) -> None:
        """Take the exit code of a process that has ended or been killed."""
        self._process.wait()

    def is_gone(self) -> bool:
        """Whether no process of its group is left."""
        self._process.poll()
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return True
        return False


class Servers:
    """Several servers, as a context: whatever happens inside, none is left behind.

    Args:
        plans: What to start.
        model: Folder of the model.
        logs: Folder for one log per server; exists.
        on_ready: Is called with each name as that server begins to answer.
    """

    def __init__(
        self, plans: Sequence[Plan], model: Path, logs: Path, on_ready: Callable[[str], None]
    ) -> None:
        self._plans = plans
        self._model = model.resolve()
        self._logs = logs
        self._on_ready = on_ready
        self._running: list[Server] = []

    def __enter__(self) -> dict[str, Server]:
        environment = environment_of(os.environ, len(os.sched_getaffinity(0)))
        try:
            for plan, port in zip(self._plans, _free_ports(len(self._plans)), strict=True):
                log = self._logs / f"{plan.name}.log"
                self._running.append(Server(plan, self._model, port, log, environment))
            self._wait()
        except BaseException:  # also an interrupt: __exit__ does not run for what fails in here
            self._stop()
            raise
        return {server.plan.name: server for server in self._running}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _wait(self) -> None:
        deadline_s = time.monotonic() + START_LIMIT_S
        waiting = list(self._running)
        while waiting:
            for server in [server for server in waiting if server.is_ready()]:
                waiting.remove(server)
                self._on_ready(server.plan.name)
            if waiting and time.monotonic() > deadline_s:
                name = waiting[0].plan.name
                raise DemoError(
                    f"server {name} did not answer within {START_LIMIT_S:.0f} s\n{waiting[0].log_tail()}"
                )
            time.sleep(POLL_S)

    def _stop(self) -> None:
        try:
            for server in self._running:
                # What is stopped hears nothing.
                server.signal(signal.SIGCONT)
                server.signal(signal.SIGTERM)
            deadline_s = time.monotonic() + TERM_LIMIT_S
            while time.monotonic() < deadline_s and not all(server.is_gone() for server in self._running):
                time.sleep(POLL_S)
        finally:
            # Also when a second Ctrl-C cuts the wait short.
            for server in self._running:
                server.signal(signal.SIGKILL)
                server.reap()


def _group(group_id: int) -> list[Path]:
    """List the processes of a group, as folders under ``/proc``."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            # The name in brackets may hold anything; after it: state, parent, group.
            if int(stat.read_text().rsplit(")", 1)[1].split()[2]) == group_id:
                found.append(stat.parent)
    return found


def _proportional_kib(process: Path) -> int:
    with suppress(OSError):
        for line in (process / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def _free_ports(count: int) -> list[int]:
    # All are held until the last is known, so that no port is given out twice.
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
