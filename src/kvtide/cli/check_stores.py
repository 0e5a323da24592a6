"""The part of ``kvtide check`` that asks tiers: do their options make sense, do the shared ones answer.

Knows how to build a tier that is used for nothing else; does not know any medium.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.config import KVTideConfig, TierSettings
from kvtide.errors import ConfigError, TierError
from kvtide.tiers.base import TierPlace
from kvtide.tiers.named import check_tier, tier_class
from kvtide.tiers.records import RecordIdentity
from kvtide.tiers.shared import SharedTier

DEADLINE_S = 5.0
"""For each store's answer."""


@dataclass(frozen=True, slots=True)
class Store:
    """A shared tier that was asked.

    Attributes:
        name: In metrics and logs.
        answer: What it said of itself, None when it did not answer.
    """

    name: str
    answer: str | None


def ask_stores(config: KVTideConfig) -> tuple[list[Store], list[ConfigError]]:
    """Check the options of every tier, and ask the shared ones whether they are there.

    Returns:
        The shared ones, and what is wrong.
    """
    stores: list[Store] = []
    errors: list[ConfigError] = []
    for tier in config.tiers:
        try:
            check_tier(tier.path, tier.label, tier.limit, tier.options)
        except ConfigError as error:
            errors.append(error)
            continue
        if issubclass(tier_class(tier.path), SharedTier):
            _ask(tier, stores, errors)
    return stores, errors


def _ask(wanted: TierSettings, stores: list[Store], errors: list[ConfigError]) -> None:
    place = TierPlace(RecordIdentity(bytes(32)), 0, 0, wanted.options, "check")
    try:
        tier = tier_class(wanted.path).build(place)
        assert isinstance(tier, SharedTier)
        try:
            tier.open()
            stores.append(Store(wanted.label, tier.ping(DEADLINE_S)))
        finally:
            tier.close()
    except ConfigError as error:
        errors.append(error)
    except TierError as error:
        stores.append(Store(wanted.label, None))
        errors.append(ConfigError("tiers", wanted.label, str(error)))


def as_plain(stores: Sequence[Store]) -> list[dict[str, str | None]]:
    """Put them into plain types for JSON."""
    return [{"name": store.name, "answer": store.answer} for store in stores]
