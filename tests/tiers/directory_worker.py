"""One of several processes that use a shared folder at once and check every byte that they read.

Run as ``python directory_worker.py FOLDER SEED TURNS [--count N] [--replaces]``: reads, writes, removes and
cleans, prints how often each was done as JSON, and fails when anything went wrong. Imports no more than it
needs: several of them start at once.
"""

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path

from kvtide.keys import make_offload_key
from kvtide.tiers import directory_files
from kvtide.tiers.base import TierPlace
from kvtide.tiers.directory import DirectoryTier
from kvtide.tiers.directory_cleaner import Cleaner
from kvtide.tiers.directory_lease import Lease
from kvtide.tiers.records import ChunkName, RecordIdentity

KEYS = 10
PAYLOAD_BYTES = 3 * 4096 + 17
LIMIT_BYTES = KEYS * PAYLOAD_BYTES // 2
DEADLINE_S = 60.0

NAMES = [ChunkName(make_offload_key(bytes([number]) * 32, 0), None, 0) for number in range(KEYS)]
PAYLOADS = [random.Random(number).randbytes(PAYLOAD_BYTES) for number in range(KEYS)]


def cleaned(folder: str, lots: random.Random) -> str:
    """One round, now and then by somebody who takes the lease from whoever has it."""
    lease = Lease(folder)
    if lots.random() < 0.5:
        lease._take(replace=True)
    if not Cleaner(folder, LIMIT_BYTES, lease).round():
        return "left to others"
    lease.release()
    return "cleaned"


def work(folder: str, lots: random.Random, turns: int) -> Counter[str]:
    tier = DirectoryTier.build(TierPlace(RecordIdentity(bytes(32)), 1, 0, {"path": folder}))
    tier.open()
    done, into = Counter[str](), bytearray(PAYLOAD_BYTES)
    for _ in range(turns):
        number, what = lots.randrange(KEYS), lots.random()
        if what < 0.45:
            found = tier.read_into(NAMES[number].key, memoryview(into), DEADLINE_S)
            assert not found or into == PAYLOADS[number], f"{number} came back wrong"
            done["hit" if found else "miss"] += 1
        elif what < 0.85:
            done[tier.write(NAMES[number], memoryview(PAYLOADS[number]), DEADLINE_S).value] += 1
        elif what < 0.95:
            tier.discard([NAMES[number].key])
        else:
            done[cleaned(folder, lots)] += 1
    tier.close()
    return done


def together(folder: str, count: int) -> None:
    """Wait until so many are here, so that they are at it at once."""
    Path(folder, f"here-{random.SystemRandom().random()}").touch()
    end_s = time.monotonic() + DEADLINE_S
    while len(list(Path(folder).glob("here-*"))) < count:
        assert time.monotonic() < end_s, "the others did not come"
        time.sleep(0.002)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("seed", type=int)
    parser.add_argument("turns", type=int)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--replaces", action="store_true")
    given = parser.parse_args()
    if given.replaces:
        directory_files._rename_with_flags = None
    Path(given.folder).mkdir(exist_ok=True)
    together(given.folder, given.count)
    print(json.dumps(work(given.folder, random.Random(given.seed), given.turns)))


if __name__ == "__main__":
    main()
