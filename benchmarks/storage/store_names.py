"""What the samples of ``stores`` are called, and how much work one of each has to be.

Names and sizes only: shared by those who measure and those who judge, who import nothing heavy.
"""

from dataclasses import dataclass

from benchmarks.storage.vocabulary import MIB, OURS, PLAIN

ARMS = (OURS, PLAIN)
PUT, GET = "put", "get"
DIRECTIONS = (PUT, GET)
RECORD_BYTES = (MIB, 4 * MIB)
THREADS = 4

DIRECTORY, VALKEY, MOONCAKE = "directory", "valkey", "mooncake"
UNCACHED = "directory, not cached"
"""What is shared leaves this machine's page cache when it is put, and is not in it when another gets it."""
MOONCAKE_BATCHED = "mooncake, batched"
"""Its client told of 16 MiB of records in one call, as the tier does it: shown beside the plain calls."""
RADOSGW = "objects, radosgw"
FILES = "objects, files"
"""obstore's own store of files, whose reads are at the speed of memory: shown where there is no radosgw."""
MOTO = "objects, moto"
"""An S3 server in Python, in which most of the time goes: shown, not judged."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is measured of a kind of store, with records of each size.

    Attributes:
        byte_count: Put, and got, by an arm in a round.
        rounds: How many.
        brief_rounds: How many as one of all benchmarks, which have a quarter of an hour together; 0 for what
            has no bar and is not measured then.
        judged: Directions that have a bar.
        directions: What of it is kept.
        gets: How often in a sample: neighbours cannot be seen within a few hundredths of a second.
    """

    byte_count: int
    rounds: int
    brief_rounds: int
    judged: tuple[str, ...] = DIRECTIONS
    directions: tuple[str, ...] = DIRECTIONS
    gets: int = 1

    def moved_bytes(self, what: str) -> int:
        """Of one sample."""
        return self.byte_count * (self.gets if what == GET else 1)

    def rounds_of(self, brief: bool) -> int:
        """How many rounds, alone or as one of all."""
        return self.brief_rounds if brief else self.rounds


WORK = {
    # What stays in this machine's memory costs the file system one copy: checksums alone are a quarter of it.
    DIRECTORY: Work(256 * MIB, 9, 0, judged=(), gets=4),
    UNCACHED: Work(256 * MIB, 19, 11),  # a disk is as fast as its neighbours let it be
    VALKEY: Work(256 * MIB, 9, 7),
    MOONCAKE: Work(256 * MIB, 9, 7, gets=2),
    MOONCAKE_BATCHED: Work(256 * MIB, 7, 0, judged=(), gets=2),
    RADOSGW: Work(64 * MIB, 9, 7, gets=4),
    FILES: Work(256 * MIB, 7, 0, judged=()),
    MOTO: Work(32 * MIB, 3, 0, judged=()),
}
