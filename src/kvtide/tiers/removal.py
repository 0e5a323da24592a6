"""Records that leave a private disk while no instance uses it.

Removes rows, then what is in the slots, so that an index made anew from these does not bring back what was
removed, and gives the space back to the file system. Touches nothing without the lock of every rank.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtide.errors import ConfigError, TierFullError, TierUnavailableError
from kvtide.tiers.disk_folder import lock_file
from kvtide.tiers.disk_index import DiskIndex
from kvtide.tiers.holes import punched
from kvtide.tiers.rank_folder import INDEX_NAMES, RankFolder, reason
from kvtide.tiers.records import RecordHeader
from kvtide.tiers.slabs import ALIGNMENT, Place, slot_bytes_of
from kvtide.tiers.survey import FINGERPRINTS, DiskFolder, Holding, Holdings, number_of, opened

PLACES_PER_STEP = 1024


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which records are meant: those for which all that is given holds.

    Attributes:
        fingerprint_prefix: Beginning of the fingerprint in hexadecimal, lower case.
        generation: Number.
        written_before_s: Seconds since the epoch.
    """

    fingerprint_prefix: str = ""
    generation: int | None = None
    written_before_s: float | None = None

    def means(self, header: RecordHeader) -> bool:
        """Whether a record is among them."""
        return (
            header.fingerprint.hex().startswith(self.fingerprint_prefix)
            and self.generation in (None, number_of(header.generation))
            and (self.written_before_s is None or header.written_at_s < self.written_before_s)
        )


@dataclass(slots=True)
class Selected:
    """Records that are meant, and what would be left.

    Attributes:
        places: By rank.
        holdings: What they are.
        highest: By rank and bytes of payload, the highest slot of the others.
    """

    places: dict[int, list[Place]] = field(default_factory=dict)
    holdings: Holdings = field(default_factory=dict)
    highest: dict[tuple[int, int], int] = field(default_factory=dict)


def select(folder: DiskFolder, wanted: Wanted, tick: Callable[[int], None]) -> Selected:
    """Find the records that are meant; ``tick`` is told how many were looked at.

    Raises:
        ConfigError: Several fingerprints begin as was given, or none does.
    """
    selected, known = Selected(), set(folder.models)
    for rank, stored in folder.records():
        tick(1)
        header, place = stored.header, stored.place
        if header is not None:
            known.add(header.fingerprint)
        if header is not None and wanted.means(header):
            selected.places.setdefault(rank.rank, []).append(place)
            named = header.fingerprint, header.generation
            selected.holdings.setdefault(named, Holding()).add(rank.rank, place, header)
        else:
            slab = rank.rank, place.payload_bytes
            selected.highest[slab] = max(place.slot, selected.highest.get(slab, 0))
    _refuse_ambiguous(wanted.fingerprint_prefix, known)
    return selected


@contextlib.contextmanager
def held(path: Path) -> Iterator[DiskFolder]:
    """Open a folder and keep instances out meanwhile.

    Raises:
        ConfigError: One is in, names the folder; or it cannot be read.
    """
    with contextlib.ExitStack() as locks:
        for rank in locks.enter_context(opened(path)).ranks:
            try:
                descriptor = rank.open("lock", os.O_RDWR | os.O_CREAT)
                locks.callback(os.close, descriptor)
                lock_file(descriptor)
            except BlockingIOError:
                hint = "an instance uses this folder; stop it first"
                raise ConfigError("PATH", str(rank.path), hint) from None
            except OSError as error:
                raise ConfigError("PATH", str(rank.path), f"cannot be changed: {reason(error)}") from None
        # Anew: what was seen before the lock may have changed.
        yield locks.enter_context(opened(path))


def forget(rank: RankFolder, places: Sequence[Place], tick: Callable[[int], None]) -> None:
    """Remove records, so that neither the index nor a slot names them.

    Args:
        rank: Whose lock is held.
        places: Of the records.
        tick: Told how many have gone since it was last told.

    Raises:
        TierError: The index cannot be changed.
        OSError: A slab cannot be.
    """
    index = _index_of(rank)
    try:
        for first in range(0, len(places), PLACES_PER_STEP):
            step = places[first : first + PLACES_PER_STEP]
            if index is not None:
                try:
                    index.remove(step)
                except TierFullError:  # the slots make room for it
                    _empty(rank, step)
                    index.remove(step)
            _empty(rank, step)
            tick(len(step))
    finally:
        if index is not None:
            index.close()


def trim(rank: RankFolder, highest: Mapping[tuple[int, int], int]) -> None:
    """Give slots at the end of slabs back to the file system.

    Args:
        rank: Whose lock is held.
        highest: The highest slot in use, by rank and bytes of payload; a slab that has none goes.

    Raises:
        OSError: A slab cannot be changed.
    """
    for payload_bytes, slab in rank.slabs.items():
        name, slots = f"slab-{payload_bytes}", highest.get((rank.rank, payload_bytes), -1) + 1
        if not slots:
            os.unlink(name, dir_fd=rank.descriptor)
        elif slots < slab.slot_count:
            descriptor = rank.open(name, os.O_RDWR)
            try:
                os.ftruncate(descriptor, slots * slab.slot_bytes)
            finally:
                os.close(descriptor)


def clear_everything(folder: DiskFolder) -> None:
    """Remove every slab, index and note; what is not kvtide's stays.

    Raises:
        OSError: Something cannot be removed.
    """
    for rank in folder.ranks:
        rank.close_index()
        for payload_bytes in rank.slabs:
            os.unlink(f"slab-{payload_bytes}", dir_fd=rank.descriptor)
        # The index last, and not before that is on the disk: it says which generations are over.
        os.fsync(rank.descriptor)
        drop_index(rank)
    forget_model(folder, "")


def forget_model(folder: DiskFolder, fingerprint_prefix: str) -> None:
    """Remove what is known of fingerprints that begin so.

    Raises:
        OSError: It cannot be removed.
    """
    for fingerprint in folder.models:
        if fingerprint.hex().startswith(fingerprint_prefix):
            (folder.path / FINGERPRINTS / f"{fingerprint.hex()}.json").unlink(missing_ok=True)


def drop_index(rank: RankFolder) -> None:
    """Remove an index; the next to open the folder makes it anew from the records.

    Raises:
        OSError: It cannot be removed.
    """
    rank.close_index()
    for name in INDEX_NAMES:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=rank.descriptor)


def _index_of(rank: RankFolder) -> DiskIndex | None:
    """Open the index for writing; None where an instance would make it anew from the slots."""
    rank.close_index()
    if rank.index_trouble is None:
        try:
            return DiskIndex(rank.path)
        except TierUnavailableError as error:
            rank.index_trouble = str(error).removeprefix(f"{rank.path}/")
    return None


def _empty(rank: RankFolder, places: Sequence[Place]) -> None:
    """Turn slots into holes, or, where the file system has none, overwrite their headers."""
    for payload_bytes in {place.payload_bytes for place in places}:
        try:
            descriptor = rank.open(f"slab-{payload_bytes}", os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            end, step = os.fstat(descriptor).st_size, slot_bytes_of(payload_bytes)
            for place in places:
                offset = place.slot * step
                if place.payload_bytes != payload_bytes or not 0 <= offset < end:
                    continue
                if not punched(descriptor, offset, step):
                    os.pwrite(descriptor, bytes(ALIGNMENT), offset)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)


def _refuse_ambiguous(prefix: str, known: Iterable[bytes]) -> None:
    if not prefix:
        return
    names = sorted(fingerprint.hex() for fingerprint in known)
    meant = [name for name in names if name.startswith(prefix)]
    if len(meant) == 1:
        return
    shown = ", ".join(name[:12] for name in (meant or names)[:8]) or "none"
    hint = f"several begin so: {shown}; give more digits" if meant else f"none begins so; there are: {shown}"
    raise ConfigError("--fingerprint", prefix, hint)
