"""What kvtide's disk tier reaches of what the disk gives, and what vLLM's own tier reaches.

One request's prefix is promoted from disk through the production lane and tier, against as many threads of
plain ``preadv`` on the same bytes of the same files, and vLLM's own ``fs`` tier on the same bytes in files
of its own. Knows what is compared and what was promised; the arms and the process they take turns in are
in ``storage``.
"""

import itertools
from collections.abc import Mapping, Sequence

from benchmarks.frame.bars import at_least
from benchmarks.frame.children import in_child
from benchmarks.frame.machine import QUIET_CORES
from benchmarks.frame.plots import Bars
from benchmarks.frame.registry import Bench, Sample, UnfitError, Verdict, benchmark
from benchmarks.frame.rounds import undisturbed, whole_rounds
from benchmarks.frame.statistics import median, ratio_interval, ratio_of_medians, spread
from benchmarks.storage.vocabulary import (
    ARMS,
    BAR_CHUNK_BYTES,
    BRIEF_CHUNK_BYTES,
    BRIEF_READ_ROUNDS,
    CHUNK_BYTES,
    NATIVE,
    NATIVE_SPLIT,
    OURS,
    PLAIN,
    READ,
    READ_BYTES,
    READ_ROUNDS,
    SHOWN_READ_BYTES,
    SHOWN_READ_ROUNDS,
    THREADS,
    WRITE,
    WRITE_BYTES,
    WRITE_ROUNDS,
    size_name,
)

READ_BAR = 0.80
MIN_READ_ROUNDS = 7
LIMIT_S = 400.0

SHOWN = "is shown and has no bar; make bench ONLY=disk measures it"
"""Why what is left out among all benchmarks is left out."""

LABELS = {
    OURS: "kvtide",
    PLAIN: f"plain, {THREADS} threads",
    NATIVE: "vLLM fs",
    NATIVE_SPLIT: f"vLLM fs in {THREADS} jobs",
}
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}

Rounds = list[dict[str, Sample]]


def judge(samples: Sequence[Sample]) -> Verdict:
    """Compare the arms, size by size.

    Raises:
        UnfitError: The samples are not of what the bar is about.
    """
    try:
        left_out = {one["chunk_bytes"]: one["absent"] for one in samples if "absent" in one}
        sizes = [size for size in CHUNK_BYTES if size not in left_out]
        samples = [one for one in samples if "absent" not in one]
        _check(samples)
        reads, notes = _used_reads(samples, sizes)
        notes += [f"NOT MEASURED: chunks of {size_name(size)}: {why}" for size, why in left_out.items()]
        writes = {size: whole_rounds(_of(samples, WRITE, size), ARMS[WRITE]) for size in sizes}
        ours, plain = (_walls(reads[BAR_CHUNK_BYTES], arm) for arm in (OURS, PLAIN))
        bar = at_least(
            f"reading {READ_BYTES >> 30} GiB, chunks of {size_name(BAR_CHUNK_BYTES)}: kvtide / plain preadv",
            ratio_of_medians(plain, ours),
            READ_BAR,
        )
        for what, found in ((READ, reads), (WRITE, writes)):
            notes += [_note(what, size, used) for size, used in found.items()]
        plots = tuple(_plot(what, found) for what, found in ((READ, reads), (WRITE, writes)))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnfitError(f"a sample is damaged: {type(error).__name__}: {error}") from None
    return Verdict((bar,), tuple(notes), plots)


def _check(samples: Sequence[Sample]) -> None:
    for sample in samples:
        where = f"{sample['what']}, {size_name(sample['chunk_bytes'])}, {sample['arm']}"
        if sample["wrong_pages"]:
            raise UnfitError(f"{where}: {sample['wrong_pages']} pages were not what had been written")
        if sample["threads"] != THREADS:
            raise UnfitError(f"{where}: {sample['threads']} threads; the bar is about {THREADS}")
        if sample["byte_count"] != _byte_count(sample["what"], sample["chunk_bytes"]):
            raise UnfitError(f"{where}: {sample['byte_count']} bytes are another amount of work")


def _byte_count(what: str, chunk_bytes: int) -> int:
    if what == WRITE:
        return WRITE_BYTES
    return READ_BYTES if chunk_bytes == BAR_CHUNK_BYTES else SHOWN_READ_BYTES


def _of(samples: Sequence[Sample], what: str, chunk_bytes: int) -> list[Sample]:
    return [one for one in samples if (one["what"], one["chunk_bytes"]) == (what, chunk_bytes)]


def _used_reads(samples: Sequence[Sample], sizes: Sequence[int]) -> tuple[dict[int, Rounds], list[str]]:
    """Choose the rounds that count, by size."""
    if BAR_CHUNK_BYTES not in sizes:
        raise UnfitError(f"no chunks of {size_name(BAR_CHUNK_BYTES)}; the bar is about them")
    used: dict[int, Rounds] = {}
    for size in sizes:
        found = whole_rounds(_of(samples, READ, size), ARMS[READ])
        if len(found) < MIN_READ_ROUNDS:
            raise UnfitError(f"{size_name(size)}: {len(found)} rounds; {MIN_READ_ROUNDS} are needed")
        quiet = undisturbed(found, QUIET_CORES)
        used[size] = quiet if len(quiet) >= MIN_READ_ROUNDS else found
        if size == BAR_CHUNK_BYTES:
            note = _quiet_note(len(found), len(quiet))
    direct = {sample["direct"] for sample in samples}
    if direct == {True}:
        return used, [note, "past the page cache (O_DIRECT), all arms"]
    return used, [
        note,
        "THROUGH THE PAGE CACHE, emptied of these files before each reading: no O_DIRECT here",
    ]


def _quiet_note(count: int, quiet_count: int) -> str:
    if quiet_count >= MIN_READ_ROUNDS:
        return f"{quiet_count} of {count} rounds were undisturbed and count"
    return (
        f"NOT A QUIET MACHINE: only {quiet_count} of {count} rounds were undisturbed, so all count;"
        " a missed bar may be the neighbours'"
    )


def _walls(used: Rounds, arm: str) -> list[float]:
    return [one[arm]["wall_s"] for one in used]


def _speeds(used: Rounds, arm: str) -> list[float]:
    return [one[arm]["byte_count"] / one[arm]["wall_s"] / 1e9 for one in used]


def _note(what: str, chunk_bytes: int, used: Rounds) -> str:
    ours, plain = _walls(used, OURS), _walls(used, PLAIN)
    low, high = ratio_interval(plain, ours)
    native = ratio_of_medians(_walls(used, NATIVE), ours)
    verb = "reading" if what == READ else "writing"
    speeds = ", ".join(f"{LABELS[arm]} {median(_speeds(used, arm)):.2f}" for arm in ARMS[what])
    cpu = ", ".join(f"{_cpu_s_per_gib(used, arm):.2f}" for arm in ARMS[what])
    return (
        f"{verb}, chunks of {size_name(chunk_bytes)}: kvtide / plain {ratio_of_medians(plain, ours):.3f}"
        f" ({low:.3f} to {high:.3f} in 95 % of resamples), kvtide / vLLM fs {native:.2f};"
        f" GB/s: {speeds}; CPU s/GiB: {cpu}; kvtide took {spread(ours)} s"
    )


def _cpu_s_per_gib(used: Rounds, arm: str) -> float:
    return median([one[arm]["cpu_s"] / one[arm]["byte_count"] * 2**30 for one in used])


def _plot(what: str, found: Mapping[int, Rounds]) -> Bars:
    return Bars(
        "One request's prefix read from disk" if what == READ else "Chunks written to disk",
        "GB/s, median",
        tuple(f"chunks of {size_name(size)}" for size in found),
        tuple(
            (LABELS[arm], tuple(median(_speeds(used, arm)) for used in found.values())) for arm in ARMS[what]
        ),
    )


@benchmark(
    "disk",
    asks="How much of what the disk gives does a promotion reach?",
    about_s=52,
    alone_s=100,
    judge=judge,
)
def measure(bench: Bench) -> list[Sample]:
    """Let the arms take turns in a process of its own; the size with the bar first."""
    sizes = sorted(
        CHUNK_BYTES if bench.alone else BRIEF_CHUNK_BYTES, key=lambda size: size != BAR_CHUNK_BYTES
    )
    reads = [(size, _byte_count(READ, size), _read_rounds(size, bench.alone)) for size in sizes]
    steps = sum(1 + rounds + WRITE_ROUNDS for _, _, rounds in reads)
    done = itertools.count()
    samples: list[Sample] = in_child(
        "benchmarks.storage.child:measure_sizes",
        (str(bench.folder / "disk"), THREADS, reads, WRITE_BYTES, WRITE_ROUNDS),
        bench.folder / "disk.log",
        lambda text: bench.progress(text, next(done), steps),
        LIMIT_S,
        ENVIRONMENT,
    )
    return [*samples, *({"chunk_bytes": size, "absent": SHOWN} for size in CHUNK_BYTES if size not in sizes)]


def _read_rounds(chunk_bytes: int, alone: bool) -> int:
    if chunk_bytes != BAR_CHUNK_BYTES:
        return SHOWN_READ_ROUNDS
    return READ_ROUNDS if alone else BRIEF_READ_ROUNDS
