"""The stores of the frozen trials: they answer kvtide's tier, until they do as their kind says."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from frozen import stores
from frozen.stores import SLOW_S, Store

from kvtide.errors import TierError
from kvtide.testing.servers.process import wait_until
from kvtide.testing.tiers import IDENTITY, PAYLOAD_BYTES, name_of
from kvtide.tiers.base import TierPlace
from kvtide.tiers.named import tier_named
from kvtide.tiers.shared import SharedTier

PATIENCE_S, SHORT_S = 20.0, 0.3
RECORDS = 24
"""Enough that each node of a cluster has some."""


@contextmanager
def running(make: Callable[[Path], Store], folder: Path) -> Iterator[tuple[Store, SharedTier]]:
    """A store, and a tier on it as the settings say, with records in it."""
    store = make(folder)
    try:
        (wanted,) = store.settings()["tiers"]
        place = TierPlace(IDENTITY, 0, 0, wanted["options"], instance=os.urandom(8).hex())
        tier = tier_named(wanted["class"], place)
        assert isinstance(tier, SharedTier)
        tier.open()
        try:
            for number in range(RECORDS):
                tier.write(name_of(number), memoryview(bytearray(PAYLOAD_BYTES)), PATIENCE_S)
            assert all(is_read(tier, number) for number in range(RECORDS))
            yield store, tier
        finally:
            store.thaw()
            tier.close()
    finally:
        store.close()


def is_read(tier: SharedTier, number: int, deadline_s: float = PATIENCE_S) -> bool:
    try:
        return tier.read_into(name_of(number).key, memoryview(bytearray(PAYLOAD_BYTES)), deadline_s)
    except TierError:
        return False


@pytest.mark.parametrize("make", [stores.valkey_frozen, stores.directory_frozen, stores.objects_frozen])
def test_what_is_stopped_answers_nothing_until_it_is_let_go_on(
    make: Callable[[Path], Store], tmp_path: Path
) -> None:
    with running(make, tmp_path) as (store, tier):
        store.freeze(os.getpid())
        found: list[bool] = []
        reader = threading.Thread(target=lambda: found.append(is_read(tier, 0, SHORT_S)))
        reader.start()
        reader.join(2 * SHORT_S)
        assert found in ([], [False])
        store.thaw()
        reader.join(PATIENCE_S)
        wait_until(lambda: is_read(tier, 1))  # it may have been left out for a moment


@pytest.mark.parametrize("make", [stores.valkey_slow, stores.objects_slow])
def test_what_is_slow_answers_right_and_late(make: Callable[[Path], Store], tmp_path: Path) -> None:
    with running(make, tmp_path) as (store, tier):
        store.freeze(os.getpid())
        began_s, held_count = time.monotonic(), store.held_count()
        assert is_read(tier, 0)
        assert time.monotonic() - began_s >= SLOW_S
        assert store.held_count() > held_count


@pytest.mark.parametrize("make", [stores.valkey_half, stores.valkey_half_frozen])
def test_of_half_a_cluster_the_other_half_goes_on(make: Callable[[Path], Store], tmp_path: Path) -> None:
    with running(make, tmp_path) as (store, tier):
        store.freeze(os.getpid())
        found = [is_read(tier, number, 1.0) for number in range(RECORDS)]
        assert 0 < sum(found) < RECORDS
        # By now the cluster has noticed, and those that are left have agreed to go on.
        again = [is_read(tier, number, 1.0) for number in range(RECORDS)]
        assert sum(again) > 0
