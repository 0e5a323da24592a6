#!/usr/bin/env python3
"""Kill whoever writes to the disk tier, at random instants, and look at what is served afterwards.

``make kill-trial KILLS=1000``. Each round a process opens the tier, and writes and discards in several
threads until it gets SIGKILL; the tier is opened again and every key it could have is read. After each
ten kills a loss of power is played: of what was written since the files were made any sectors are
missing, and the index is one of earlier, or torn.

Broken is: a byte that is not what was written, a tier that does not open, and, after a kill, a record
whose write had returned and that is gone. The last line says how often. Ends with 0 when nothing was
broken.
"""

import argparse
import json
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from hashlib import shake_128
from pathlib import Path
from typing import Any

from rich.progress import track

from kvtide.errors import CorruptRecordError, TierFullError
from kvtide.keys import make_offload_key
from kvtide.tiers import slabs
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.records import ChunkName, RecordIdentity, Shard

IDENTITY = RecordIdentity(bytes(range(32)), (Shard(0, 1),))
LIMIT_BYTES = 24 << 20
SIZES_BYTES = (8192, 20_000, 65_536)
KEYS = 400
THREADS = 3
DEADLINE_S = 30.0
POWER_LOSS_EVERY = 10

WRITING, KEPT, GONE = 1, 2, 3
"""What a process said of a key before it died: a write began; it returned; a discard began."""


def payload_of(number: int) -> bytes:
    """What belongs under a key: always the same."""
    return shake_128(number.to_bytes(4, "big")).digest(SIZES_BYTES[number % len(SIZES_BYTES)])


def name_of(number: int) -> ChunkName:
    """A key."""
    return ChunkName(make_offload_key(number.to_bytes(4, "big") * 8, number % 3), None, number)


def churn(tier: DiskTier, said: Any, seed: int, thread: int, turns: int | None = None) -> None:
    """Write and discard keys of one thread's own, and say so beforehand."""
    chance = random.Random(f"{seed} {thread}")
    mine = range(thread, KEYS, THREADS)
    while turns is None or turns > 0:
        turns = None if turns is None else turns - 1
        number = chance.choice(mine)
        if chance.random() < 0.04:
            said[number] = GONE
            tier.discard([name_of(number).key])
            continue
        if said[number] == KEPT:
            continue
        said[number], said[KEYS + thread] = WRITING, 1
        try:
            tier.write(name_of(number), memoryview(payload_of(number)), DEADLINE_S)
            said[number] = KEPT
        except TierFullError:
            said[number] = GONE
            tier.discard([name_of(chance.choice(mine)).key for _ in range(1)])
        said[KEYS + thread] = 0


def victim(folder: Path, said: Any, seed: int) -> None:
    """Write until somebody kills us."""
    tier = DiskTier(folder, IDENTITY, LIMIT_BYTES)
    tier.open()
    for number in range(KEYS):
        # What came through the last kill need not be written again.
        said[number] = KEPT if tier.contains([name_of(number).key], DEADLINE_S)[0] else GONE
    threads = [
        threading.Thread(target=churn, args=(tier, said, seed, thread), daemon=True)
        for thread in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    said[KEYS + THREADS] = 1  # ready to die
    for thread in threads:
        thread.join()


def looked_at(folder: Path, said: Any, lost_is_broken: bool) -> Counter[str]:
    """Open the tier and read every key."""
    found: Counter[str] = Counter()
    try:
        tier = DiskTier(folder, IDENTITY, LIMIT_BYTES)
    except Exception as error:
        print(f"does not open: {error!r}", file=sys.stderr)
        return Counter({"failed opens": 1})
    for number in range(KEYS):
        expected = payload_of(number)
        buffer = bytearray(len(expected))
        try:
            served = tier.read_into(name_of(number).key, memoryview(buffer), DEADLINE_S)
        except CorruptRecordError:
            found["refused"] += 1
            served = False
        if served and bytes(buffer) != expected:
            found["wrong bytes"] += 1
        elif served:
            found["served"] += 1
        elif said is not None and said[number] == KEPT and lost_is_broken:
            found["lost"] += 1
    tier.close()
    return found


def killed(folder: Path, seed: int, chance: random.Random) -> Counter[str]:
    """One round: a process is born, writes, is killed; what is left is looked at."""
    said = mmap.mmap(-1, KEYS + THREADS + 1)
    child = os.fork()
    if not child:
        try:
            victim(folder, said, seed)
        finally:
            os._exit(1)
    ready_s = time.monotonic() + DEADLINE_S
    while not said[KEYS + THREADS] and time.monotonic() < ready_s:
        time.sleep(0.0005)
    time.sleep(chance.expovariate(1 / 0.02))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        return Counter({"ended by themselves": 1})
    found = looked_at(folder, said, lost_is_broken=True)
    found["kills"] += 1
    found["kills during a write"] += any(said[KEYS + thread] for thread in range(THREADS))
    return found


def power_lost(folder: Path, seed: int, chance: random.Random) -> Counter[str]:
    """One round: writes that may or may not have reached the disk, sector by sector."""
    said = bytearray(KEYS + THREADS + 1)
    written: list[tuple[int, int, bytes]] = []
    plain = os.pwritev

    def noted(descriptor: int, buffers: Any, offset: int) -> int:
        written.append((os.fstat(descriptor).st_ino, offset, b"".join(bytes(one) for one in buffers)))
        return plain(descriptor, buffers, offset)

    tier, snapshots = DiskTier(folder, IDENTITY, LIMIT_BYTES), [folder.with_name("before")]
    own = tier._folder
    shutil.copytree(own, snapshots[0])
    slabs.os.pwritev = noted  # type: ignore[assignment]
    try:
        for turn in range(4):
            churn(tier, said, seed + turn, chance.randrange(THREADS), turns=40)
            snapshots.append(folder.with_name(f"snapshot-{turn}"))
            shutil.copytree(own, snapshots[-1])
    finally:
        slabs.os.pwritev = plain
    by_inode = {path.stat().st_ino: path for path in own.glob("slab-*")}
    tier.close()
    _play(own, snapshots, written, by_inode, chance)
    found = looked_at(folder, None, lost_is_broken=False)
    found["power losses"] += 1
    for snapshot in snapshots:
        shutil.rmtree(snapshot)
    return found


def _play(
    own: Path,
    snapshots: list[Path],
    written: list[tuple[int, int, bytes]],
    by_inode: dict[int, Path],
    chance: random.Random,
) -> None:
    """Put the folder into a state in which a loss of power may leave it."""
    for path in by_inode.values():
        before = snapshots[0] / path.name
        content = bytearray(before.read_bytes() if before.exists() else b"")
        content.extend(bytes(path.stat().st_size - len(content)))
        share = chance.choice((0.0, 0.5, 0.95, 1.0))
        for inode, offset, data in written:
            for at in range(0, len(data), 4096) if by_inode.get(inode) == path else ():
                if chance.random() < share:
                    content[offset + at : offset + at + 4096] = data[at : at + 4096]
        path.write_bytes(content)
    source = chance.choice(snapshots)
    for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
        (own / name).unlink(missing_ok=True)
        if (source / name).exists() and chance.random() < 0.9:
            shutil.copyfile(source / name, own / name)
    wal = own / "index.sqlite-wal"
    if wal.exists() and chance.random() < 0.5:
        os.truncate(wal, chance.randrange(wal.stat().st_size + 1))


def main() -> int:
    """Run the trial."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--seed", type=int, default=1, help="the only source of choice")
    parser.add_argument("--json", action="store_true", help="say what was counted as JSON")
    options = parser.parse_args()
    chance, total, folder_seed = random.Random(options.seed), Counter[str](), options.seed * 1_000_003
    with tempfile.TemporaryDirectory(prefix="kvtide-kill-") as place:
        folder = Path(place) / "tier"
        rounds = range(options.kills + options.kills // POWER_LOSS_EVERY)
        for turn in track(rounds, "killing", disable=options.json or not sys.stderr.isatty()):
            if turn % (POWER_LOSS_EVERY + 1) == POWER_LOSS_EVERY:
                total += power_lost(folder, folder_seed + turn, chance)
            else:
                total += killed(folder, folder_seed + turn, chance)
            if chance.random() < 0.02:
                shutil.rmtree(folder)
    broken = total["wrong bytes"] + total["failed opens"] + total["lost"] + total["ended by themselves"]
    if options.json:
        print(json.dumps(total))
    else:
        for name, count in sorted(total.items()):
            print(f"  {name:<24} {count:>8}")
        named = ("kills", "wrong bytes", "failed opens")
        print(", ".join(f"{name} {total[name]}" for name in named))
    return 1 if broken or total["kills during a write"] < 0.9 * total["kills"] else 0


if __name__ == "__main__":
    sys.exit(main())
