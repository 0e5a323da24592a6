"""What servers say of themselves, for people who set them up: kind and version, how full, who is evicted.

Asks, and tries whether a record could be written. Texts of servers are data: what is shown has a form.
"""

import re
from collections import Counter
from collections.abc import MutableSequence, Sequence

from kvtide.errors import TierError, TierUnavailableError
from kvtide.tiers.valkey_nodes import Node
from kvtide.tiers.valkey_routes import Cluster, Routes
from kvtide.tiers.valkey_wire import Answer, BrokenWireError, Deadline, Refusal, Wire, command

TRIAL_S = 10
"""For which a trial of writing lies there."""

VERSION = re.compile(r"[0-9]{1,4}(\.[0-9]{1,6}){0,3}\Z")
POLICY = re.compile(r"[a-z-]{1,32}\Z")
NUMBER = re.compile(r"[0-9]{1,19}\Z")


def facts_of(routes: Routes, prefix: str, deadline: Deadline) -> str:
    """Ask every node how it is, and one whether it takes writes.

    Returns:
        One line: ``Valkey 8.1.4 at host:port, 3 nodes, 12.1 GiB of 64.0 GiB used, maxmemory-policy …``.

    Raises:
        TierUnavailableError: Says what is wrong, and what would do.
    """
    routes.open(deadline)
    nodes = routes.nodes()
    facts = [_facts(node, deadline.share(len(nodes) - at)) for at, node in enumerate(nodes)]
    _try_to_write(routes, f"{prefix}trial".encode(), deadline)
    return line_of(facts, str(nodes[0].address), isinstance(routes, Cluster))


def line_of(facts: Sequence[dict[str, str]], address: str, is_cluster: bool) -> str:
    """Put what nodes say into one line.

    Args:
        facts: Per node, what ``INFO`` says, and nothing where it may not be asked.
        address: Of the first.
        is_cluster: Whether to say how many there are.
    """
    first = facts[0]
    kind = "Valkey" if first.get("server_name") == "valkey" or "valkey_version" in first else "Redis"
    version = first.get("valkey_version") or first.get("redis_version", "")
    said = [f"{kind} {version if VERSION.match(version) else '?'} at {address}"]
    if is_cluster:
        said.append(f"{len(facts)} node{'s' * (len(facts) != 1)}")
    if any(each.get("role") == "slave" for each in facts):
        said.append("a replica that takes no writes")
    used, limit = (sum(_number(each, name) for each in facts) for name in ("used_memory", "maxmemory"))
    if all(_number(each, "maxmemory") for each in facts):
        said.append(f"{_size(used)} of {_size(limit)} used")
    else:
        said.append(f"{_size(used)} used, no maxmemory (set one: it takes all there is)")
    policies = Counter(each.get("maxmemory_policy", "") for each in facts)
    policy = next((one for one in policies if one == "noeviction"), next(iter(policies)))
    if POLICY.match(policy):
        advice = (
            " (set allkeys-lru: else it refuses writes once it is full)" if policy == "noeviction" else ""
        )
        said.append(f"maxmemory-policy {policy}{advice}")
    return ", ".join(said)


def _facts(node: Node, deadline: Deadline) -> dict[str, str]:
    with node.wire(deadline, anyway=True) as wire:
        wire.send([command(b"INFO")], deadline)
        answer = wire.answer(deadline)
    return {} if isinstance(answer, Refusal) else parsed(answer)


def parsed(answer: Answer) -> dict[str, str]:
    """Read what ``INFO`` says."""
    text = answer.decode("ascii", "replace") if isinstance(answer, bytes) else ""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value for name, colon, value in pairs if colon}


def _number(facts: dict[str, str], name: str) -> int:
    text = facts.get(name, "")
    return int(text) if NUMBER.match(text) else 0


def _size(byte_count: int) -> str:
    return f"{byte_count / 2**30:.1f} GiB" if byte_count >= 2**30 else f"{byte_count / 2**20:.1f} MiB"


def _try_to_write(routes: Routes, key: bytes, deadline: Deadline) -> None:
    def talk(
        wire: Wire, indexes: Sequence[int], said: MutableSequence[bool | Refusal | None], share: Deadline
    ) -> None:
        for word in (command(b"SET", key, b"kvtide", b"EX", b"%d" % TRIAL_S), command(b"GET", key)):
            wire.send([word], share)
            answer = wire.answer(share)
            if isinstance(answer, Refusal):
                said[0] = answer
                return
            if answer not in ("OK", b"kvtide"):
                raise BrokenWireError("does not answer as a Valkey or Redis server does")
        said[0] = True

    outcome = routes.ask([key], talk, deadline)[0]
    if isinstance(outcome, TierError):
        raise TierUnavailableError(str(outcome)) from None
