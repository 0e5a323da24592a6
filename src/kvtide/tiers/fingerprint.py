"""What shapes the bytes of KV cache beside the tokens, as one name.

Two processes with the same fingerprint may read each other's records; anything else is a miss. Knows named
parts and how they are digested; which parts there are says whoever knows the engine.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtide.errors import ConfigError

PAGE_BYTES = 4096
PAGES_PER_FILE = 256
"""Of each file of weights so many pages are read, spread over all of it: a gigabyte takes milliseconds, and a
model that was trained on has changed in nearly all of them."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Named parts, each as it was found.

    Attributes:
        text: The parts as JSON, in a form of which there is only one: what they were taken from may change.
    """

    text: str

    @classmethod
    def of(cls, parts: Mapping[str, Any]) -> "Fingerprint":
        """Write down parts: what JSON can hold, and of other things what ``str`` says."""
        return cls(json.dumps(dict(parts), sort_keys=True, separators=(",", ":"), default=str))

    @property
    def digest(self) -> bytes:
        """``bytes[32]``: sha256 of the parts, whatever their order."""
        return hashlib.sha256(self.text.encode()).digest()

    def changed(self, before: "Fingerprint") -> list[str]:
        """Name the parts in which this differs from another one."""
        mine, other = json.loads(self.text), json.loads(before.text)
        return [name for name in sorted({*mine, *other}) if mine.get(name) != other.get(name)]


def weights_digest(folder: Path) -> str:
    """Digest the weights in a folder by content: hexadecimal sha256.

    Covers name, size, header and sampled pages of every ``*.safetensors`` file.

    Raises:
        ConfigError: There are none: what cannot be identified must not be kept.
    """
    digest = hashlib.sha256()
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(
            "model",
            str(folder),
            "no *.safetensors files to tell its weights by; tiers below host memory need them",
        )
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_bytes, size)))
            step = max(PAGE_BYTES, size // PAGES_PER_FILE // PAGE_BYTES * PAGE_BYTES)
            for offset in (*range(0, size, step), max(0, size - PAGE_BYTES)):
                file.seek(offset)
                digest.update(file.read(PAGE_BYTES))
    return digest.hexdigest()
