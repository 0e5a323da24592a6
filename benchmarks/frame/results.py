"""What a run leaves behind: ``results.json``, and how to judge it again.

Knows the file. The raw samples are in it, and the bars are a function of them, so a reader need not
believe the bars.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.frame.bars import Bar
from benchmarks.frame.registry import Registry, Sample, UnfitError, Verdict

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Result:
    """How one benchmark went.

    Attributes:
        name: Of the benchmark.
        asks: Its question.
        wall_s: How long it took.
        samples: As measured.
        verdict: What they say; None when there is none.
        unfit: Why there is none; "" otherwise.
    """

    name: str
    asks: str
    wall_s: float
    samples: tuple[Sample, ...]
    verdict: Verdict | None
    unfit: str = ""

    @property
    def bars(self) -> tuple[Bar, ...]:
        """Bars of the verdict."""
        return self.verdict.bars if self.verdict else ()

    def record(self) -> dict[str, object]:
        """Return what the file says of it."""
        return {
            "asks": self.asks,
            "wall_s": self.wall_s,
            "unfit": self.unfit,
            "notes": list(self.verdict.notes) if self.verdict else [],
            "bars": [bar.record() for bar in self.bars],
            "samples": [dict(sample) for sample in self.samples],
        }


def as_json(environment: Mapping[str, object], results: Sequence[Result]) -> str:
    """Return the text of ``results.json``.

    ``bars`` holds those of all benchmarks, each with the name of its benchmark; ``benchmarks`` everything
    by benchmark.
    """
    content = {
        "format": FORMAT,
        "environment": dict(environment),
        "bars": [{"benchmark": one.name, **bar.record()} for one in results for bar in one.bars],
        "benchmarks": {one.name: one.record() for one in results},
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(text)
    os.replace(draft, path)


def judged_again(path: Path, registry: Registry) -> tuple[Mapping[str, Any], list[Result]]:
    """Compute the verdicts anew from the samples of a file.

    Returns:
        The environment that the file tells of, and the results.

    Raises:
        UnfitError: The file cannot be read, or tells of a benchmark nobody knows.
    """
    try:
        content = json.loads(path.read_text())
        environment: Mapping[str, Any] = content["environment"]
        told = {
            name: (one["asks"], one["wall_s"], tuple(one["samples"]))
            for name, one in content["benchmarks"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnfitError(f"{path} is not a results.json of ours: {type(error).__name__}: {error}") from None
    results = []
    for name, (asks, wall_s, samples) in told.items():
        try:
            results.append(judged(registry, name, asks, wall_s, samples))
        except KeyError as error:
            raise UnfitError(f"{path}: {error.args[0]}") from None
    return environment, results


def judged(registry: Registry, name: str, asks: str, wall_s: float, samples: tuple[Sample, ...]) -> Result:
    """Ask the benchmark's judge; samples that are not fit to be judged are a result too.

    Raises:
        KeyError: There is no such benchmark.
    """
    judge = registry.get(name).judge
    try:
        return Result(name, asks, wall_s, samples, judge(samples))
    except UnfitError as error:
        return Result(name, asks, wall_s, samples, None, str(error))
