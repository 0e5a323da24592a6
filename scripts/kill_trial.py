#!/usr/bin/env python3
"""Kill whoever writes to the disk tier, at random instants, and look at what is served afterwards.

``make kill-trial KILLS=1000``. Each round a process opens the tier, and in several threads writes and
discards records of several sizes and begins generations until it gets SIGKILL; the tier is opened again
and every key it could have is read. Now and then it is a process of another model. After each ten kills a
loss of power is played: of what was written since the files were made any sectors are missing, and the
index is one of earlier, or torn.

What is written after a reset that is not trusted is of other weights. Broken is: a byte that is not what
belongs under its key, as a record of other weights is served after a restart; a tier that does not open;
after a kill, a record whose write had returned and that is gone, or one of before a reset that is served.
The last line says how often. Ends with 0 when nothing was broken.
"""

import argparse
import contextlib
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
from collections.abc import Sequence
from hashlib import shake_128
from pathlib import Path
from typing import Any

from rich.progress import track

from kvtide.errors import CorruptRecordError, TierFullError
from kvtide.keys import make_offload_key
from kvtide.tiers import slabs
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.records import ChunkName, RecordIdentity

MODELS = (RecordIdentity(bytes(range(32))), RecordIdentity(bytes(range(32, 64))))
"""The disk is one that several models use in turn: what one has written is room for the other."""
LIMIT_BYTES = 24 << 20
SIZES_BYTES = (8192, 20_000, 65_536)
KEYS = 900
THREADS = 3
DEADLINE_S = 30.0
POWER_LOSS_EVERY = 10

WRITING, KEPT, GONE, DOUBTFUL, FORGOTTEN = 1, 2, 3, 4, 5
"""What a process said of a key before it died: a write began; it returned; a discard or a reset began; a
write returned, or began, after a reset that may have brought other weights; a reset has returned."""
READY, IN_DOUBT = KEYS + THREADS, KEYS + THREADS + 1
"""Where a process says that it may be killed, and that what it writes is in doubt."""
MODEL = KEYS + THREADS + 2
"""And which model it is."""
SAID_BYTES = KEYS + THREADS + 3


def payload_of(number: int, model: int, other_weights: bool = False) -> bytes:
    """What belongs under a key of a model: always the same, unless it comes of other weights."""
    seed = number.to_bytes(4, "big") + bytes([model, other_weights])
    return shake_128(seed).digest(SIZES_BYTES[number % len(SIZES_BYTES)])


def name_of(number: int) -> ChunkName:
    """A key."""
    return ChunkName(make_offload_key(number.to_bytes(4, "big") * 8, number % 3), None, number)


def churn(
    tier: DiskTier,
    said: Any,
    seed: int,
    thread: int,
    turns: int | None = None,
    gates: Sequence[threading.Lock] = (),
) -> None:
    """Write and discard keys of one thread's own, and say so beforehand; one of them resets now and then."""
    chance = random.Random(f"{seed} {thread}")
    mine = range(thread, KEYS, THREADS)
    while turns is None or turns > 0:
        turns = None if turns is None else turns - 1
        if thread == 0 and chance.random() < 0.004:
            reset(tier, said, gates, trusted=chance.random() < 0.6)
            continue
        number = chance.choice(mine)
        with gates[thread] if gates else contextlib.nullcontext():
            if chance.random() < 0.04:
                said[number] = GONE
                tier.discard([name_of(number).key])
            elif said[number] not in (KEPT, DOUBTFUL):
                write(tier, said, number, thread, chance.choice(mine))


def write(tier: DiskTier, said: Any, number: int, thread: int, other: int) -> None:
    """Write a key, and discard another one when there is no room."""
    said[number], said[KEYS + thread] = DOUBTFUL if said[IN_DOUBT] else WRITING, 1
    try:
        payload = payload_of(number, said[MODEL], other_weights=bool(said[IN_DOUBT]))
        tier.write(name_of(number), memoryview(payload), DEADLINE_S)
        said[number] = DOUBTFUL if said[IN_DOUBT] else KEPT
    except TierFullError:
        said[number] = said[other] = GONE
        tier.discard([name_of(other).key])
    said[KEYS + thread] = 0


def reset(tier: DiskTier, said: Any, gates: Sequence[threading.Lock], trusted: bool) -> None:
    """Begin a generation while nobody writes: what a key is said to be has to be right."""
    with contextlib.ExitStack() as closed:
        for gate in gates:
            closed.enter_context(gate)
        for number in range(KEYS):
            said[number] = DOUBTFUL if said[number] in (DOUBTFUL, FORGOTTEN) else GONE
        tier.begin_generation(trusted)
        for number in range(KEYS):
            said[number] = FORGOTTEN
        said[IN_DOUBT] |= not trusted


def victim(folder: Path, said: Any, seed: int) -> None:
    """Write until somebody kills us."""
    tier = DiskTier(folder, MODELS[said[MODEL]], LIMIT_BYTES)
    tier.open()
    for number in range(KEYS):
        # What came through the last kill need not be written again.
        said[number] = KEPT if tier.contains([name_of(number).key], DEADLINE_S)[0] else GONE
    gates = [threading.Lock() for _ in range(THREADS)]
    threads = [
        threading.Thread(target=churn, args=(tier, said, seed, thread, None, gates), daemon=True)
        for thread in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    said[READY] = 1
    for thread in threads:
        thread.join()


def looked_at(folder: Path, said: Any, power_lost: bool = False) -> Counter[str]:
    """Open the tier and read every key."""
    found: Counter[str] = Counter()
    try:
        tier = DiskTier(folder, MODELS[said[MODEL]], LIMIT_BYTES)
        tier.open()
    except Exception as error:
        print(f"does not open: {error!r}", file=sys.stderr)
        return Counter({"failed opens": 1})
    for number in range(KEYS):
        expected = payload_of(number, said[MODEL])
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
            found["served after a reset"] += not power_lost and said[number] in (DOUBTFUL, FORGOTTEN)
        elif said[number] == KEPT and not power_lost:
            found["lost"] += 1
    tier.close()
    return found


def killed(folder: Path, seed: int, chance: random.Random) -> Counter[str]:
    """One round: a process is born, writes, is killed; what is left is looked at."""
    said = mmap.mmap(-1, SAID_BYTES)
    said[MODEL] = chance.random() < 0.3
    child = os.fork()
    if not child:
        try:
            victim(folder, said, seed)
        finally:
            os._exit(1)
    ready_s = time.monotonic() + DEADLINE_S
    while not said[READY] and time.monotonic() < ready_s:
        time.sleep(0.0005)
    time.sleep(chance.expovariate(1 / 0.02))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        return Counter({"ended by themselves": 1})
    found = looked_at(folder, said)
    found["kills after a reset"] += FORGOTTEN in said[:KEYS]
    found["kills in doubt"] += said[IN_DOUBT]
    found["kills of another model"] += said[MODEL]
    found["kills"] += 1
    found["kills during a write"] += any(said[KEYS + thread] for thread in range(THREADS))
    return found


def power_lost(folder: Path, seed: int, chance: random.Random) -> Counter[str]:
    """One round: writes that may or may not have reached the disk, sector by sector."""
    said = bytearray(SAID_BYTES)
    said[MODEL] = chance.random() < 0.3
    written: list[tuple[int, int, bytes]] = []
    plain = os.pwritev

    def noted(descriptor: int, buffers: Any, offset: int) -> int:
        written.append((os.fstat(descriptor).st_ino, offset, b"".join(bytes(one) for one in buffers)))
        return plain(descriptor, buffers, offset)

    tier, snapshots = DiskTier(folder, MODELS[said[MODEL]], LIMIT_BYTES), [folder.with_name("before")]
    tier.open()
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
    found = Counter[str]()
    for model in range(len(MODELS)):
        said[MODEL] = model
        found += looked_at(folder, said, power_lost=True)
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
    broken = sum(
        total[name]
        for name in ("wrong bytes", "failed opens", "lost", "served after a reset", "ended by themselves")
    )
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
