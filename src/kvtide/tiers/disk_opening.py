"""What is found on a private disk when it is opened, and whose it is.

Knows rows of the index and headers in the slabs; keeps nothing open itself and serves nothing.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvtide.errors import TierError, TierUnavailableError
from kvtide.tiers.disk_entries import DiskEntries
from kvtide.tiers.disk_index import FILE_NAME, DiskIndex
from kvtide.tiers.records import (
    RecordHeader,
    RecordIdentity,
    latest,
    served_generation,
    unpack,
)
from kvtide.tiers.slabs import Place, Slabs

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Contents:
    """Slots that are in use, by what they are in use for.

    Attributes:
        owners: Numbers of our fingerprint and shards in the index.
        generation: That is served from now on.
        entries: Ours, by key.
        stale: Ours, of earlier generations.
        spare: Of other fingerprints, the oldest first.
    """

    owners: frozenset[int]
    generation: int
    entries: DiskEntries = field(default_factory=DiskEntries)
    stale: list[Place] = field(default_factory=list)
    spare: list[Place] = field(default_factory=list)


def opened(folder: Path, slabs: Slabs, identity: RecordIdentity) -> tuple[DiskIndex, Contents]:
    """Open the index, and sort out what it names; slots it does not name are free from then on.

    An index that is gone or damaged is made anew from the records.

    Raises:
        TierUnavailableError: The folder cannot be used.
    """
    try:
        if any(slabs.slot_counts().values()) and not (folder / FILE_NAME).exists():
            raise TierUnavailableError(f"{folder}: the index is gone")
        index = DiskIndex(folder)
        try:
            return index, _sorted_out(index, slabs, identity)
        except TierUnavailableError:
            index.close()
            raise
    except TierUnavailableError as error:
        logger.warning("%s; it is made anew from the records", error)
    index = _made_anew(folder, slabs)
    return index, _sorted_out(index, slabs, identity)


def _sorted_out(index: DiskIndex, slabs: Slabs, identity: RecordIdentity) -> Contents:
    owners = frozenset(index.owner_of(identity.fingerprint, shard) for shard in identity.shards)
    generation = index.generation_of(owners)
    found = Contents(owners, served_generation(generation))
    slot_counts, taken, wrong = slabs.slot_counts(), defaultdict[int, list[int]](list), []
    spare: list[tuple[int, Place]] = []
    for place, owner, row_generation, key, written_at_s in index.rows():
        if not 0 <= place.slot < slot_counts.get(place.payload_bytes, 0):
            wrong.append(place)
            continue
        taken[place.payload_bytes].append(place.slot)
        if owner not in owners:
            spare.append((written_at_s, place))
        elif row_generation != found.generation or key in found.entries:
            found.stale.append(place)
        else:
            found.entries[key] = place
    found.spare = [place for _, place in sorted(spare)]
    if found.generation != generation:
        index.set_generation(owners, found.generation)
    if wrong:
        index.remove(wrong)
    slabs.occupy(taken)
    return found


def _made_anew(folder: Path, slabs: Slabs) -> DiskIndex:
    for path in folder.glob(f"{FILE_NAME}*"):
        path.unlink()
    index = DiskIndex(folder)
    generations: dict[int, int] = {}
    found = list(_scanned(slabs))
    index.put_all(found)
    for _, header in found:
        owner = index.owner_of(header.fingerprint, header.shard)
        generations[owner] = latest((generations.get(owner, 0), header.generation))
    for owner, generation in generations.items():
        index.set_generation([owner], generation)
    return index


def _scanned(slabs: Slabs) -> Iterator[tuple[Place, RecordHeader]]:
    """Read the header of every slot."""
    for payload_bytes, slot_count in slabs.slot_counts().items():
        for slot in range(slot_count):
            place = Place(payload_bytes, slot)
            try:
                yield place, unpack(slabs.read_header(place))
            except TierError:
                continue
