"""The kernel that moves many small pieces between device memory and registered host memory.

One launch moves thousands of pieces. The copy engine takes about as long for a piece of a few KiB as for
one of 28, so below that size the processors of the device are faster, although they are lent from the
model. Runs in Triton's interpreter too, where addresses are those of the host.
"""

import triton
import triton.language as tl

PROGRAMS = 32
"""Programs of a launch: enough reads under way to fill the link, few enough to leave the model its device."""

BLOCK_BYTES = 8192
"""Bytes that one program moves at once."""


@triton.jit(do_not_specialize=["table", "count"])  # type: ignore[untyped-decorator]
def _move_pieces(table, count, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # No other annotations: what is compiled may name nothing but Triton's own.
    # The table was written by the host a moment ago: volatile, so that no cache answers for it.
    # Triton takes a number that fits in 32 bits for one of 32: an address may be that low.
    sources = table.to(tl.int64).to(tl.pointer_type(tl.int64))
    lanes = tl.arange(0, BLOCK)
    for piece in range(tl.program_id(0), count, tl.num_programs(0)):
        source = tl.load(sources + piece, volatile=True)
        target = tl.load(sources + count + piece, volatile=True)
        size = tl.load(sources + 2 * count + piece, volatile=True)
        if WIDE:
            # Told of the multiples, the compiler moves 16 bytes with one instruction.
            words = tl.multiple_of(size // 8, 2)
            read = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
            written = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
        else:
            words = size
            read = source.to(tl.pointer_type(tl.int8))
            written = target.to(tl.pointer_type(tl.int8))
        begin = tl.zeros_like(words)
        while begin < words:
            at = tl.multiple_of(begin, BLOCK) + lanes
            inside = at < words
            # Neither side is looked at again here: it need not push the model's data out of the cache.
            content = tl.load(read + at, mask=inside, eviction_policy="evict_first")
            tl.store(written + at, content, mask=inside, eviction_policy="evict_first")
            begin += BLOCK


def move_pieces(table: int, count: int, wide: bool) -> None:
    """Launch on the current stream.

    Args:
        table: Address of ``int64[3, count]``: sources, targets, sizes in bytes.
        count: Pieces, at least one.
        wide: Every source, target and size is a multiple of 16.
    """
    block = BLOCK_BYTES // 8 if wide else BLOCK_BYTES
    _move_pieces[(min(PROGRAMS, count),)](table, count, WIDE=wide, BLOCK=block)
