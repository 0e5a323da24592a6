"""The process in which kvtide and a store's own client take turns.

In each round an arm puts the same records under names that are new, gets them, and all is removed: a store
never holds more than that. What was got is looked at byte by byte, outside of what is timed. Knows turns and
clocks; what an arm does is in the files beside this one.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.frame.children import Tell
from benchmarks.frame.machine import wait_quiet
from benchmarks.frame.rounds import rounds
from benchmarks.storage.clients import Client
from benchmarks.storage.clock import timed
from benchmarks.storage.ours import IDENTITY, OurLane, names_of
from benchmarks.storage.pages import Pages
from benchmarks.storage.plain import in_turns
from benchmarks.storage.store_names import ARMS, GET, OURS, PUT
from benchmarks.storage.stores import STORES, AbsentError, Store
from benchmarks.storage.vocabulary import size_name
from kvtide.tiers.base import TierPlace
from kvtide.tiers.named import tier_named
from kvtide.transfer.tier_lane import LaneSettings

WAIT_LIMIT_S = 3.0  # for quiet, before each store
CALL_LIMIT_S = 20.0
POLL_S = 0.002  # a hundredth of a sample at most


def measure_store(
    tell: Tell,
    kind: str,
    folder: str,
    thread_count: int,
    record_bytes: Sequence[int],
    byte_count: int,
    count: int,
    gets: int = 1,
) -> list[dict[str, Any]]:
    """Take all samples of one kind of store; leaves nothing in ``folder``.

    Args:
        tell: Is told once before each round.
        kind: One of ``STORES``.
        folder: For the store.
        thread_count: Of kvtide's lane and the yardstick.
        record_bytes: Sizes of records.
        byte_count: Put, and got, by an arm in a round.
        count: Rounds, after one that does not count.
        gets: How often an arm gets it all, in one sample.

    Returns:
        Samples; a single one that says why, where there is no such store.
    """
    place = Path(folder)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    samples: list[dict[str, Any]] = []
    try:
        tell(f"{kind}: starting")
        with STORES[kind](place) as store, Lanes(store, thread_count, byte_count) as lanes:
            wait_quiet(WAIT_LIMIT_S)
            for size in record_bytes:
                pages = Pages(byte_count, size)
                found = _turns(tell, kind, store.client, lanes, pages, thread_count, count, gets)
                common = {"kind": kind, "record_bytes": size, "threads": thread_count}
                samples += [common | sample for sample in found]
    except AbsentError as error:
        return [{"kind": kind, "absent": str(error)}]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return samples


class Lanes:
    """Two servers' lanes before one store: what is read was written by another, as what is shared is."""

    def __init__(self, store: Store, thread_count: int, queue_bytes: int) -> None:
        self._store = store
        # One job is a whole prompt, of which the queue has to take all.
        self._settings = LaneSettings(thread_count, queue_bytes=queue_bytes, deadline_s=CALL_LIMIT_S)
        self._open: list[OurLane] = []

    def __enter__(self) -> "Lanes":
        try:
            self.writer, self.reader = self._lane("writer"), self._lane("reader")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for lane in self._open:
            lane.close()

    def _lane(self, name: str) -> OurLane:
        place = TierPlace(IDENTITY, 0, self._store.limit_bytes, self._store.options, name)
        lane = OurLane(tier_named(self._store.tier_class, place), name, self._settings, POLL_S)
        self._open.append(lane)
        return lane


@dataclass(frozen=True, slots=True)
class Turn:
    """What one arm does in one round; ``fill`` makes sure that what was got lies in the slots."""

    put: Callable[[], object]
    get: Callable[[], object]
    fill: Callable[[], object]


def _turns(
    tell: Tell,
    kind: str,
    client: Client,
    lanes: Lanes,
    pages: Pages,
    thread_count: int,
    count: int,
    gets: int,
) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = []
    pages.fill()
    client.hold(pages)
    for index, order in rounds(ARMS, count + 1):
        tell(f"{kind}, records of {size_name(pages.chunk_bytes)}: round {index} of {count}")
        for arm in order:
            if arm == OURS:
                turn = _our_turn(lanes, pages, index)
            else:
                turn = _plain_turn(client, pages, thread_count, index)
            put = timed(turn.put, len(pages.view))
            client.rest()
            pages.blank()
            got = timed(partial(_repeat, turn.get, gets), gets * len(pages.view))
            turn.fill()
            got["wrong_chunks"] = pages.wrong_chunks()
            client.clear()
            if got["wrong_chunks"]:
                pages.fill()
            if index:  # the first round finds folders, connections and memory that are new
                samples += [
                    {"what": what, "round": index - 1, "arm": arm} | one
                    for what, one in ((PUT, put), (GET, got))
                ]
    client.let_go(pages)
    pages.close()
    return samples


def _repeat(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()


def _our_turn(lanes: Lanes, pages: Pages, index: int) -> Turn:
    # Of another prompt in each round and for each size: a name has one content for ever.
    names = names_of(pages.chunk_count, pages.chunk_bytes + index)
    return Turn(
        lambda: lanes.writer.write(names, pages), lambda: lanes.reader.read(names, pages), lambda: None
    )


def _plain_turn(client: Client, pages: Pages, thread_count: int, index: int) -> Turn:
    keys = [f"plain-{pages.chunk_bytes}-{index}-{at}" for at in range(pages.chunk_count)]
    records = [pages.chunk(at) for at in range(pages.chunk_count)]
    step = client.at_once(pages.chunk_bytes)
    calls = [slice(begin, begin + step) for begin in range(0, pages.chunk_count, step)]

    def each(call: Callable[[Sequence[str], Sequence[memoryview]], None]) -> None:
        in_turns(lambda at: call(keys[calls[at]], records[calls[at]]), len(calls), thread_count)

    return Turn(
        lambda: each(client.put),
        lambda: each(client.get),
        lambda: None if client.gets_into_slots else each(client.fill),
    )
