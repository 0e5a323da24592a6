"""What the samples of ``scheduler_cost`` are called, and how much work one of each has to be.

Names and sizes only: shared by those who measure and those who judge, who import nothing heavy.
"""

OURS, NATIVE = "kvtide", "vllm"
ARMS = (OURS, NATIVE)

SMALL, LARGE = 10_000, 1_000_000
"""Chunks of the pools that are compared."""

# Samples of hooks, by their field ``row``.
STORE, LOAD, DECODE = "store", "load", "decode"
WAITING, WAITING_CHANGED = "waiting", "waiting_changed"
FULL, CALLS = "full", "calls"
# The other samples, each from a process of its own.
CATALOG, SESSIONS = "catalog", "sessions"

TOKENS_PER_BLOCK = 16  # a chunk is one block, a block has one hash
FILLER_CHUNKS = 32
LONG_CHUNKS = 8192  # 131,072 tokens
SHARED_CHUNKS = 2048  # 32,768 tokens
WAITING_REQUESTS = 64
CHAT_REQUESTS = 256
FILLING_A_CHUNK = CHAT_REQUESTS // TOKENS_PER_BLOCK

RUN_CHUNKS = (32, 8, 2, 1)
SLOW_US = 2_000.0  # calls from here on are noted one by one
FULL_SHARE = 0.97  # whoever keeps a little free counts as full


def books_of(run_chunks: int) -> str:
    """Name the work on books that came in runs of so many chunks."""
    return f"books of runs of {run_chunks}"


def hooks_of(resident_chunks: int, prompt_only: bool) -> str:
    """Name the work inside vLLM's scheduler with a pool of so many chunks."""
    return f"hooks, pool of {resident_chunks:,}" + (", prompts stored" if prompt_only else "")
