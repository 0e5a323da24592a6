"""Which server has a key, and how questions about many keys reach those that have them.

Keys are grouped by node, the nodes asked in turn, each with its share of the time that is left: one that is
dead or frozen costs its share once, and then nothing while it is left out. Answers that say that a key has
moved are followed once. Knows nodes, slots and refusals; does not know what is asked.
"""

import binascii
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvtide.errors import NodeUnavailableError, TierError, TierUnavailableError
from kvtide.tiers.valkey_nodes import Node
from kvtide.tiers.valkey_options import Access, Address
from kvtide.tiers.valkey_wire import Answer, BrokenWireError, Deadline, Refusal, Wire, command

SLOT_COUNT = 16384

REFRESH_REST_S = 5.0
"""After which it is asked again who has what, while a node is out: a replica may have taken its place."""

T = TypeVar("T")
Talk = Callable[[Wire, Sequence[int], MutableSequence[T | Refusal | None], Deadline], None]
"""Asks one node about some of the keys, by index, and puts the answers down in the order of these indexes.
None stays where it was not asked."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Where some keys are asked for.

    Attributes:
        node: That is asked.
        indexes: Of the keys.
        asking: The node does not have the slot yet, and answers when it is told that we know.
    """

    node: Node
    indexes: Sequence[int]
    asking: bool = False


class Routes(ABC):
    """The way to one server, or to the nodes of a cluster."""

    @abstractmethod
    def open(self, deadline: Deadline) -> None:
        """Find out what there is.

        Raises:
            TierUnavailableError: It cannot be reached, or is not what the settings say.
        """

    @abstractmethod
    def nodes(self) -> list[Node]:
        """List the servers that records lie on."""

    @abstractmethod
    def close(self) -> None:
        """End all connections, once nobody uses them."""

    @abstractmethod
    def stops(self, keys: Sequence[bytes], indexes: Sequence[int], deadline: Deadline) -> list[Stop]:
        """Say where to ask for some of ``keys``; those that nobody has are left out.

        Raises:
            TierUnavailableError: That is not known.
        """

    @abstractmethod
    def next_stops(
        self, refusals: dict[int, Refusal], keys: Sequence[bytes], deadline: Deadline
    ) -> list[Stop]:
        """Say where to ask instead, for keys that are not where they were asked for.

        Raises:
            TierUnavailableError: That is not known.
        """

    def error(self, reason: str) -> TierUnavailableError:
        """Make the error of a key whose node did not answer."""
        return TierUnavailableError(reason)

    def ask(self, keys: Sequence[bytes], talk: Talk[T], deadline: Deadline) -> list[T | TierError]:
        """Ask about each key where it lies.

        Args:
            keys: Names of records.
            talk: With one node.
            deadline: For all of it.

        Returns:
            For each key the answer, or what was in its way.
        """
        answers: list[T | TierError | None] = [None] * len(keys)
        moved: dict[int, Refusal] = {}
        try:
            unasked = self._visit(
                self.stops(keys, range(len(keys)), deadline), talk, answers, moved, deadline
            )
            if unasked or moved:
                again = self.stops(keys, unasked, deadline) if unasked else []
                if moved:
                    again += self.next_stops(dict(moved), keys, deadline)
                moved.clear()
                self._visit(again, talk, answers, moved, deadline)
        except TierUnavailableError as error:
            return [error if answer is None else answer for answer in answers]
        nobody = self.error("nobody has this part of the cluster, or it is moving")
        return [nobody if answer is None else answer for answer in answers]

    def _visit(
        self,
        stops: Sequence[Stop],
        talk: Talk[T],
        answers: MutableSequence[T | TierError | None],
        moved: dict[int, Refusal],
        deadline: Deadline,
    ) -> list[int]:
        """Ask nodes in turn; what was not asked, since a connection was spent, is returned."""
        unasked: list[int] = []
        for position, stop in enumerate(stops):
            said: list[T | Refusal | None] = [None] * len(stop.indexes)
            share = deadline.share(len(stops) - position)
            failed: TierError | None = None
            try:
                with stop.node.wire(share) as wire:
                    if stop.asking:
                        wire.send([command(b"ASKING")], share)
                        wire.answer(share)
                    talk(wire, stop.indexes, said, share)
            except TierUnavailableError as error:
                failed = self.error(str(error))
            for index, answer in zip(stop.indexes, said, strict=True):
                if isinstance(answer, Refusal):
                    if self.is_elsewhere(answer):
                        moved[index] = answer
                    else:
                        answers[index] = stop.node.error_of(answer)
                elif answer is not None or failed is not None:
                    answers[index] = failed if answer is None else answer
                else:
                    unasked.append(index)
        return unasked

    def is_elsewhere(self, refusal: Refusal) -> bool:
        """Whether a refusal says where to ask instead."""
        return False


class OneServer(Routes):
    """A server that has everything.

    Args:
        address: Of it.
        access: How one gets in.
    """

    def __init__(self, address: Address, access: Access) -> None:
        self._node = Node(address, access)

    def open(self, deadline: Deadline) -> None:
        with self._node.wire(deadline, anyway=True) as wire:
            wire.send([command(b"PING")], deadline)
            answer = wire.answer(deadline)
            if answer != "PONG" and not isinstance(answer, Refusal):
                raise BrokenWireError("does not answer as a Valkey or Redis server does")
            wire.send([command(b"INFO", b"cluster")], deadline)
            facts = wire.answer(deadline)
        if isinstance(answer, Refusal) and answer.code != "NOPERM":
            raise self._node.error_of(answer)
        if isinstance(facts, bytes) and b"cluster_enabled:1" in facts:
            raise self._node.error_of(Refusal("MOVED"))

    def nodes(self) -> list[Node]:
        return [self._node]

    def close(self) -> None:
        self._node.close(wait=True)

    def stops(self, keys: Sequence[bytes], indexes: Sequence[int], deadline: Deadline) -> list[Stop]:
        return [Stop(self._node, indexes)]

    def next_stops(
        self, refusals: dict[int, Refusal], keys: Sequence[bytes], deadline: Deadline
    ) -> list[Stop]:
        return []


class Cluster(Routes):
    """Nodes that have a part of the slots each.

    Args:
        address: Of one of them, which is asked for the others.
        access: How one gets in, the same for all.
    """

    def __init__(self, address: Address, access: Access) -> None:
        self._access = access
        self._first = Node(address, access, in_cluster=True)
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._refreshed_s = float("-inf")
        self._nodes: dict[Address, Node] = {}
        self._owners: list[Node | None] = [None] * SLOT_COUNT

    def open(self, deadline: Deadline) -> None:
        self._refresh(deadline, anyway=True)

    def nodes(self) -> list[Node]:
        with self._lock:
            return list(self._nodes.values())

    def close(self) -> None:
        for node in [self._first, *self.nodes()]:
            node.close(wait=True)

    def stops(self, keys: Sequence[bytes], indexes: Sequence[int], deadline: Deadline) -> list[Stop]:
        if any(node.is_out() for node in self.nodes()):
            self._refresh_now_and_then(deadline)
        owners = self._owners
        groups: dict[Node, list[int]] = {}
        for index in indexes:
            owner = owners[slot_of(keys[index])]
            if owner is not None:
                groups.setdefault(owner, []).append(index)
        return [Stop(node, of_node) for node, of_node in groups.items()]

    def next_stops(
        self, refusals: dict[int, Refusal], keys: Sequence[bytes], deadline: Deadline
    ) -> list[Stop]:
        self._refresh(deadline)
        stops = []
        moved = [index for index, refusal in refusals.items() if refusal.code != "ASK"]
        if moved:
            stops = self.stops(keys, moved, deadline)
        with self._lock:
            by_name = {str(node.address): node for node in self._nodes.values()}
        for index, refusal in refusals.items():
            # Nobody is asked who is not known as a node of the cluster: our password goes there.
            node = by_name.get(refusal.text.rpartition(" ")[2])
            if refusal.code == "ASK" and node is not None:
                stops.append(Stop(node, [index], asking=True))
        return stops

    def is_elsewhere(self, refusal: Refusal) -> bool:
        # A former primary that is a replica now says READONLY: whoever took its place is elsewhere.
        return refusal.code in ("MOVED", "ASK", "READONLY")

    def error(self, reason: str) -> TierUnavailableError:
        nodes = self.nodes()
        if nodes and not all(node.is_out() for node in nodes):
            return NodeUnavailableError(reason)
        return TierUnavailableError(reason)

    # -- who has what -------------------------------------------------------------------------------

    def _refresh_now_and_then(self, deadline: Deadline) -> None:
        """While a node is out: ask from time to time, by one thread, and not for long."""
        if time.monotonic() < self._refreshed_s + REFRESH_REST_S:
            return
        try:
            self._refresh(deadline.share(4))
        except TierUnavailableError:
            self._refreshed_s = time.monotonic()

    def _refresh(self, deadline: Deadline, anyway: bool = False) -> None:
        """Ask the nodes one after the other, until one says who has what."""
        asked_s = time.monotonic()
        if not self._refreshing.acquire(timeout=max(0.0, deadline.at_s - asked_s)):
            raise self.error("somebody else is finding out who has what, and that takes long")
        try:
            if self._refreshed_s >= asked_s:
                return  # while we waited
            candidates = sorted([*self.nodes(), self._first], key=Node.is_out)
            trouble = ""
            for position, node in enumerate(candidates):
                try:
                    self._learn(node, deadline.share(len(candidates) - position), anyway)
                except TierUnavailableError as error:
                    trouble = str(error)
                else:
                    self._refreshed_s = time.monotonic()
                    return
            raise self.error(trouble)
        finally:
            self._refreshing.release()

    def _learn(self, node: Node, deadline: Deadline, anyway: bool) -> None:
        with node.wire(deadline, anyway) as wire:
            wire.send([command(b"CLUSTER", b"SLOTS")], deadline)
            answer = wire.answer(deadline)
            ranges = [] if isinstance(answer, Refusal) else slot_ranges(answer, node.address)
        if isinstance(answer, Refusal):
            if answer.code == "ERR":
                raise TierUnavailableError(
                    f"{node.address} is not a node of a cluster: set tiers.options.cluster to false"
                )
            raise node.error_of(answer)
        if not ranges:
            raise TierUnavailableError(f"{node.address}: the cluster has no slots yet")
        known = {each.address: each for each in self.nodes()}
        current: dict[Address, Node] = {}
        owners: list[Node | None] = [None] * SLOT_COUNT
        for start, stop, address in ranges:
            owner = current.get(address) or known.get(address) or Node(address, self._access, in_cluster=True)
            current[address] = owner
            owners[start:stop] = [owner] * (stop - start)
        with self._lock:
            self._nodes, self._owners = current, owners
        for address, former in known.items():
            if address not in current:
                former.close()


def slot_of(key: bytes) -> int:
    """Say in which slot a key is; of one without braces, which would name a part of it."""
    return binascii.crc_hqx(key, 0) % SLOT_COUNT


def slot_ranges(answer: Answer, asked: Address) -> list[tuple[int, int, Address]]:
    """Read what ``CLUSTER SLOTS`` says: ``(start, stop, primary)``.

    Args:
        answer: As it came.
        asked: The node that gave it: it may leave its own host out.

    Raises:
        BrokenWireError: It says something else.
    """
    if not isinstance(answer, list):
        raise BrokenWireError("does not say who has which slots")
    ranges = []
    for entry in answer:
        match entry:
            case [int(first), int(last), [(None | bytes()) as host, int(port), *_], *_] if (
                0 <= first <= last < SLOT_COUNT and 0 < port < 65536
            ):
                name = (host or b"").decode("ascii", "replace")
                ranges.append((first, last + 1, Address(asked.host if name in ("", "?") else name, port)))
            case _:
                raise BrokenWireError("does not say who has which slots")
    return ranges
