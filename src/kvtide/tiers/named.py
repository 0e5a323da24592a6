"""Tiers that settings name: one of ours by its short name, others by the path of a class.

Knows how such a name becomes a tier; what one needs beside the core is imported only when it is named.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from kvtide.errors import ConfigError
from kvtide.tiers.base import PrivateTier, Tier, TierPlace

SHORT_NAMES = {
    "directory": "kvtide.tiers.directory.DirectoryTier",
    "valkey": "kvtide.tiers.valkey.ValkeyTier",
    "objects": "kvtide.tiers.objects.ObjectsTier",
    "mooncake": "kvtide.tiers.mooncake.MooncakeTier",
}


def tier_class(path: str) -> type[Tier]:
    """Find the class that a short name or a path names.

    Raises:
        ConfigError: There is none.
    """
    path = SHORT_NAMES.get(path, path)
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        raise ConfigError(
            "tiers", path, f"name {', '.join(SHORT_NAMES)}, or a class by its path: package.module.Class"
        )
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except (ImportError, TypeError, ValueError) as error:  # the latter of names such as "..x"
        raise ConfigError("tiers", path, f"cannot be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Tier)):
        raise ConfigError("tiers", path, "is not a class of tiers: derive it from kvtide.tiers.base.Tier")
    return found


def tier_named(path: str, place: TierPlace) -> Tier:
    """Build the tier that a short name or a path names; it is not opened.

    Raises:
        ConfigError: There is no such class, or its options will not do.
    """
    return tier_class(path).build(place)


def check_tier(path: str, label: str, limit_bytes: int, options: Mapping[str, Any]) -> None:
    """Refuse a tier that cannot be built as it is asked for.

    Raises:
        ConfigError: There is no such class, it needs a limit, or its options will not do.
    """
    kind = tier_class(path)
    if issubclass(kind, PrivateTier) and not limit_bytes:
        raise ConfigError("tiers.limit", limit_bytes, f"say how many bytes {label} may take, such as 64GiB")
    kind.check_options(options)
