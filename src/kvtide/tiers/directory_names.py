"""What is called how in a folder that many hosts share, so that everybody knows what is whose.

    path/
    ├── kvtide.folder                    says that this is the folder, and that it is mounted
    ├── kvtide.cleaner                   who removes records, and how full it is
    └── kv1/<fingerprint>/g0/ab/cd/      of model, group and the first two bytes of the hash
        ├── abcd….0of1                   a record: header and payload
        └── .host-pid-random.tmp         one that is being written

Knows names; opens nothing.
"""

import functools
import os
import re
import socket

MARKER = "kvtide.folder"
LEASE = "kvtide.cleaner"

FOLDERS = tuple(
    re.compile(pattern)
    for pattern in (
        r"kv[0-9]{1,4}",
        r"[0-9a-f]{64}(-[0-9a-f]{16})?",
        r"g[0-9]{1,6}",
        r"[0-9a-f]{2}",
        r"[0-9a-f]{2}",
    )
)
"""How folders are called, level by level; in the last one lie records."""

RECORD = re.compile(r"[0-9a-f]{2,64}\.[0-9]{1,5}of[0-9]{1,5}")
TEMPORARY = re.compile(r"\.[A-Za-z0-9-]{1,32}-[0-9]{1,10}-[0-9a-f]{16}\.tmp")


def spread(block_hash: bytes) -> str:
    """Name the two levels of folders in which records of a hash lie: ``ab/cd``."""
    digits = block_hash[:2].hex().ljust(4, "0")
    return f"{digits[:2]}/{digits[2:]}"


def own_token() -> str:
    """Name that nobody else on any host has, or had before: ``host-pid-random``."""
    return f"{_host()}-{os.getpid()}-{os.urandom(8).hex()}"


@functools.cache
def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:32] or "host"


def temporary_in(folder: str) -> str:
    """Name a file in ``folder`` that is about to be written, and that nobody else writes."""
    return f"{folder}/.{own_token()}.tmp"
