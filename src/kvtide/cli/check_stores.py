"""The part of ``kvtide check`` that asks tiers: do their options make sense, do the shared ones answer.

Knows how to build a tier that is used for nothing else; does not know any medium.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvtide.cli.unanswered import UnansweredError, mount_of, within
from kvtide.config import KVTideConfig, TierSettings
from kvtide.errors import ConfigError, TierError
from kvtide.tiers.base import TierPlace
from kvtide.tiers.named import check_tier, tier_class
from kvtide.tiers.records import RecordIdentity
from kvtide.tiers.shared import SharedTier

DEADLINE_S = 5.0
"""For each store's answer."""

LIMIT_S = 15.0
"""For all that is asked of one, whatever it does: a file system that is frozen keeps no deadline."""


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
            store = within(LIMIT_S, partial(_asked, tier))
        except UnansweredError:
            stores.append(Store(tier.label, None))
            errors.append(ConfigError("tiers", tier.label, _unanswered(tier)))
        except ConfigError as error:
            errors.append(error)
        except TierError as error:
            stores.append(Store(tier.label, None))
            errors.append(ConfigError("tiers", tier.label, str(error)))
        else:
            stores += [] if store is None else [store]
    return stores, errors


def _asked(wanted: TierSettings) -> Store | None:
    """Check a tier's options, and ask it whether it is there, if it is one that is shared.

    Raises:
        ConfigError: It will not do.
        TierError: It does not answer.
    """
    check_tier(wanted.path, wanted.label, wanted.limit, wanted.options)
    if not issubclass(tier_class(wanted.path), SharedTier):
        return None
    tier = tier_class(wanted.path).build(TierPlace(RecordIdentity(bytes(32)), 0, 0, wanted.options, "check"))
    assert isinstance(tier, SharedTier)
    try:
        tier.open()
        return Store(wanted.label, tier.ping(DEADLINE_S))
    finally:
        tier.close()


def _unanswered(tier: TierSettings) -> str:
    path = tier.options.get("path")
    where = mount_of(path) if isinstance(path, str) else None
    who = "it" if where is None else where
    return f"{who} has not answered for {LIMIT_S:g} s, and does not say why"


def as_plain(stores: Sequence[Store]) -> list[dict[str, str | None]]:
    """Put them into plain types for JSON."""
    return [{"name": store.name, "answer": store.answer} for store in stores]
