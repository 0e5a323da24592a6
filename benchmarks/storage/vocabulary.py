"""What the samples of ``disk`` are called, and how much work one of each has to be.

Names and sizes only: shared by those who measure and those who judge, who import nothing heavy.
"""

OURS = "kvtide"
PLAIN = "plain"  # as many threads with preadv or pwritev and nothing else
NATIVE = "vllm_fs"  # vLLM's own tier, one job, as its manager asks for one request's chunks
NATIVE_SPLIT = "vllm_fs_split"  # the same tier, one job a thread: better than its manager lets it be

READ, WRITE = "read", "write"
ARMS = {READ: (OURS, PLAIN, NATIVE, NATIVE_SPLIT), WRITE: (OURS, PLAIN, NATIVE)}

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CHUNK_BYTES = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
BAR_CHUNK_BYTES = MIB

THREADS = 4
READ_BYTES = GIB  # one request's prefix; of the size of chunks that has the bar
SHOWN_READ_BYTES = GIB // 4  # of the other sizes
WRITE_BYTES = 256 * MIB
READ_ROUNDS, SHOWN_READ_ROUNDS, WRITE_ROUNDS = 11, 7, 3
# As one of all benchmarks: the size that has the bar, and the one where most is lost.
BRIEF_CHUNK_BYTES, BRIEF_READ_ROUNDS = (64 * KIB, MIB), 9


def size_name(chunk_bytes: int) -> str:
    """Write a chunk's size for people."""
    return f"{chunk_bytes // MIB} MiB" if chunk_bytes >= MIB else f"{chunk_bytes // KIB} KiB"
