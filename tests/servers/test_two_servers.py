"""Servers that share nothing but a store: what one has computed, the others load at once, bit for bit.

One server writes to three stores at the same time; three others have one of them each. The stores want
secrets, and whatever was written by anybody is searched for them.
"""

import json
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine import models
from engine.exchanges import POOL_BLOCKS, STORED_TOKENS, prompts_of
from engine.server import Server, free_port, metrics_of, running
from engine.tiny_engine import BLOCK_TOKENS
from kvtide.testing.servers.s3 import moto_server
from kvtide.testing.servers.valkey import redis_server

CHUNKS = STORED_TOKENS // BLOCK_TOKENS
KINDS = ("directory", "valkey", "objects")
WAIT_S = 60.0
WRITER = "writer"

OPTIONS = [
    *("--tokens-only", "--skip-tokenizer-init", "--dtype", "bfloat16", "--enforce-eager"),
    *("--max-model-len", "800", "--max-num-seqs", "8", "--block-size", str(BLOCK_TOKENS)),
    *("--num-gpu-blocks-override", str(POOL_BLOCKS), "--kv-cache-memory-bytes", str(64 << 20)),
    *("--uvicorn-log-level", "warning"),
]


@dataclass(frozen=True, slots=True)
class Fleet:
    """All servers, and what each must never say.

    Attributes:
        servers: The one that writes, and one for each kind of store.
        folder: Where all of them and their stores write.
        words: What is secret.
    """

    servers: dict[str, Server]
    folder: Path
    words: dict[str, str]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    words = {name: secrets.token_hex(16) for name in ("KV_PASSWORD", "KV_SECRET_KEY")}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for name, word in words.items():
            patch.setenv(name, word)
        patch.setenv("KV_ACCESS_KEY", "loopback")
        user = f"--user default off --user tide on >{words['KV_PASSWORD']} ~* &* +@all"
        valkey = stack.enter_context(redis_server(folder / "valkey", "--port", "PORT", *user.split(" ")))
        bucket = stack.enter_context(moto_server(folder / "s3"))
        tiers = {
            "directory": {"path": str(folder / "shared")},
            "valkey": {"url": valkey.url, "username": "tide", "password_env": "KV_PASSWORD"},
            "objects": {
                "url": f"s3://{bucket.bucket}/kv",
                "endpoint": bucket.endpoint,
                "region": "us-east-1",
                "allow_http": True,
                "timeout_s": 30.0,
                "access_key_id_env": "KV_ACCESS_KEY",
                "secret_access_key_env": "KV_SECRET_KEY",
            },
        }
        servers = {}
        # All at once: a start is one thread after another, and there are two cores.
        for name in (WRITER, *KINDS):
            asked = {kind: options for kind, options in tiers.items() if name in (WRITER, kind)}
            servers[name] = stack.enter_context(running(server(name, asked, folder)))
        for one in servers.values():
            one.wait_until_ready()
        yield Fleet(servers, folder, words)


def server(name: str, tiers: dict[str, dict[str, Any]], folder: Path) -> Server:
    settings = {
        "host_memory": "24MiB",
        # Machines are shared: a slow store is another test's matter.
        "defer_limit_s": 30.0,
        "probe_wait_s": 10.0,
        "tiers": [
            {"class": kind, "name": kind, "deadline_s": 30.0, "options": options}
            for kind, options in tiers.items()
        ],
    }
    transfer = {
        "kv_connector": "KVTideConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(models.llama())]
    command += [*OPTIONS, "--kv-transfer-config", json.dumps(transfer)]
    return Server(command, free_port(), folder / f"{name}.log")


def counted(server: Server, name: str, **labels: str) -> float:
    return metrics_of(server.get("/metrics")).get((f"vllm:kvtide_{name}", frozenset(labels.items())), 0.0)


def wait_for(server: Server, name: str, count: float, **labels: str) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while (found := counted(server, name, **labels)) < count:
        if time.monotonic() > give_up_s:
            raise AssertionError(f"{name} {labels} is {found}, not {count}\n{server.log_tail()}")
        time.sleep(0.1)
    assert found == count, f"{name} {labels} is {found}, which is more than {count}"


@pytest.fixture(scope="module")
def written(fleet: Fleet) -> list[tuple[list[int], tuple[list[int], list[float]]]]:
    """Prompts that one server has computed and every store holds, with its answers after a hit of its own."""
    writer, found = fleet.servers[WRITER], []
    for kind in KINDS:  # what is computed before a store is open is not written to it
        wait_for(writer, "tier_takes_writes", 1.0, tier=kind)
    for prompt in prompts_of(80, len(KINDS)):
        writer.generate(prompt)
        found.append((prompt, writer.generate(prompt)))
    give_up_s = time.monotonic() + WAIT_S
    while time.monotonic() < give_up_s and any(
        counted(writer, "tier_stored_chunks_total", tier=kind) < len(found) * CHUNKS for kind in KINDS
    ):
        for prompt, _ in found:  # what was skipped, or went wrong, is written when it is asked for again
            writer.generate(prompt)
        time.sleep(1.0)
    for kind in KINDS:
        wait_for(writer, "tier_stored_chunks_total", len(found) * CHUNKS, tier=kind)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_request_to_a_second_server_loads_what_the_first_has_computed(
    fleet: Fleet, written: list[tuple[list[int], tuple[list[int], list[float]]]], kind: str
) -> None:
    reader = fleet.servers[kind]
    wait_for(reader, "tier_in_service", 1.0, tier=kind)
    for number, (prompt, hit) in enumerate(written, 1):
        assert reader.generate(prompt) == hit, f"prompt {number} differs"
        # The answer may be here a moment before it is counted.
        wait_for(reader, "tier_hit_chunks_total", number * CHUNKS, tier=kind)
        wait_for(reader, "hit_tokens_total", number * STORED_TOKENS, medium="host")
    assert counted(reader, "tier_probed_chunks_total", tier=kind, answer="there") >= CHUNKS


def test_nobody_has_written_a_secret_anywhere(
    fleet: Fleet, written: list[tuple[list[int], tuple[list[int], list[float]]]]
) -> None:
    logs = {f"{name}.log" for name in fleet.servers}
    read = set()
    for path in fleet.folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            contents = path.read_bytes()
            read.add(path.name)
            for name, word in fleet.words.items():
                assert word.encode() not in contents, f"{name} stands in {path}"
    assert logs <= read, "the logs were not looked at"
    assert all((fleet.folder / name).stat().st_size for name in logs), "nothing was logged"
    for server in fleet.servers.values():
        told = server.get("/metrics")
        assert "kvtide" in told
        for name, word in fleet.words.items():
            assert word not in told, f"{name} is a metric"
            for process in server.processes():
                command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
                assert word.encode() not in command, f"{name} is an argument of {process.name}"
