"""What a day of a walk is like: how copies go, how often something happens, how many requests there are.

Not every day has everything: what is rare beside much else is frequent beside little. Knows names and
numbers; does not know an engine.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtide.jobs import Direction
from kvtide.testing.faulty import KINDS
from kvtide.testing.lane_faults import TROUBLES
from kvtide.testing.virtual_prober import FATES

SORTS = {"mixed": 0.6, "loads wedge": 0.15, "loads fail": 0.1, "stores outlast": 0.15}
"""Sorts of days, and their shares."""

TIGHT = {**SORTS, "loads fail": 0.6}
"""Where a request needs far more room for its prefill than for its load."""

WEATHERS = {"calm": 0.3, "mixed": 0.4, "fails": 0.15, "wedges": 0.15}
"""How tiers below host memory are on a day, and how often."""

NEVER = frozenset({"never begins", "never ends"})


@dataclass(frozen=True, slots=True)
class Day:
    """One day.

    Attributes:
        sort: One of ``SORTS``.
        copies: Weights of kinds of copies, by direction.
        rates: How often, per step, something happens, by name.
        jumps_s: By how much time may jump.
        late_share: Of the answers of ranks.
        fail_share: Of another connector's loads.
        crowd: Requests at a time.
        crowded: Two or three of them fill the device.
        weather: One of ``WEATHERS``.
        calls: Weights of kinds of calls to tiers below host memory.
        questions: Weights of what becomes of questions to those that are shared.
    """

    sort: str
    copies: Mapping[Direction, Mapping[str, float]]
    rates: Mapping[str, float]
    jumps_s: tuple[float, ...] = (0.03, 0.3, 3.0)
    late_share: float = 0.0
    fail_share: float = 0.1
    crowd: int = 6
    crowded: bool = False
    weather: str = "calm"
    calls: Mapping[str, float] = field(default_factory=dict)
    questions: Mapping[str, float] = field(default_factory=dict)


def draw_day(chance: random.Random, tight: bool, rank_count: int) -> Day:
    """Draw a day.

    Args:
        chance: The only source of choice.
        tight: Of an engine with little room whose groups see windows.
        rank_count: Of the engine; a load fails when it fails on any rank.
    """
    shares = TIGHT if tight else SORTS
    sort = chance.choices(list(shares), list(shares.values()))[0]
    weights = _mixed(chance)
    stores: Mapping[str, float] = weights
    loads: Mapping[str, float] = weights
    rates = _rates(chance)
    jumps_s: tuple[float, ...] = (0.03, 0.3, 3.0)
    fail_share = 0.1
    match sort:
        case "loads wedge":
            stores, loads = _mostly_well(chance), {"quick": 1.0, "slow": 0.2, "never ends": 0.06}
            # A load is given up some seconds after its deadline.
            rates |= {"forget running": 0.04, "jump": 0.03}
            jumps_s = (0.3, 3.0, 6.0, 8.0)
        case "loads fail":
            fail_share = chance.choice((0.2, 0.4)) / rank_count
            stores = _mostly_well(chance)
            loads = {"quick": 0.7, "slow": 0.3, "fails unbegun": fail_share, "fails half way": fail_share}
            rates |= {"all again": 0.04, "load together": 0.025}
        case "stores outlast":
            stores = {"instant": 0.5, "quick": 0.5, "outlasts": chance.choice((0.1, 0.4))}
    weather = chance.choices(list(WEATHERS), list(WEATHERS.values()))[0]
    return Day(
        sort,
        {Direction.STORE: stores, Direction.LOAD: loads},
        rates,
        jumps_s,
        chance.choice((0.0, 0.05, 0.3)),
        fail_share,
        chance.choice((3, 6, 10)),
        sort == "loads fail" or chance.random() < 0.15,
        weather,
        _calls(chance, weather),
        _questions(chance),
    )


def _rates(chance: random.Random) -> dict[str, float]:
    return {
        "abort": chance.choice((0.0, 0.02, 0.1)),
        "forget device": chance.choice((0.0, 0.01, 0.05)),
        "reset": chance.choice((0.0, 0.0, 0.003, 0.02)),
        "reset running": chance.choice((0.0, 0.0, 0.003, 0.02)),
        "forget running": chance.choice((0.0, 0.01, 0.05)),
        "pause": chance.choice((0.0, 0.0, 0.0, 0.02)),
        "sleep": chance.choice((0.0, 0.0, 0.0, 0.01)),
        "abort what loads again": chance.choice((0.0, 0.02)),
        "jump": chance.choice((0.0, 0.01, 0.05)),
        "earlier again": chance.choice((0.0, 0.02, 0.06)),
        "restart": chance.choice((0.0, 0.0, 0.005, 0.02)),
        "update early": chance.choice((0.0, 0.3)),
        "neighbours": chance.choice((0.0, 0.02, 0.1)),
        "check device": 0.03,
        "check books": 0.06,
        "check host": 0.01,
    }


def _calls(chance: random.Random, weather: str) -> dict[str, float]:
    """Draw what calls to tiers are like."""
    weights = {"instant": chance.choice((0.0, 1.0)), "quick": 1.0, "slow": chance.choice((0.1, 1.0))}
    match weather:
        case "calm":
            return {"instant": 1.0, "quick": chance.choice((0.0, 1.0))}
        case "mixed":
            rare = {"never returns": 0.02, "is full": 0.03}
            for kind in TROUBLES:
                if kind not in weights:
                    weights[kind] = chance.choice((0.0, 0.3, 1.0)) * rare.get(kind, 0.2)
        case "fails":
            weights |= {"fails": chance.choice((0.5, 5.0)), "fails, and is kept": 0.5, "is full": 0.1}
        case "wedges":
            weights |= {"late": 0.3, "never returns": chance.choice((0.05, 0.3))}
    return weights


def _questions(chance: random.Random) -> dict[str, float]:
    """Draw what becomes of questions: mostly little of interest, or mostly one kind of trouble."""
    weights = {kind: chance.choice((0.0, 0.1, 0.3)) for kind in FATES}
    weights[chance.choice(FATES)] = 2.0
    return weights if chance.random() < 0.7 else {"at once": 1.0, "quick": 1.0}


def _mixed(chance: random.Random) -> dict[str, float]:
    """Draw what copies are like: mostly well, or mostly one kind of trouble."""
    rare = {"never begins": 0.02, "never ends": 0.004, "outlasts": 0.03}
    weights = {kind: chance.choice((0.0, 0.3, 1.0)) * rare.get(kind, 0.15) for kind in KINDS}
    weights["instant"] = chance.choice((0.1, 1.0))
    weights["quick"] = chance.choice((0.3, 1.0))
    if chance.random() < 0.2:
        weights[chance.choice([kind for kind in KINDS if kind not in NEVER])] = 3.0
    return weights


def _mostly_well(chance: random.Random) -> dict[str, float]:
    return {"instant": chance.choice((0.1, 1.0)), "quick": 1.0, "slow": 0.2, "fails half way": 0.05}
