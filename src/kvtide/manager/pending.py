"""Stores that have been prepared and not completed: chunks that nobody can read yet.

They lie outside the catalog, so that one that fails takes nothing with it that others already extended. A
store that continues one still under way waits for it, and fails with it. Knows runs, slots and who waits
for whom; does not know the catalog.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvtide.events import ChunkContent
from kvtide.jobs import Ids
from kvtide.keys import ChunkRun


@dataclass(slots=True, eq=False)
class PendingStore:
    """One store between ``prepare_store`` and ``complete_store``.

    Attributes:
        run: Its chunks, as they were handed out: a view over hashes that the engine still owns.
        slots: One per chunk.
        visit: Who stores.
        parent: The pending store it continues, until that one is ready.
        pin: Of the ready prefix it continues, None while it has a parent.
        children: Pending stores that continue it.
        copied: Its bytes are in place; it waits for its parent.
        doomed: Forgotten; its slots are freed when its own copy has ended.
        content: For the event.
        names: Group and hash of its first chunk, or of every one, under which it is found.
        last_hash: Of its last chunk.
    """

    run: ChunkRun
    slots: Ids
    visit: int
    parent: "PendingStore | None" = None
    pin: int | None = None
    children: list["PendingStore"] = field(default_factory=list)
    copied: bool = False
    doomed: bool = False
    content: ChunkContent | None = None
    names: list[tuple[int, bytes]] = field(default_factory=list)
    last_hash: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.last_hash = self.run.hash_of(self.run.stop - 1)

    @property
    def intact(self) -> bool:
        """Whether the prompt is what it was: a session that is resumed may take back its last tokens.

        Hashes are chained: the last one stands for all.
        """
        run = self.run
        return len(run.block_hashes) >= run.stop * run.hashes_per_chunk + run.lookahead and (
            run.hash_of(run.stop - 1) == self.last_hash
        )


class PendingStores:
    """Every pending store, by its first slot and by name.

    Args:
        scattered: Per group, whether its chunks may be missing above others (windows): then a store is
            found by each of its chunks, otherwise by the first.
    """

    def __init__(self, scattered: Sequence[bool]) -> None:
        self._scattered = tuple(scattered)
        self._by_slot: dict[int, PendingStore] = {}
        self._by_name: dict[tuple[int, bytes], PendingStore] = {}

    def add(self, store: PendingStore) -> None:
        """Enter a store whose parent is entered already."""
        self._enter(store)
        if store.parent is not None:
            store.parent.children.append(store)

    def get(self, slots: Sequence[int], run: ChunkRun) -> PendingStore | None:
        """Find the store of the very run that was prepared; its slots may have a new owner by now."""
        store = self._by_slot.get(slots[0]) if slots else None
        return store if store is not None and store.run is run else None

    def begins_at(self, run: ChunkRun, chunk_index: int) -> PendingStore | None:
        """Find the store that begins with chunk ``chunk_index`` of this prompt; with windows, that has it."""
        if not self._by_name or chunk_index >= run.stop:
            return None
        return self._by_name.get((run.group_index, run.hash_of(chunk_index)))

    def follow(self, run: ChunkRun, chunk_index: int) -> tuple[int, PendingStore | None]:
        """Walk on through what is pending.

        Args:
            run: Of a prompt.
            chunk_index: Its first chunk that is not ready.

        Returns:
            The first chunk that is not pending either, and the store with the one before it.
        """
        parent = None
        while (store := self.begins_at(run, chunk_index)) is not None and store.intact:
            parent = store
            first = store.run.start
            chunk_index = first + _agreed(store.run, run, min(store.run.stop, run.stop) - first)
        return chunk_index, parent

    def part(self, store: PendingStore, count: int) -> PendingStore:
        """Part a store after its first ``count`` chunks.

        Returns:
            The rest, as a store that continues it; what continued it continues the rest now.
        """
        run = store.run
        self.remove(store)
        rest = PendingStore(run.between(run.start + count, run.stop), store.slots[count:], store.visit, store)
        # Some may continue it in the middle: they need no more than has come.
        children, end = store.children, run.start + count
        store.children = [child for child in children if child.run.start <= end]
        rest.children = [child for child in children if child.run.start > end]
        if (content := store.content) is not None:
            rest.content = content.part(len(run), count, len(run))
            store.content = content.part(len(run), 0, count)
        for child in rest.children:
            child.parent = rest
        store.run, store.slots = run.between(run.start, run.start + count), store.slots[:count]
        store.last_hash = store.run.hash_of(store.run.stop - 1)
        self._enter(store)
        self.add(rest)
        return rest

    def forget_name(self, store: PendingStore) -> None:
        """Nobody is to find this store any more; it stays until ``remove``."""
        # Where the prompt of one has changed, another may have begun under the same name.
        for name in store.names:
            if self._by_name.get(name) is store:
                del self._by_name[name]

    def remove(self, store: PendingStore) -> None:
        """Strike a store out."""
        del self._by_slot[store.slots[0]]
        if not store.doomed:
            self.forget_name(store)

    def __iter__(self) -> Iterator[PendingStore]:
        return iter(list(self._by_slot.values()))

    def __len__(self) -> int:
        return len(self._by_slot)

    def _enter(self, store: PendingStore) -> None:
        self._by_slot[store.slots[0]] = store
        run = store.run
        last = run.stop if self._scattered[run.group_index] else run.start + 1
        store.names = [(run.group_index, run.hash_of(index)) for index in range(run.start, last)]
        self._by_name.update(dict.fromkeys(store.names, store))


def _agreed(stored: ChunkRun, other: ChunkRun, limit: int) -> int:
    """Count the chunks, at least one, that both have from ``stored.start`` on: hashes are chained."""
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        at = stored.start + middle - 1
        low, high = (middle, high) if stored.hash_of(at) == other.hash_of(at) else (low, middle - 1)
    return low
