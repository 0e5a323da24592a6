"""Two real servers, engine and worker processes and all: one by ``kvtide serve``, one by plain vLLM's option.

What only a server shows: events over ZeroMQ, ``/metrics``, resident memory, and how it ends.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine import models
from engine.exchanges import POOL_BLOCKS, STORED_TOKENS, prompts_of
from engine.server import (
    Process,
    Server,
    anonymous_mappings_of,
    free_port,
    metrics_of,
    running,
    shared_memory_of,
    wait_until_gone,
)
from engine.tiny_engine import BLOCK_TOKENS
from kvtide.manager.room import ROOM_WANTED
from kvtide.metrics import DEFINITIONS, Kind

BUDGET_BYTES = 24 << 20
CHUNK_BYTES = 32 << 10
CHUNKS_PER_PROMPT = STORED_TOKENS // BLOCK_TOKENS
POOL_CHUNKS = BUDGET_BYTES // CHUNK_BYTES
OVERFILLING_PROMPTS = POOL_CHUNKS // CHUNKS_PER_PROMPT + 3
TERM_LIMIT_S = 15.0


class Subscriber:
    """A router's ear. It binds and vLLM's publisher connects, so that no port has to be guessed.

    Attributes:
        endpoint: Where the publisher is to connect.
        events: Heard so far, in order.
    """

    def __init__(self) -> None:
        import zmq

        self.events: list[Any] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.subscribe(b"")
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._closing = threading.Event()
        # All the time, not when asked: a subscription reaches a publisher that connects only while the
        # socket is looked at.
        self._thread = threading.Thread(target=self._listen, name="subscriber")
        self._thread.start()

    def wait_until_quiet(self, quiet_s: float = 2.0) -> None:
        """Wait until nothing has come for ``quiet_s``."""
        heard = -1
        while heard != len(self.events):
            heard = len(self.events)
            time.sleep(quiet_s)

    def of(self, kind: str, medium: str) -> list[Any]:
        """Events of one kind and medium, in order."""
        return [e for e in self.events if type(e).__name__ == kind and e.medium == medium]

    def close(self) -> None:
        """End."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _listen(self) -> None:
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        while not self._closing.is_set():
            if self._socket.poll(100):
                _topic, _sequence, payload = self._socket.recv_multipart()
                self.events += msgspec.msgpack.decode(payload, type=KVEventBatch).events


@dataclass(frozen=True, slots=True)
class Servers:
    """Both, and what the first one has been heard to say before anybody asked it anything."""

    ours: Server
    plain: Server
    subscriber: Subscriber
    metrics_at_start: str


@pytest.fixture(scope="module")
def subscriber() -> Iterator[Subscriber]:
    heard = Subscriber()
    try:
        yield heard
    finally:
        heard.close()


@pytest.fixture(scope="module")
def servers(subscriber: Subscriber, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    logs = tmp_path_factory.mktemp("servers")
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": subscriber.endpoint}
    transfer = {
        "kv_connector": "KVTideConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_memory": BUDGET_BYTES},
    }
    python = Path(sys.executable)
    kvtide = [str(python.with_name("kvtide")), "serve", str(models.llama()), "--host-memory", "24MiB"]
    vllm = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(models.llama())]
    # Both at once: a start is one thread after another, and there are two cores.
    with (
        running(
            Server([*kvtide, *OPTIONS, "--kv-events-config", json.dumps(events)], free_port(), logs / "ours")
        ) as ours,
        running(
            Server(
                [*vllm, *OPTIONS, "--kv-transfer-config", json.dumps(transfer)], free_port(), logs / "plain"
            )
        ) as plain,
    ):
        ours.wait_until_ready()
        plain.wait_until_ready()
        yield Servers(ours, plain, subscriber, ours.get("/metrics"))


OPTIONS = [
    *("--tokens-only", "--skip-tokenizer-init", "--dtype", "bfloat16", "--enforce-eager"),
    *("--max-model-len", "800", "--max-num-seqs", "8", "--block-size", str(BLOCK_TOKENS)),
    *("--num-gpu-blocks-override", str(POOL_BLOCKS), "--kv-cache-memory-bytes", str(64 << 20)),
    *("--uvicorn-log-level", "warning"),
]


@pytest.fixture(scope="module")
def overfilled(servers: Servers) -> Servers:
    """Ask so many prompts that the host pool overflows, hear of it, and bring one of them back."""
    prompts = prompts_of(70, OVERFILLING_PROMPTS)
    first = [servers.ours.generate(prompt) for prompt in prompts]
    # The last ones are in the engine's own pool or on their way; the one before has left it.
    assert servers.ours.generate(prompts[-4]) == first[-4]
    servers.subscriber.wait_until_quiet()
    return servers


def series_expected() -> set[tuple[str, frozenset[tuple[str, str]]]]:
    suffix = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_count"}
    return {
        (f"vllm:kvtide_{d.name}{suffix[d.kind]}", frozenset({(d.label, value)} if d.label else ()))
        for d in DEFINITIONS
        if d.said_at_first
        for value in d.values_with(())  # no tiers here
    }


def test_all_series_are_there_before_the_first_request(servers: Servers) -> None:
    found = metrics_of(servers.metrics_at_start)
    assert series_expected() <= found.keys(), series_expected() - found.keys()
    assert found["vllm:kvtide_transfer_bytes_total", frozenset({("direction", "load")})] == 0


def test_metrics_after_traffic(overfilled: Servers) -> None:
    found = metrics_of(overfilled.ours.get("/metrics"))

    def value(name: str, **labels: str) -> float:
        return found[f"vllm:kvtide_{name}", frozenset(labels.items())]

    stored_chunks = OVERFILLING_PROMPTS * CHUNKS_PER_PROMPT
    assert value("stored_chunks_total") == stored_chunks
    assert value("transfer_bytes_total", direction="store") == stored_chunks * CHUNK_BYTES
    assert value("transfer_bytes_total", direction="load") == CHUNKS_PER_PROMPT * CHUNK_BYTES
    assert value("hit_tokens_total", medium="host") == STORED_TOKENS
    assert 0 <= value("evicted_chunks_total") - (stored_chunks - POOL_CHUNKS) <= POOL_CHUNKS // ROOM_WANTED
    assert value("pool_budget_bytes") == value("pool_capacity_bytes") == BUDGET_BYTES
    assert 0 < value("pool_used_bytes") <= BUDGET_BYTES
    assert value("pool_pinned_bytes") == value("open_store_bytes") == 0
    assert value("lookup_seconds_count") >= OVERFILLING_PROMPTS + 1
    assert value("transfer_failures_total", direction="load") == 0


def test_stored_events_say_what_the_engines_own_say(overfilled: Servers) -> None:
    events = overfilled.subscriber
    own = {}
    for event in events.of("BlockStored", "GPU"):
        parent = event.parent_block_hash
        for number, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
            own[block_hash] = (parent, tokens, event.block_size, event.group_idx, event.kv_cache_spec_kind)
            parent = block_hash
    seen = 0
    for event in events.of("BlockStored", "CPU"):
        parent = event.parent_block_hash
        for number, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
            said = (parent, tokens, event.block_size, event.group_idx, event.kv_cache_spec_kind)
            assert said == own[block_hash]
            parent = block_hash
            seen += 1
    assert seen == OVERFILLING_PROMPTS * CHUNKS_PER_PROMPT
    assert {kind for *_, kind in own.values()} == {"full_attention"}
    assert set(prompts_of(70, 1)[0][:BLOCK_TOKENS]) == set(next(iter(own.values()))[1])


def test_removed_events_name_what_was_stored_and_no_more(overfilled: Servers) -> None:
    held: set[Any] = set()
    removed = 0
    for event in overfilled.subscriber.events:
        if getattr(event, "medium", None) != "CPU":
            continue
        if type(event).__name__ == "BlockStored":
            held.update(event.block_hashes)
            continue
        assert event.group_idx == 0
        assert held.issuperset(event.block_hashes)
        held.difference_update(event.block_hashes)
        removed += len(event.block_hashes)
    # A little is freed ahead of need.
    room = removed - (OVERFILLING_PROMPTS * CHUNKS_PER_PROMPT - POOL_CHUNKS)
    assert 0 <= room <= POOL_CHUNKS // ROOM_WANTED
    # A subscriber who has heard everything knows what can be fetched now.
    assert len(held) == POOL_CHUNKS - room


def test_the_pool_is_resident_and_within_its_budget(overfilled: Servers) -> None:
    pools = [
        mapping
        for process in overfilled.ours.processes()
        for mapping in anonymous_mappings_of(process)
        if mapping.size_bytes == BUDGET_BYTES
    ]
    assert [pool.resident_bytes for pool in pools] == [BUDGET_BYTES]


def test_plain_vllm_brings_back_what_it_has_stored(servers: Servers) -> None:
    prompts = prompts_of(80)
    for prompt in prompts:
        servers.plain.generate(prompt)
    hits = [servers.plain.generate(prompts[-1])]
    loads = [servers.plain.generate(prompt) for prompt in [*prompts[:2], prompts[-1]]]
    found = metrics_of(servers.plain.get("/metrics"))
    assert found["vllm:kvtide_hit_tokens_total", frozenset({("medium", "host")})] == 3 * STORED_TOKENS
    assert loads[-1] == hits[-1]


def assert_nothing_left(processes: list[Process], shared: set[Path], limit_s: float) -> None:
    assert wait_until_gone(processes, limit_s) == []
    assert [str(path) for path in shared if path.exists()] == []


def test_sigterm_ends_a_server_and_all_that_belongs_to_it(servers: Servers) -> None:
    processes = servers.ours.processes()
    assert len(processes) > 2
    shared = shared_memory_of(processes)
    began_s = time.monotonic()
    servers.ours.process.send_signal(signal.SIGTERM)
    assert servers.ours.process.wait(TERM_LIMIT_S) == 0, servers.ours.log_tail()
    assert_nothing_left(processes, shared, TERM_LIMIT_S - (time.monotonic() - began_s))
    assert not re.search(
        r'File ".*/(src|site-packages)/kvtide/', servers.ours.log.read_text(errors="replace")
    )


def test_a_killed_engine_takes_its_server_along(servers: Servers) -> None:
    processes = servers.plain.processes()
    shared = shared_memory_of(processes)
    (engine,) = (process for process in processes if process.name.startswith("VLLM::EngineCor"))
    os.kill(engine.pid, signal.SIGKILL)
    servers.plain.process.wait(TERM_LIMIT_S)
    assert_nothing_left(processes, shared, TERM_LIMIT_S)
