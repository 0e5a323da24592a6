"""Which block hashes a prompt has.

A prompt is a seed and a number of blocks. Its hashes are drawn from the seed, so they can be had again
after they were dropped, as new ``bytes`` objects every time: whoever is asked a second time cannot
recognise a key by its identity. Knows nothing of caches.
"""

import zlib
from collections.abc import Iterator, Sequence

import numpy as np

HASH_BYTES = 32
_BATCH_BLOCKS = 8192


def hashes(seed: str, count: int) -> list[bytes]:
    """Return the first ``count`` block hashes of the prompt ``seed``; those of fewer blocks begin alike."""
    stream = np.random.Generator(np.random.PCG64([zlib.crc32(seed.encode()), len(seed)]))
    data = stream.bytes(count * HASH_BYTES)
    return [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]


def fillers(name: str, first: int, count: int, blocks: int) -> Iterator[list[bytes]]:
    """Yield the hashes of the prompts ``first`` to ``first + count`` of a series of short prompts.

    Args:
        name: Of the series.
        first: Index of the first prompt.
        count: How many.
        blocks: Of each prompt; a divisor of 8,192, as the series is drawn in pieces of that many blocks.
    """
    per_batch = _BATCH_BLOCKS // blocks
    index = first
    while index < first + count:
        batch, within = divmod(index, per_batch)
        taken = min(per_batch - within, first + count - index)
        found = hashes(f"{name}/{batch}", (within + taken) * blocks)
        for prompt in range(within, within + taken):
            yield found[prompt * blocks : (prompt + 1) * blocks]
        index += taken


def joined(parts: Sequence[tuple[str, int]]) -> list[bytes]:
    """Return the hashes of a prompt that is pieced together: ``(seed, blocks)`` each."""
    return [one for seed, count in parts for one in hashes(seed, count)]
