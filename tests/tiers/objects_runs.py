"""Prompts, and the runs of small chunks in a bucket that come of them, for tests of the objects tier."""

import hashlib
from collections.abc import Sequence
from typing import Any

import obstore
from obstore.store import MemoryStore

from kvtide.testing.tiers import DEADLINE_S, IDENTITY, payload_of
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.objects import ObjectsTier
from kvtide.tiers.objects_options import options_of
from kvtide.tiers.records import RecordRun

PAYLOAD_BYTES = 512
PACK_BYTES = 16 * PAYLOAD_BYTES
NEW, THERE = Written.NEW, Written.THERE_ALREADY


def prompt(*words: Any) -> tuple[bytes, ...]:
    """Chained hashes: two prompts have a beginning in common as far as their words are the same."""
    hashes, before = [], b""
    for word in words:
        before = hashlib.sha256(before + repr(word).encode()).digest()
        hashes.append(before)
    return tuple(hashes)


def run_of(hashes: Sequence[bytes], start: int, stop: int, lead: bool = True, group: int = 0) -> RecordRun:
    whole = RecordRun(group, 0, tuple(hashes))
    run = whole.between(start, stop)
    return run if lead else RecordRun(group, start, run.hashes, run.parent_hash)


def payload_for(block_hash: bytes) -> bytearray:
    return payload_of(int.from_bytes(block_hash[:3], "big"), PAYLOAD_BYTES)


def write(tier: ObjectsTier, run: RecordRun) -> list[Any]:
    payloads = [memoryview(payload_for(one)) for one in run.hashes]
    return list(tier.write_run(run, payloads, DEADLINE_S))


def read(tier: ObjectsTier, run: RecordRun) -> list[Any]:
    """Outcomes; what came back as read is right."""
    payloads = [bytearray(PAYLOAD_BYTES) for _ in run.hashes]
    outcomes = list(tier.read_run(run, [memoryview(one) for one in payloads], DEADLINE_S))
    for outcome, payload, block_hash in zip(outcomes, payloads, run.hashes, strict=True):
        assert outcome is not True or payload == payload_for(block_hash)
    return outcomes


def tier_over(store: Any, **place: Any) -> ObjectsTier:
    options = options_of({"url": "memory://", "pack_bytes": PACK_BYTES})
    tier = ObjectsTier(TierPlace(IDENTITY, 0, 0, **place), options, store)
    tier.open()
    return tier


class Counting:
    """obstore, and what was asked of it."""

    def __init__(self, tier: ObjectsTier) -> None:
        self.calls: list[str] = []
        tier._bucket._obstore = self

    def __getattr__(self, name: str) -> Any:
        if name != "exceptions":
            self.calls.append(name)
        return getattr(obstore, name)


def paths(store: MemoryStore) -> list[str]:
    return sorted(one["path"] for one in obstore.list(store).collect())


WORDS = prompt(*range(200))


def damaged(store: MemoryStore, path: str, at: int) -> None:
    piece = bytearray(obstore.get(store, path).bytes())
    piece[at] ^= 16
    obstore.put(store, path, bytes(piece))
