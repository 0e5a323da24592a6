"""What the scheduler half costs, beside vLLM's own offloading and as its books grow.

Knows which parts there are and in which order they run; each part has its own files in ``scheduler``:
who measures, in a process of its own, and who judges.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.frame.children import in_child
from benchmarks.frame.registry import Bench, Sample, UnfitError, Verdict, benchmark
from benchmarks.scheduler.judge_hooks import judge_hooks
from benchmarks.scheduler.vocabulary import LARGE, SMALL

ROUNDS = 11
DECODE_STEPS = 4
HOOKS_LIMIT_S = 400.0
PARTS = 1

ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}


def judge(samples: Sequence[Sample]) -> Verdict:
    """Put together what the parts say.

    Raises:
        UnfitError: The samples are not of what the bars are about.
    """
    try:
        return judge_hooks(samples)
    except (KeyError, TypeError, ValueError) as error:
        raise UnfitError(f"a sample is damaged: {type(error).__name__}: {error}") from None


@benchmark(
    "scheduler_cost",
    asks="What does the scheduler half cost, and does that grow with its books?",
    about_s=60,
    judge=judge,
)
def measure(bench: Bench) -> list[Sample]:
    """Run the parts one after another."""

    def tell(text: str) -> None:
        bench.progress(text, 0, PARTS)

    samples: list[dict[str, Any]] = in_child(
        "benchmarks.scheduler.hooks_child:measure_hooks",
        ((SMALL, LARGE), SMALL, ROUNDS, DECODE_STEPS),
        bench.folder / "scheduler-hooks.log",
        tell,
        HOOKS_LIMIT_S,
        ENVIRONMENT,
    )
    return list(samples)
