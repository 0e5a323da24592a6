"""What the scheduler half costs, beside vLLM's own offloading and as its books grow.

Knows which parts there are and in which order they run; each part has its own files in ``scheduler``:
who measures, in a process of its own, and who judges.
"""

from collections.abc import Sequence

from benchmarks.frame.children import in_child
from benchmarks.frame.registry import Bench, Sample, UnfitError, Verdict, benchmark
from benchmarks.scheduler.adviser_judge import judge_adviser
from benchmarks.scheduler.adviser_vocabulary import POOL_CHUNKS as GHOST_POOL_CHUNKS
from benchmarks.scheduler.adviser_vocabulary import ROUNDS as GHOST_ROUNDS
from benchmarks.scheduler.judge_books import judge_catalog, judge_hour
from benchmarks.scheduler.judge_calls import LIMIT_MS, slowest
from benchmarks.scheduler.judge_hooks import judge_hooks
from benchmarks.scheduler.vocabulary import ARMS, CALLS, LARGE, OURS, RUN_CHUNKS, SMALL, books_of, hooks_of

ROUNDS, ROUNDS_AMONG_ALL = 11, 8
DECODE_STEPS = 16  # in one turn: an engine decodes many steps in a row
USE_ROUNDS, USE_ROUNDS_AMONG_ALL = 12, 8
POOL_CHUNKS = 200_000  # of the hour of sessions: full after about a fifth of it
PART_LIMIT_S = 400.0
OTHER_PARTS = 3  # the hooks, the hour, the adviser

# What the adviser costs is measured by an arm of its own, which switches it.
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "KVTIDE_ADVISER": "false",
}

PASSES = 2
"""Over work in which a call was too slow: what a neighbour did is not slow at the same place again."""


def judge(samples: Sequence[Sample]) -> Verdict:
    """Put together what the parts say.

    Raises:
        UnfitError: The samples are not of what the bars are about.
    """
    try:
        verdicts = [part(samples) for part in (judge_hooks, judge_catalog, judge_hour, judge_adviser)]
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnfitError(f"a sample is damaged: {type(error).__name__}: {error}") from None
    return Verdict(
        tuple(bar for one in verdicts for bar in one.bars),
        tuple(note for one in verdicts for note in one.notes),
        tuple(plot for one in verdicts for plot in one.plots),
    )


@benchmark(
    "scheduler_cost",
    asks="What does the scheduler half cost, and does that grow with its books?",
    about_s=130,
    alone_s=220,
    judge=judge,
)
def measure(bench: Bench) -> list[Sample]:
    """Run the parts one after another."""
    # The longest and the shortest have bars of their own.
    lengths = RUN_CHUNKS if bench.alone else (RUN_CHUNKS[0], RUN_CHUNKS[-1])
    run = _Runner(bench, OTHER_PARTS + len(lengths))
    rounds = ROUNDS if bench.alone else ROUNDS_AMONG_ALL
    use_rounds = USE_ROUNDS if bench.alone else USE_ROUNDS_AMONG_ALL
    samples = run("hooks_child:measure_hooks", (ARMS, (SMALL, LARGE), SMALL, rounds, DECODE_STEPS))
    names = [hooks_of(SMALL, False), hooks_of(LARGE, False), hooks_of(SMALL, True)]
    samples += run.again(
        samples, names, "hooks_child:measure_hooks", ((OURS,), (SMALL, LARGE), SMALL, rounds, DECODE_STEPS)
    )
    for run_chunks in lengths:
        part = ("catalog_child:measure_catalog", (LARGE, run_chunks, use_rounds))
        samples += run(*part)
        samples += run.again(samples, [books_of(run_chunks)], *part)
    samples += run("hour_child:measure_hour", (POOL_CHUNKS,))
    return samples + run("adviser_child:measure_adviser", (GHOST_POOL_CHUNKS, GHOST_ROUNDS))


class _Runner:
    """Calls functions of ``benchmarks.scheduler``, each in a process of its own."""

    def __init__(self, bench: Bench, parts: int) -> None:
        self._bench = bench
        self._parts = parts
        self._done = 0

    def __call__(self, function: str, arguments: tuple[object, ...]) -> list[Sample]:
        found: list[Sample] = in_child(
            f"benchmarks.scheduler.{function}",
            arguments,
            self._bench.folder / f"{function.partition(':')[0]}.log",
            lambda text: self._bench.progress(text, self._done, self._parts),
            PART_LIMIT_S,
            ENVIRONMENT,
        )
        self._done += 1
        return found

    def again(
        self, samples: Sequence[Sample], names: Sequence[str], function: str, arguments: tuple[object, ...]
    ) -> list[Sample]:
        """Do the work once more if a call of it was too slow; only its calls are kept."""
        more: list[Sample] = []
        for _ in range(PASSES - 1):
            if max(slowest([*samples, *more], name, OURS).ms for name in names) <= LIMIT_MS:
                break
            self._done -= 1
            more += [one for one in self(function, arguments) if one["row"] == CALLS]
        return more
