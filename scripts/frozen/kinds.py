"""Which trials there are, by name.

Knows how a name becomes a medium, and what has to be there for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from frozen import stores
from frozen.media import HeldMemory, Medium, Nothing, ThrottledDisk


@dataclass(frozen=True, slots=True)
class Kind:
    """A trial that can be asked for.

    Attributes:
        make: Starts the medium, in a folder of its own.
        asks: What it asks, for people.
        own_network: It has to run where there is nothing but a loopback device.
    """

    make: Callable[[Path], Medium]
    asks: str
    own_network: bool = False


def _disk(folder: Path) -> Medium:
    return HeldMemory(folder) if ThrottledDisk.why_not() else ThrottledDisk(folder)


DISKS = {
    "disk-frozen": Kind(_disk, "a disk whose reads never return; without root, disk-held"),
    "disk-held": Kind(HeldMemory, "memory as a tier whose reads never return"),
}

STORES = {
    "valkey-frozen": Kind(stores.valkey_frozen, "a server that is stopped"),
    "valkey-slow": Kind(stores.valkey_slow, "a server behind a long way"),
    "valkey-half": Kind(stores.valkey_half, "a cluster of which a part is killed"),
    "valkey-half-frozen": Kind(stores.valkey_half_frozen, "a cluster of which a part is stopped"),
    "directory-frozen": Kind(stores.directory_frozen, "a shared file system whose mount is stopped"),
    "objects-frozen": Kind(stores.objects_frozen, "an object store that is stopped"),
    "objects-slow": Kind(stores.objects_slow, "an object store behind a long way"),
    "mooncake-master-killed": Kind(
        stores.mooncake_master_killed, "a store whose master is killed", own_network=True
    ),
}

CONTROLS = {"nothing": Kind(Nothing, "two engines without a tier: the trial's own error")}

KINDS = {**DISKS, **STORES, **CONTROLS}
