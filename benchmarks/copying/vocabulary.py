"""What the samples of ``copies`` are called, and how much work one of each has to be.

Names and sizes only: shared by those who measure and those who judge, who import nothing heavy.
"""

OURS = "kvtide"
PLAIN = "memcpy"  # the same bytes at once, shared out among as many threads
MERGED = "kvtide_merged"  # pieces of the same size, of which neighbours stay neighbours

STORE, LOAD, SUBMIT = "store", "load", "submit"
DIRECTIONS = (STORE, LOAD)

KIB, MIB = 1 << 10, 1 << 20
PIECE_BYTES = (4 * KIB, 12 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
MERGED_PIECE_BYTES = 12 * KIB
RUN_BLOCKS = 64  # neighbours in a row; what a prefix has in a full pool, see ``scheduler_cost``
LAYERS = 16  # a block of smaller pieces is so many of them, one in each layer
ONE_LAYER_FROM_BYTES = MIB

COPY_BYTES = 256 * MIB  # about that; whole blocks
BLOCK_ROUNDS = 7  # within which the neighbours are watched
PASSES, ALONE_PASSES = 3, 7

SUBMIT_CHUNKS, SUBMIT_LAYERS, SUBMIT_ROUNDS = 8192, 30, 11


def arms_of(piece_bytes: int) -> tuple[str, ...]:
    """Say which arms take turns with a size of pieces."""
    return (OURS, PLAIN, MERGED) if piece_bytes == MERGED_PIECE_BYTES else (OURS, PLAIN)


def layers_of(piece_bytes: int) -> int:
    """Say how many pieces a block is."""
    return 1 if piece_bytes >= ONE_LAYER_FROM_BYTES else LAYERS


def block_count(piece_bytes: int, copy_bytes: int = COPY_BYTES) -> int:
    """Count the blocks of a copy."""
    return copy_bytes // (layers_of(piece_bytes) * piece_bytes)


def byte_count(piece_bytes: int, copy_bytes: int = COPY_BYTES) -> int:
    """Count the bytes of a copy."""
    return block_count(piece_bytes, copy_bytes) * layers_of(piece_bytes) * piece_bytes


def size_name(piece_bytes: int) -> str:
    """Write a piece's size for people."""
    return f"{piece_bytes // MIB} MiB" if piece_bytes >= MIB else f"{piece_bytes // KIB} KiB"
