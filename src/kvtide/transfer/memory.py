"""How much memory may be used here.

Knows ``/proc/meminfo`` and the memory controllers of cgroup v1 and v2. Does not know torch, the pool or
any setting but the one it refuses by name: whoever is about to take memory asks here first.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvtide.errors import ConfigError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Binding(Enum):
    """Which limit is the tightest."""

    CONTAINER = "container limit (cgroup)"
    MACHINE = "machine"


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What is free, and of what.

    Attributes:
        bytes: May still be taken now, file cache that would give way included.
        total_bytes: The limit itself: the container's, or the machine's memory.
        binding: Whose limit it is.
    """

    bytes: int
    total_bytes: int
    binding: Binding

    def __str__(self) -> str:
        """Say it in a sentence: ``7.5 GiB are free of a container limit of 8 GiB (cgroup)``."""
        total = humanised(self.total_bytes)
        of = f"a container limit of {total} (cgroup)"
        if self.binding is Binding.MACHINE:
            of = f"the machine's {total}"
        return f"{humanised(self.bytes)} are free of {of}"


def available_host_bytes(root: Path = Path("/")) -> MemoryLimit:
    """Find the tightest of the machine's free memory and every container limit this process is under.

    Args:
        root: Where ``proc`` and ``sys`` are found; tests give a made-up one.

    Raises:
        OSError: There is no ``/proc/meminfo`` here, so nobody can tell.
    """
    machine = _machine(root)
    return min([machine, *_containers(root)], key=lambda limit: limit.bytes)


def check_budget(budget_bytes: int, reserved_bytes: int, limit: MemoryLimit) -> None:
    """Refuse a budget that cannot become resident.

    Args:
        budget_bytes: ``host_memory``, all ranks together.
        reserved_bytes: What else will be taken from ``limit`` (weights, the engine's own pool).
        limit: From ``available_host_bytes``.

    Raises:
        ConfigError: It does not fit; says what is free, of what, and what would fit.
    """
    room_bytes = limit.bytes - reserved_bytes
    if budget_bytes <= room_bytes:
        return
    reserved = f", {humanised(reserved_bytes)} of it spoken for" if reserved_bytes else ""
    # Without a space, so that it can be pasted into a shell.
    most = humanised(max(room_bytes, 0)).replace(" ", "")
    advice = f"give at most {most}" if room_bytes > 0 else "free some memory or raise the limit first"
    raise ConfigError("host_memory", humanised(budget_bytes), f"does not fit: {limit}{reserved}; {advice}")


def humanised(size_bytes: int) -> str:
    """Write a size for people, never larger than it is: ``7.5 GiB``. Two decimals at most."""
    power = 0
    while power + 1 < len(_UNITS) and size_bytes >= 1 << 10 * (power + 1):
        power += 1
    # Whole-number arithmetic: rounding up would suggest a budget that is then refused.
    whole, hundredths = divmod(size_bytes * 100 >> 10 * power, 100)
    return f"{whole}.{hundredths:02d}".rstrip("0").rstrip(".") + f" {_UNITS[power]}"


def _machine(root: Path) -> MemoryLimit:
    fields = dict(line.partition(":")[::2] for line in (root / "proc/meminfo").read_text().splitlines())
    free_kib, total_kib = (int(fields[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    return MemoryLimit(free_kib << 10, total_kib << 10, Binding.MACHINE)


def _containers(root: Path) -> list[MemoryLimit]:
    """List the limits on the way from this process's cgroup up to the root, in both versions."""
    membership = root / "proc/self/cgroup"
    limits: list[MemoryLimit] = []
    if not membership.exists():
        return limits
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            # Where both versions are mounted, v2 lies beside v1 and usually has no memory controller.
            for mount in (root / "sys/fs/cgroup/unified", root / "sys/fs/cgroup"):
                limits += filter(None, map(_limit_v2, _upwards(mount, path)))
        elif "memory" in controllers.split(","):
            limits += filter(None, map(_limit_v1, _upwards(root / "sys/fs/cgroup/memory", path)))
    return limits


def _upwards(mount: Path, path: str) -> list[Path]:
    """Directories from ``path`` up to ``mount``.

    A container often sees the path as the host names it, with its own cgroup mounted as the root: then
    only ``mount`` exists, and that is the right one. A path that leads out of the namespace says the same.
    """
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        parts = []
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _limit_v2(directory: Path) -> MemoryLimit | None:
    # Above memory.high a process is not killed but slowed to a crawl, which a server cannot use either.
    limits = [_number(directory / name) for name in ("memory.max", "memory.high")]
    bounded = [limit for limit in limits if limit is not None]
    used = _number(directory / "memory.current")
    if not bounded or used is None:
        return None
    return _limit(min(bounded), used, _cache_bytes(directory, "inactive_file", "active_file"))


def _limit_v1(directory: Path) -> MemoryLimit | None:
    # "Without limit" is a number near 2**63 here; it never is the tightest.
    limit = _number(directory / "memory.limit_in_bytes")
    used = _number(directory / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    return _limit(limit, used, _cache_bytes(directory, "total_inactive_file", "total_active_file"))


def _limit(limit_bytes: int, used_bytes: int, cache_bytes: int) -> MemoryLimit:
    held_bytes = max(used_bytes - cache_bytes, 0)
    return MemoryLimit(max(limit_bytes - held_bytes, 0), limit_bytes, Binding.CONTAINER)


def _cache_bytes(directory: Path, *names: str) -> int:
    """Bytes of file cache: counted as used, given up as soon as somebody needs them."""
    stat = directory / "memory.stat"
    if not stat.exists():
        return 0
    fields = dict(line.split() for line in stat.read_text().splitlines())
    return sum(int(fields.get(name, 0)) for name in names)


def _number(file: Path) -> int | None:
    """Read one number; None without a limit ("max") or without the file."""
    if not file.exists():
        return None
    text = file.read_text().strip()
    return None if text == "max" else int(text)
