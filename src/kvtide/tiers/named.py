"""Tiers that settings name by the path of a class: ``package.module.Class``.

Knows how such a name becomes a tier; does not know any tier.
"""

import importlib

from kvtide.errors import ConfigError
from kvtide.tiers.base import Tier, TierPlace


def tier_named(path: str, place: TierPlace) -> Tier:
    """Build the tier that a path names; it is not opened.

    Raises:
        ConfigError: There is no such class, or its options will not do.
    """
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        raise ConfigError("tiers", path, "name a class by its path: package.module.Class")
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except ImportError as error:
        raise ConfigError("tiers", path, f"cannot be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Tier)):
        raise ConfigError("tiers", path, "is not a class of tiers: derive it from kvtide.tiers.base.Tier")
    return found.build(place)
