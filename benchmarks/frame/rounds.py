"""In which order things are measured that are to be compared, and which rounds count.

Knows arms, rounds and how busy the machine was; not what was measured. What drifts (heat, neighbours, page
cache) falls on every arm alike when they take turns, and first place falls on every arm equally often when
the order rotates.
"""

import itertools
from collections.abc import Iterator, Sequence

from benchmarks.frame.registry import Sample, UnfitError


def rounds(arms: Sequence[str], count: int | None = None) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield ``count`` rounds, or without end, as (round index, arms in order): A B, B A, A B, ..."""
    for index in itertools.count() if count is None else range(count):
        first = index % len(arms)
        yield index, (*arms[first:], *arms[:first])


def whole_rounds(samples: Sequence[Sample], arms: Sequence[str]) -> list[dict[str, Sample]]:
    """Sort samples into rounds, each with exactly one sample of every arm.

    Args:
        samples: With ``round`` and ``arm``.
        arms: Which there have to be.

    Raises:
        UnfitError: A round has lost a sample, or has one too many.
    """
    found: dict[int, dict[str, Sample]] = {}
    for sample in samples:
        one = found.setdefault(sample["round"], {})
        if sample["arm"] in one or sample["arm"] not in arms:
            raise UnfitError(f"round {sample['round']}: a sample of {sample['arm']} too many")
        one[sample["arm"]] = sample
    for index, one in found.items():
        if len(one) < len(arms):
            raise UnfitError(f"round {index}: no sample of {', '.join(sorted(set(arms) - set(one)))}")
    return [found[index] for index in sorted(found)]


def undisturbed(rounds_: Sequence[dict[str, Sample]], quiet_cores: float) -> list[dict[str, Sample]]:
    """Keep the rounds during which others used at most ``quiet_cores`` of the processors.

    The rule looks at the machine only, never at what was measured.
    """
    return [
        one
        for one in rounds_
        if all(sample["others_cores"] + sample["stolen_cores"] <= quiet_cores for sample in one.values())
    ]
