"""What is asked of the three servers, in which order.

Knows users, turns and servers. Does not judge: it hands out what was answered and what the servers counted.

First one request at a time, round-robin over the users, so that each pushes the others out of a small pool;
the three servers are asked alternately, never at the same time, and whichever is not asked is paused. Then
all users at once, one server after another.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from kvtide.demo import scrape
from kvtide.demo.ask import Client, Reply
from kvtide.demo.conversation import Conversation, Encode, conversations, question_of, warm_up_prompts
from kvtide.demo.display import Display
from kvtide.demo.servers import Server

KVTIDE, RECOMPUTE, REFERENCE = "kvtide", "recompute", "reference"

WARM_UP_PROMPTS = 4
WARM_UP_TOKENS = 8
# The recompute server is there for its time to first token: it is asked for less, and not for first turns,
# which are computed everywhere.
RECOMPUTE_TOKENS = 8
# Between an answer and the pause of its server: what is left to do after an answer, such as the last stores,
# is done in nobody's time, as it would be with a user who reads before asking again.
SETTLE_S = 0.03


@dataclass(frozen=True, slots=True)
class Script:
    """How much is asked.

    Attributes:
        user_count: Users, each with a conversation.
        turn_count: Turns of each user, one request at a time.
        concurrent_turn_count: Turns of each user after that, all users at once.
        new_tokens: Tokens generated per turn.
    """

    user_count: int
    turn_count: int
    concurrent_turn_count: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """One prompt of the first phase and what each server made of it.

    Attributes:
        replies: By server name; ``RECOMPUTE`` is missing in first turns.
        loaded_tokens: Prompt tokens that kvtide's server brought back for it, by its own counter.
    """

    user: int
    turn: int
    question: str
    replies: Mapping[str, Reply]
    loaded_tokens: int


@dataclass(frozen=True, slots=True)
class Rush:
    """All users at once on one server.

    Attributes:
        wall_s: From the first request sent to the last token received.
    """

    replies: tuple[Reply, ...]
    wall_s: float


@dataclass(frozen=True, slots=True)
class Asked:
    """Everything that was asked and counted.

    Attributes:
        rushes: By server name, in the order in which they were asked.
        last: kvtide's server's counters at the end.
        used_bytes: The most host memory that any reading showed in use; ``None`` when none was shown.
        resident_bytes: By server name, memory of its processes at the end, as the system counts it.
    """

    exchanges: tuple[Exchange, ...]
    rushes: Mapping[str, Rush]
    last: scrape.Scrape
    used_bytes: int | None
    resident_bytes: Mapping[str, int | None]


class Counters:
    """kvtide's server's counters, read between requests."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.used_bytes: int | None = None
        self.last = self.read()

    def read(self) -> scrape.Scrape:
        """Read them now and remember the most memory seen in use."""
        with self._server.awake():
            self.last = scrape.read(self._server.get("/metrics"))
        if self.last.pool_used_bytes is not None:
            self.used_bytes = max(self.used_bytes or 0, self.last.pool_used_bytes)
        return self.last

    def loaded_tokens_since_last(self) -> int:
        """Prompt tokens brought back since they were last read."""
        before = self.last.loaded_tokens
        now = self.read().loaded_tokens
        # Without any connector nothing is loaded, and nothing counts it.
        return (now or 0) - (before or 0)


async def ask_all(servers: Mapping[str, Server], script: Script, encode: Encode, display: Display) -> Asked:
    """Warm up, then both phases.

    Raises:
        DemoError: A server failed a request.
    """
    users = conversations(encode, script.user_count)
    async with AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(Client(server)) for name, server in servers.items()}
        for server in servers.values():
            server.pause()
        await warm_up(clients, encode, display)
        counters = Counters(servers[KVTIDE])
        exchanges = await _one_at_a_time(clients, users, script, counters, display)
        rushes: dict[str, Rush] = {}
        display.stage("all users at once", len(clients))
        for name, client in clients.items():
            display.now(f"{name}: {script.user_count} users")
            with client.server.awake():
                rushes[name] = await _rush(client, users, script)
            counters.read()
            display.step()
        resident_bytes = {name: server.resident_bytes() for name, server in servers.items()}
        return Asked(tuple(exchanges), rushes, counters.last, counters.used_bytes, resident_bytes)


async def warm_up(clients: Mapping[str, Client], encode: Encode, display: Display) -> None:
    """Ask each server a few prompts that are nobody's, one of them twice."""
    prompts = warm_up_prompts(encode, WARM_UP_PROMPTS)
    # The first one again: by now it has left a small pool, so that a load is warmed up as well.
    prompts.append(prompts[0])
    display.stage("warming up", len(clients) * len(prompts))
    for prompt in prompts:
        for name, client in clients.items():
            display.now(name)
            await ask_alone(client, prompt, WARM_UP_TOKENS)
            display.step()


async def _one_at_a_time(
    clients: Mapping[str, Client],
    users: Sequence[Conversation],
    script: Script,
    counters: Counters,
    display: Display,
) -> list[Exchange]:
    exchanges: list[Exchange] = []
    display.stage("one request at a time", script.turn_count * len(users))
    for turn in range(script.turn_count):
        for user, conversation in enumerate(users):
            question = question_of(turn, user)
            prompt = conversation.prompt(question)
            replies: dict[str, Reply] = {}
            for name in order_of(list(clients), user + turn):
                if name == RECOMPUTE and turn == 0:
                    continue
                display.now(f"turn {turn + 1}, user {user + 1}: {name}")
                new_tokens = RECOMPUTE_TOKENS if name == RECOMPUTE else script.new_tokens
                replies[name] = await ask_alone(clients[name], prompt, new_tokens)
            loaded_tokens = counters.loaded_tokens_since_last()
            exchanges.append(Exchange(user, turn, question, replies, loaded_tokens))
            # What kvtide's server really said goes on being the history, for all three.
            conversation.answered(prompt, list(replies[KVTIDE].token_ids))
            display.step()
    return exchanges


async def ask_alone(client: Client, prompt: list[int], new_tokens: int, settle_s: float = SETTLE_S) -> Reply:
    """Ask one server while the others are paused, and pause it again ``settle_s`` after the answer."""
    with client.server.awake():
        reply = await client.ask(prompt, new_tokens)
        await asyncio.sleep(settle_s)
    return reply


def order_of(names: list[str], offset: int) -> list[str]:
    """Whose turn it is first changes, so that no server is always the one after a pause."""
    start = offset % len(names)
    return names[start:] + names[:start]


async def _rush(client: Client, users: Sequence[Conversation], script: Script) -> Rush:
    async def talk(user: int, conversation: Conversation) -> list[Reply]:
        replies: list[Reply] = []
        for turn in range(script.turn_count, script.turn_count + script.concurrent_turn_count):
            prompt = conversation.prompt(question_of(turn, user))
            replies.append(await client.ask(prompt, script.new_tokens))
            conversation.answered(prompt, list(replies[-1].token_ids))
        return replies

    started_s = time.perf_counter()
    said = await asyncio.gather(*(talk(user, conversation.fork()) for user, conversation in enumerate(users)))
    wall_s = time.perf_counter() - started_s
    return Rush(tuple(reply for replies in said for reply in replies), wall_s)
