"""Chunks on their way into one tier: from the plan until they are ready there, or given up.

Knows what is pending, what waits for what, and the catalog that takes it in; does not know what a place in
the tier is or how it is given back: whoever owns the tier is told.
"""

from collections.abc import Callable, Sequence

import numpy as np

from kvtide.jobs import Ids
from kvtide.keys import ChunkRun
from kvtide.manager.catalog import Catalog, CatalogGroup
from kvtide.manager.pending import PendingStore, PendingStores


class Arrivals:
    """What has been planned for a tier and has not come.

    Args:
        tier: Its index in the catalog.
        catalog: Which chunk is where.
        groups: The KV cache groups.
        on_ready: Told of a store whose chunks can be read now.
        on_free: Told of a store that is given up and whose copy has ended: its places are free.

    Attributes:
        pending: The stores.
    """

    def __init__(
        self,
        tier: int,
        catalog: Catalog,
        groups: Sequence[CatalogGroup],
        on_ready: Callable[[PendingStore], None],
        on_free: Callable[[PendingStore], None],
    ) -> None:
        self._tier = tier
        self._catalog = catalog
        self._groups = tuple(groups)
        self._on_ready = on_ready
        self._on_free = on_free
        self.pending = PendingStores([group.window is not None for group in groups])

    def positions(self, run: ChunkRun) -> tuple[Sequence[bytes], int, int]:
        """See ``ChunkRun.positions``, at the catalog's grain."""
        return run.positions(self._groups[run.group_index].stride)

    def absent(self, run: ChunkRun) -> tuple[int, int, PendingStore | None]:
        """Find the first chunks in a row of a run that are neither there nor on their way.

        Args:
            run: Of a group without a window, from the beginning of the prompt.

        Returns:
            First chunk, one past the last (the same when there are none), the store with the chunk before.
        """
        keys, _, _ = self.positions(run)
        places = self._catalog.slots(self._tier, run.group_index, keys, run.start, run.stop)
        there = np.zeros(len(run) + 1, dtype=bool)
        there[: len(places)] = places >= 0
        start, before = int(there.argmin()), None
        while start < len(run):
            after, store = self.pending.follow(run, run.start + start)
            if store is None:
                break
            there[start : after - run.start] = True
            start, last = int(there.argmin()), after - run.start
            before = store if start == last else None
        behind = there[start:-1]
        stop = start + (int(behind.argmax()) if behind.any() else len(behind))
        # Behind a window, or what was lost, more may be on its way than what follows in a row.
        if len(self.pending) and (
            self._catalog.has_holes or self._groups[run.group_index].window is not None
        ):
            ahead = range(start + 1, stop)
            stop = next((at for at in ahead if self.pending.begins_at(run, run.start + at)), stop)
        return run.start + start, run.start + stop, before

    def complete(self, run: ChunkRun, places: Ids, done_count: int) -> bool:
        """End a store's copy; repeated, it has no effect.

        Args:
            run: As it was entered.
            places: As they were entered.
            done_count: Leading chunks that have come; the others and what is pending on them are given up.

        Returns:
            Whether anything has changed for readers.
        """
        store = self.pending.get(places, run)
        if store is None or store.copied:
            return False
        if not store.doomed and store.intact and 0 < done_count < len(run):
            rest = self.pending.part(store, done_count)
            store.copied = True
            self._settle(store)
            rest.copied = True
            self._doom(rest)
            return True
        store.copied = True
        if store.doomed:
            self._free(store)
            return False
        if done_count and store.intact:
            self._settle(store)
        else:
            self._doom(store)
        return True

    def abandon(self, run: ChunkRun, places: Ids) -> bool:
        """Wait no longer for a store whose copy does not end; its places stay taken until ``complete``."""
        store = self.pending.get(places, run)
        if store is None or store.copied or store.doomed:
            return False
        self._doom(store)
        return True

    def forget(self) -> None:
        """Have nobody find any of it, after a reset; what copies still touch is freed at their end."""
        for store in self.pending:
            self._forget(store)

    # -- inside ---------------------------------------------------------------------------------

    def _settle(self, store: PendingStore) -> None:
        """Make a copied store ready, and the stores that waited for it."""
        ready = [store]
        while ready:
            store = ready.pop()
            if store.parent is not None:
                continue
            run = store.run
            keys, _, _ = self.positions(run)
            places = np.array(store.slots, dtype=np.int32)
            self._catalog.insert(self._tier, run.group_index, keys, run.start, places, store.visit)
            for child in store.children:
                keys, begin, _ = self.positions(child.run)
                child.parent, child.pin = None, self._catalog.pin(keys, begin)
                if child.copied:
                    ready.append(child)
            if store.pin is not None:
                self._catalog.unpin(store.pin)
            self.pending.remove(store)
            self._on_ready(store)

    def _doom(self, store: PendingStore) -> None:
        """Forget a failed store and everything that is pending on it."""
        if store.parent is not None:
            store.parent.children.remove(store)
        doomed = [store]
        while doomed:
            store = doomed.pop()
            doomed += store.children
            if store.pin is not None:
                self._catalog.unpin(store.pin)
            self._forget(store)

    def _forget(self, store: PendingStore) -> None:
        """Nobody finds a pending store any more; its places are freed when its copy has ended."""
        if not store.doomed:
            self.pending.forget_name(store)
        store.doomed, store.pin, store.parent, store.children = True, None, None, []
        if store.copied:
            self._free(store)

    def _free(self, store: PendingStore) -> None:
        self.pending.remove(store)
        self._on_free(store)
