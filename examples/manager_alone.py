"""The manager alone: the life of a chunk in six primitives, without vLLM, torch or a single byte moved.

    python examples/manager_alone.py

A manager decides which chunk of KV cache is where and for how long it must stay. Whoever copies the bytes
asks it before and tells it after.
"""

import hashlib

from kvtide import ChunkRun, CPUOffloadingManager, LRUPolicy, ReqContext

TOKENS_PER_CHUNK = 32


def chained_hashes(text: str, chunk_count: int) -> list[bytes]:
    """Name the chunks of a prompt as an engine does: each hash covers everything up to its chunk."""
    hashes, above = [], b""
    for chunk_index in range(chunk_count):
        above = hashlib.sha256(above + f"{text}, chunk {chunk_index}".encode()).digest()
        hashes.append(above)
    return hashes


def run_of(text: str, chunk_count: int) -> ChunkRun:
    """A prompt of KV cache group 0, one hash per chunk."""
    return ChunkRun(chained_hashes(text, chunk_count), 0, 1, 0, chunk_count)


def main() -> None:
    manager = CPUOffloadingManager(LRUPolicy())
    manager.grow(6)  # slots of the host pool that are ready; a worker would report them
    alice, bob = ReqContext("alice"), ReqContext("bob")
    report = run_of("the annual report", 4)

    # 1. prepare_store: a place for every chunk that is not there yet. Nobody can read them so far.
    stored = manager.prepare_store(report, alice)
    print(f"store {len(stored.keys_to_store)} chunks into slots {list(stored.store_spec.slots)}")
    print(f"while they are copied, a lookup finds {manager.lookup(report, bob)}")

    # 2. complete_store: the bytes are there (or not: success=False, and the chunks never become visible).
    manager.complete_store(stored.keys_to_store, stored.store_spec, alice, success=True)

    # 3. lookup: how much of a prompt is ready, from its beginning. No effect of its own.
    found = manager.lookup(report, bob)
    print(f"afterwards it finds {found.ready_count} chunks, {found.ready_count * TOKENS_PER_CHUNK} tokens")

    # 4. prepare_load: where they are, and a pin on each, so that none leaves under the copy.
    loading = manager.prepare_load(report, bob)
    print(f"load from slots {list(loading.slots)}; pinned: {manager.pinned_count}")

    # While they are pinned there are two free slots, and no other can be had.
    novel = run_of("a novel", 4)
    squeezed = manager.prepare_store(novel, alice)
    print(f"of 4 chunks of a novel {len(squeezed.keys_to_store)} fit: {squeezed.refusal}")
    manager.complete_store(squeezed.keys_to_store, squeezed.store_spec, alice, success=True)

    # 5. complete_load: the pins come off.
    manager.complete_load(report, loading, bob)

    # 6. touch: this prefix was used just now. The next one to leave is somebody else.
    manager.touch(report, bob)
    poem = run_of("a poem", 1)
    last = manager.prepare_store(poem, alice)
    manager.complete_store(last.keys_to_store, last.store_spec, alice, success=True)
    left = {"report": report, "novel": novel, "poem": poem}
    print("after one more store:", {name: manager.lookup(run, bob).ready_count for name, run in left.items()})

    manager.check_invariants(idle=True)


if __name__ == "__main__":
    main()
