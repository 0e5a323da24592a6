"""``kvtide demo --restart``: whether a server that was killed and started again is still warm.

Knows the order of things: the conversation is had, kvtide's server is killed with SIGKILL and started again
on the same folder, and each user's last prompt is asked again. Time is given to the new server only as a user
would give it: until it says that it is healthy, and a few prompts that are nobody's. Does not judge.
"""

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from kvtide.demo import restart_picture, restart_report, scrape, surroundings
from kvtide.demo.ask import Client, Reply
from kvtide.demo.conversation import Encode, conversations, question_of
from kvtide.demo.display import Display
from kvtide.demo.model import ensure_model
from kvtide.demo.phases import (
    KVTIDE,
    RECOMPUTE,
    RECOMPUTE_TOKENS,
    REFERENCE,
    Exchange,
    Script,
    ask_alone,
    order_of,
    warm_up,
)
from kvtide.demo.report import summary, write_json
from kvtide.demo.run import (
    HOST_MEMORY,
    NEW_TOKENS,
    Options,
    connector_name,
    fitting,
    plans_of,
    result_console,
    tokenizer,
)
from kvtide.demo.servers import Plan, Server, Servers
from kvtide.demo.table import show_sections

TURNS = 2
DISK_LIMIT_GIB = 2
DISK_FOLDER = "disk"
# What is written on after an answer is under way for a moment; a paused server's calls of the disk would look
# as if the disk had not answered for as long as the pause.
SETTLE_S = 0.25
GONE_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class LastPrompt:
    """What a user asked last before the server was killed."""

    user: int
    turn: int
    question: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Restarted:
    """What was asked and seen.

    Attributes:
        exchanges: The last prompts, asked again after the restart.
        restart_s: From starting the server anew to its saying that it is healthy.
        disk_bytes: What the folder took on disk when the server had been killed; None without a folder.
        disk_chunks: Chunks that the new server brought back from disk for these prompts, by its own count;
            None when nothing counts it.
    """

    exchanges: tuple[Exchange, ...]
    restart_s: float
    disk_bytes: int | None
    disk_chunks: int | None


def connector_of(out: Path) -> str:
    """Write the setting of kvtide's server, as JSON."""
    settings = {
        "host_memory": HOST_MEMORY,
        "disk": str((out / DISK_FOLDER).resolve()),
        "disk_limit": f"{DISK_LIMIT_GIB}GiB",
    }
    connector = {"kv_connector": "KVTideConnector", "kv_role": "kv_both"}
    return json.dumps(connector | {"kv_connector_extra_config": settings})


def run(options: Options) -> bool:
    """Do everything, leave the files under ``options.out``, and say whether every bar was met.

    Raises:
        DemoError: It could not be done.
    """
    connector = connector_name(options.kv_transfer_config)
    machine = surroundings.machine()
    with Display() as display:
        started_s = time.monotonic()
        display.stage("model", 1)
        model = ensure_model(options.models, display.now)
        ready_s = time.monotonic()
        encode, _ = tokenizer(model)
        script = fitting(Script(options.user_count, options.turn_count, 0, NEW_TOKENS), encode)
        plans = plans_of(script, options.kv_transfer_config)
        # What an earlier run has left would be a warm start that nobody has earned.
        shutil.rmtree(options.out / DISK_FOLDER, ignore_errors=True)
        restarted = _restarted(options.out, script, plans, model, encode, display)
        display.stage("report", 1)
        found = restart_report.RestartReport(
            script=script,
            plans=plans,
            connector=connector,
            exchanges=restarted.exchanges,
            restart_s=restarted.restart_s,
            disk_bytes_used=restarted.disk_bytes,
            disk_chunks=restarted.disk_chunks,
            disk_bytes_limit=DISK_LIMIT_GIB << 30,
            versions=surroundings.versions(),
            machine=machine,
            setup_s=ready_s - started_s,
            wall_s=0.0,
        )
        restart_picture.write_picture(found, options.out / "report-restart.png")
        found = replace(found, wall_s=time.monotonic() - ready_s)
        fields = restart_report.as_json(found)
        write_json(fields, options.out / "report-restart.json")
    if options.as_json:
        print(json.dumps(summary(fields), indent=1, ensure_ascii=False))
    else:
        console = result_console()
        show_sections(restart_report.headline(found), restart_report.sections(found), console)
        names = ", ".join(f"{options.out}/report-restart.{kind}" for kind in ("json", "png"))
        console.print(f"\n{names}", highlight=False)
    return found.passed


def _restarted(
    out: Path, script: Script, plans: Sequence[Plan], model: Path, encode: Encode, display: Display
) -> Restarted:
    again_logs = out / "restarted"
    again_logs.mkdir(parents=True, exist_ok=True)

    def on_ready(name: str) -> None:
        display.now(f"{name} is ready")
        display.step()

    display.stage("starting three servers", len(plans))
    with Servers(plans, model, out, on_ready) as servers:
        last_prompts = asyncio.run(_converse(servers, script, encode, display))
        display.stage("killed and started again", 1)
        _kill(servers[KVTIDE])
        disk_bytes = bytes_on_disk(out / DISK_FOLDER)
        started_s = time.monotonic()
        plan = next(plan for plan in plans if plan.name == KVTIDE)
        with Servers([plan], model, again_logs, on_ready) as again:
            restart_s = time.monotonic() - started_s
            now = {**servers, **again}
            exchanges, disk_chunks = asyncio.run(_ask_again(now, last_prompts, script, encode, display))
            display.stage("ending the servers", 1)
    return Restarted(tuple(exchanges), restart_s, disk_bytes, disk_chunks)


async def _converse(
    servers: Mapping[str, Server], script: Script, encode: Encode, display: Display
) -> list[LastPrompt]:
    """Have the conversation with kvtide's server and the reference; the third is only warmed up."""
    users = conversations(encode, script.user_count)
    last: dict[int, LastPrompt] = {}
    async with AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(Client(server)) for name, server in servers.items()}
        for server in servers.values():
            server.pause()
        await warm_up(clients, encode, display)
        display.stage("the conversation", script.turn_count * len(users))
        for turn in range(script.turn_count):
            for user, conversation in enumerate(users):
                display.now(f"turn {turn + 1}, user {user + 1}")
                question = question_of(turn, user)
                prompt = conversation.prompt(question)
                reply = await ask_alone(clients[KVTIDE], prompt, script.new_tokens, SETTLE_S)
                await ask_alone(clients[REFERENCE], prompt, script.new_tokens)
                conversation.answered(prompt, list(reply.token_ids))
                last[user] = LastPrompt(user, turn, question, prompt)
                display.step()
    return list(last.values())


async def _ask_again(
    servers: Mapping[str, Server],
    last_prompts: Sequence[LastPrompt],
    script: Script,
    encode: Encode,
    display: Display,
) -> tuple[list[Exchange], int | None]:
    exchanges: list[Exchange] = []
    async with AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(Client(server)) for name, server in servers.items()}
        for server in servers.values():
            server.pause()
        await warm_up({KVTIDE: clients[KVTIDE]}, encode, display)
        warm_chunks = _disk_chunks(servers[KVTIDE])
        display.stage("asked again", len(last_prompts))
        for last in last_prompts:
            before = _loaded_tokens(servers[KVTIDE])
            replies: dict[str, Reply] = {}
            for name in order_of(list(clients), last.user):
                display.now(f"user {last.user + 1}: {name}")
                new_tokens = RECOMPUTE_TOKENS if name == RECOMPUTE else script.new_tokens
                replies[name] = await ask_alone(clients[name], last.token_ids, new_tokens, SETTLE_S)
            loaded_tokens = _loaded_tokens(servers[KVTIDE]) - before
            exchanges.append(Exchange(last.user, last.turn, last.question, replies, loaded_tokens))
            display.step()
        chunks = _disk_chunks(servers[KVTIDE])
        return exchanges, None if chunks is None else chunks - (warm_chunks or 0)


def _loaded_tokens(server: Server) -> int:
    """Prompt tokens that any connector brought, by vLLM's own count: the new server's memory was empty."""
    with server.awake():
        return int(scrape.total(server.get("/metrics"), scrape.VLLM_EXTERNAL_HITS) or 0)


def _disk_chunks(server: Server) -> int | None:
    """Chunks that kvtide has brought back from disk since the server started, by its own count."""
    with server.awake():
        chunks = scrape.kvtide(server.get("/metrics"), "tier_hit_chunks", "disk")
    return None if chunks is None else int(chunks)


def _kill(server: Server) -> None:
    server.signal(signal.SIGKILL)
    server.reap()
    give_up_s = time.monotonic() + GONE_LIMIT_S
    while not server.is_gone() and time.monotonic() < give_up_s:
        time.sleep(0.05)


def bytes_on_disk(folder: Path) -> int | None:
    """Add up what the files of ``folder`` take on disk; None when there is no such folder."""
    if not folder.is_dir():
        return None
    found = 0
    for parent, _, names in os.walk(folder):
        found += sum((Path(parent) / name).lstat().st_blocks * 512 for name in names)
    return found
