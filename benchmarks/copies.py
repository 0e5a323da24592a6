"""How fast the copies of the CPU backend are, by the size of their pieces.

The handler and copier of production move scattered pieces between device blocks and host slots, both ways,
against one ``memcpy`` of the same bytes by the same number of threads. Knows what is compared and what was
promised; what is copied, and the process in which the arms take turns, are in ``copying``.
"""

import itertools
from collections.abc import Sequence

from benchmarks.copying.vocabulary import (
    ALONE_PASSES,
    BLOCK_ROUNDS,
    COPY_BYTES,
    DIRECTIONS,
    KIB,
    LOAD,
    MERGED,
    MERGED_PIECE_BYTES,
    OURS,
    PASSES,
    PIECE_BYTES,
    PLAIN,
    RUN_BLOCKS,
    STORE,
    SUBMIT,
    SUBMIT_CHUNKS,
    SUBMIT_LAYERS,
    SUBMIT_ROUNDS,
    arms_of,
    byte_count,
    size_name,
)
from benchmarks.frame.bars import Bar, at_least
from benchmarks.frame.children import in_child
from benchmarks.frame.machine import QUIET_CORES
from benchmarks.frame.plots import Line, Plot
from benchmarks.frame.registry import Bench, Sample, UnfitError, Verdict, benchmark
from benchmarks.frame.rounds import undisturbed, whole_rounds
from benchmarks.frame.statistics import median, ratio_interval, ratio_of_medians, spread

LARGE_FROM_BYTES, LARGE_BAR = 64 * KIB, 0.90
SMALL_BYTES, SMALL_BAR = 12 * KIB, 0.65
MIN_ROUNDS = 14
BUSY_LIMIT_S = 120.0
LIMIT_S = 600.0

NAMES = {STORE: "storing", LOAD: "loading"}

Rounds = list[dict[str, Sample]]
Found = dict[tuple[str, int], Rounds]


def judge(samples: Sequence[Sample]) -> Verdict:
    """Compare kvtide with ``memcpy``, size by size and each way.

    Raises:
        UnfitError: The samples are not of what the bars are about.
    """
    try:
        threads = _checked(samples)
        found, quiet_note = _used(samples)
        bars = tuple(
            _bar(direction, size, found[direction, size])
            for size in PIECE_BYTES
            if size == SMALL_BYTES or size >= LARGE_FROM_BYTES
            for direction in DIRECTIONS
        )
        notes = (
            quiet_note,
            f"threads each way: {threads}",
            *(_note(direction, size, used) for (direction, size), used in found.items()),
            *(_merged_note(direction, found[direction, MERGED_PIECE_BYTES]) for direction in DIRECTIONS),
            _submission_note([one for one in samples if one["what"] == SUBMIT]),
        )
        return Verdict(bars, notes, (_plot(found),))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnfitError(f"a sample is damaged: {type(error).__name__}: {error}") from None


def _checked(samples: Sequence[Sample]) -> int:
    """Refuse what is something else; return how many threads copied."""
    threads = {one["threads"] for one in samples if one["what"] != SUBMIT}
    if len(threads) != 1:
        raise UnfitError(f"copies by {sorted(threads)} threads cannot be compared")
    for one in samples:
        if one["what"] == SUBMIT:
            if (one["chunks"], one["layers"]) != (SUBMIT_CHUNKS, SUBMIT_LAYERS):
                raise UnfitError(f"{one['chunks']} chunks of {one['layers']} layers are another submission")
        elif one["byte_count"] != byte_count(one["piece_bytes"]):
            where = f"{one['what']}, {size_name(one['piece_bytes'])}, {one['arm']}"
            raise UnfitError(f"{where}: {one['byte_count']} bytes are another amount of work")
    return int(threads.pop())


def _used(samples: Sequence[Sample]) -> tuple[Found, str]:
    """Choose the rounds that count, by direction and size."""
    found: Found = {}
    total = quiet_total = 0
    short: list[str] = []
    for direction, size in itertools.product(DIRECTIONS, PIECE_BYTES):
        mine = [one for one in samples if one["what"] == direction and one["piece_bytes"] == size]
        every = whole_rounds(mine, arms_of(size))
        where = f"{NAMES[direction]} pieces of {size_name(size)}"
        if len(every) < MIN_ROUNDS:
            raise UnfitError(f"{where}: {len(every)} rounds; {MIN_ROUNDS} are needed")
        quiet = undisturbed(every, QUIET_CORES)
        total, quiet_total = total + len(every), quiet_total + len(quiet)
        if len(quiet) < MIN_ROUNDS:
            short.append(where)
        found[direction, size] = quiet if len(quiet) >= MIN_ROUNDS else every
    if not short:
        return found, f"{quiet_total} of {total} rounds were undisturbed and count"
    return found, (
        f"NOT A QUIET MACHINE: only {quiet_total} of {total} rounds were undisturbed; all count of"
        f" {len(short)} of {len(found)} rows. A missed bar may be the neighbours'"
    )


def _walls(used: Rounds, arm: str) -> list[float]:
    return [one[arm]["wall_s"] for one in used]


def _ratio(used: Rounds, arm: str = OURS) -> float:
    return ratio_of_medians(_walls(used, PLAIN), _walls(used, arm))


def _speeds(used: Rounds, arm: str) -> list[float]:
    return [one[arm]["byte_count"] / one[arm]["wall_s"] / 1e9 for one in used]


def _bar(direction: str, size: int, used: Rounds) -> Bar:
    name = f"{NAMES[direction]} pieces of {size_name(size)}: kvtide / memcpy"
    return at_least(name, _ratio(used), SMALL_BAR if size == SMALL_BYTES else LARGE_BAR)


def _note(direction: str, size: int, used: Rounds) -> str:
    low, high = ratio_interval(_walls(used, PLAIN), _walls(used, OURS))
    return (
        f"{NAMES[direction]} pieces of {size_name(size)}: {spread(_speeds(used, OURS))} GB/s, memcpy"
        f" {spread(_speeds(used, PLAIN))} GB/s; kvtide / memcpy {_ratio(used):.3f}"
        f" ({low:.3f} to {high:.3f} in 95 % of resamples)"
    )


def _merged_note(direction: str, used: Rounds) -> str:
    return (
        f"{NAMES[direction]} pieces of {size_name(MERGED_PIECE_BYTES)} that come {RUN_BLOCKS} in a row:"
        f" {spread(_speeds(used, MERGED))} GB/s; kvtide / memcpy {_ratio(used, MERGED):.3f}"
    )


def _submission_note(samples: Sequence[Sample]) -> str:
    walls_s = [one["wall_s"] for one in samples]
    return (
        f"handing over a load of {SUBMIT_CHUNKS} scattered chunks, {SUBMIT_CHUNKS * SUBMIT_LAYERS} pieces,"
        f" costs the engine's step {1e3 * median(walls_s):.2f} ms (median of {len(walls_s)})"
    )


def _plot(found: Found) -> Plot:
    sizes = [size / KIB for size in PIECE_BYTES]
    return Plot(
        "Copies between device blocks and host slots (CPU backend)",
        "KiB of a piece",
        "GB/s, median",
        tuple(
            Line(
                f"{label}, {NAMES[direction]}",
                sizes,
                [median(_speeds(found[direction, size], arm)) for size in PIECE_BYTES],
            )
            for arm, label in ((OURS, "kvtide"), (PLAIN, "one memcpy"))
            for direction in DIRECTIONS
        ),
        log_x=True,
    )


@benchmark(
    "copies",
    asks="How fast are copies of scattered pieces, against one memcpy of the same bytes?",
    about_s=32,
    alone_s=60,
    judge=judge,
)
def measure(bench: Bench) -> list[Sample]:
    """Let the arms take turns in a process of its own."""
    passes = ALONE_PASSES if bench.alone else PASSES
    steps = passes * len(PIECE_BYTES) + 1
    done = itertools.count()

    def tell(text: str) -> None:
        bench.progress(text, next(done), steps)

    samples: list[Sample] = in_child(
        "benchmarks.copying.child:measure_submission",
        (SUBMIT_CHUNKS, SUBMIT_LAYERS, SUBMIT_ROUNDS),
        bench.folder / "copies-submission.log",
        tell,
        LIMIT_S,
    )
    samples += in_child(
        "benchmarks.copying.child:measure_copies",
        (PIECE_BYTES, COPY_BYTES, passes, BLOCK_ROUNDS, BUSY_LIMIT_S),
        bench.folder / "copies.log",
        tell,
        LIMIT_S,
    )
    return samples
