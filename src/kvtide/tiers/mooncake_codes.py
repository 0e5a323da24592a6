"""What the numbers mean that Mooncake Store answers with.

Its calls raise nothing: each key gets a number, negative when something went wrong. Knows numbers, names and
which error each one is; makes no calls.
"""

from enum import IntEnum

from kvtide.errors import TierError, TierFullError, TierUnavailableError


class Code(IntEnum):
    """Of mooncake-store's ``types.h``, versions 0.3.9 to 0.3.14: those that calls of ours can end with."""

    OK = 0
    INTERNAL_ERROR = -1
    BUFFER_OVERFLOW = -10
    SHARD_INDEX_OUT_OF_RANGE = -100
    SEGMENT_NOT_FOUND = -101
    SEGMENT_ALREADY_EXISTS = -102
    CLIENT_NOT_FOUND = -103
    NO_AVAILABLE_HANDLE = -200
    INVALID_VERSION = -300
    INVALID_KEY = -400
    WRITE_FAIL = -500
    INVALID_PARAMS = -600
    ILLEGAL_CLIENT = -601
    INVALID_WRITE = -700
    INVALID_READ = -701
    INVALID_REPLICA = -702
    REPLICA_IS_NOT_READY = -703
    OBJECT_NOT_FOUND = -704
    OBJECT_ALREADY_EXISTS = -705
    OBJECT_HAS_LEASE = -706
    LEASE_EXPIRED = -707
    OBJECT_HAS_REPLICATION_TASK = -708
    OBJECT_NO_REPLICATION_TASK = -709
    REPLICA_NOT_FOUND = -710
    REPLICA_ALREADY_EXISTS = -711
    REPLICA_IS_GONE = -712
    REPLICA_NOT_IN_LOCAL_MEMORY = -713
    OBJECT_REPLICA_BUSY = -714
    TRANSFER_FAIL = -800
    CHECKSUM_MISMATCH = -801
    RPC_FAIL = -900
    RPC_TIMEOUT = -901
    UNAVAILABLE_IN_CURRENT_STATUS = -1010
    UNAVAILABLE_IN_CURRENT_MODE = -1011
    TENANT_QUOTA_EXCEEDED = -1700


MISSES = frozenset(
    {
        Code.OBJECT_NOT_FOUND,
        # Being written by somebody, or evicted while it was read: what came is not to be trusted.
        Code.REPLICA_IS_NOT_READY,
        Code.LEASE_EXPIRED,
        Code.REPLICA_NOT_FOUND,
        Code.REPLICA_IS_GONE,
    }
)
"""A read that ends so has found nothing, and nothing is wrong."""

FULL = frozenset({Code.NO_AVAILABLE_HANDLE, Code.TENANT_QUOTA_EXCEEDED})
"""A write that ends so found no room."""

HINTS = {
    Code.SEGMENT_NOT_FOUND: "no storage process is mounted: start mooncake_client beside the master",
    Code.NO_AVAILABLE_HANDLE: "no room and nothing to evict yet, or no storage process is mounted",
    Code.TRANSFER_FAIL: "the storage process that has it does not answer",
    Code.RPC_FAIL: "the master cannot be reached",
    Code.RPC_TIMEOUT: "the master does not answer in time",
}


def name_of(code: int) -> str:
    """Say what a number means; one that is not known is told as it is."""
    try:
        known = Code(code)
    except ValueError:
        return f"unknown code {code}"
    hint = HINTS.get(known)
    return f"{known.name} ({code})" + (f": {hint}" if hint else "")


def error_of(code: int, what: str) -> TierError:
    """Make the error that a negative number stands for.

    Args:
        code: As it came; a miss is no error and is not asked about.
        what: That was tried, and where.
    """
    kind = TierFullError if code in FULL else TierUnavailableError
    return kind(f"{what}: {name_of(code)}")
