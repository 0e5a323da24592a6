"""How soon a restarted server knows what is on its disk, and what that costs the steps meanwhile.

A folder of 100,000 records is opened by the production tier and lane, told through the production worker
half, and taken into the books by the production scheduler half, a step at a time as an idle vLLM would step.
The limit is the promise; beside it stands what SQLite takes to read the same rows.
"""

from collections.abc import Sequence

from benchmarks.frame.bars import at_most
from benchmarks.frame.children import in_child
from benchmarks.frame.registry import Bench, Sample, UnfitError, Verdict, benchmark
from benchmarks.frame.statistics import median, spread

RECORDS = 100_000
PROMPTS = 1_000
ROUNDS = 5
WARM_LIMIT_S = 5.0
HOOK_LIMIT_S = 0.005
LIMIT_S = 300.0


def judge(samples: Sequence[Sample]) -> Verdict:
    """Hold the median start and hook against their limits.

    Raises:
        UnfitError: The samples are not of what the bars are about.
    """
    try:
        short = [one for one in samples if one["found"] != RECORDS]
        if len(samples) < ROUNDS or short:
            raise UnfitError(f"{len(samples)} starts, {len(short)} of them without all {RECORDS:,} records")
        warm_s = [one["warm_s"] for one in samples]
        hooks_s = [one["slowest_hook_cpu_s"] for one in samples]
        rows_s = [one["rows_s"] for one in samples]
    except (KeyError, TypeError) as error:
        raise UnfitError(f"a sample is damaged: {type(error).__name__}: {error}") from None
    bars = (
        at_most(
            f"{RECORDS:,} records, from opening the folder to warm books, seconds",
            median(warm_s),
            WARM_LIMIT_S,
        ),
        at_most("slowest hook of either half meanwhile, CPU seconds", median(hooks_s), HOOK_LIMIT_S),
    )
    notes = (
        f"warm after {spread(warm_s)} s; the index's rows alone are read in {spread(rows_s)} s",
        f"slowest hook {spread(hooks_s)} s of CPU time; {samples[0]['steps']} steps in the first start",
    )
    return Verdict(bars, notes)


@benchmark(
    "warm_start",
    asks="How soon does a restarted server know what is on its disk?",
    about_s=20,
    judge=judge,
)
def measure(bench: Bench) -> list[Sample]:
    """Write the folder once, then start on it several times."""
    samples: list[Sample] = in_child(
        "benchmarks.storage.warm_child:measure_starts",
        (str(bench.folder / "warm"), RECORDS, PROMPTS, ROUNDS),
        bench.folder / "warm.log",
        lambda text: bench.progress(text, 0, 1),
        LIMIT_S,
        {},
    )
    return samples
