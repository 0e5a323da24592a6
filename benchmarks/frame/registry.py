"""Which benchmarks there are.

A benchmark is one file beside ``run.py`` with one function that measures, registered by name together
with the pure function that judges its samples. Importing such a file has to be cheap: what is heavy (vLLM,
torch) is imported inside the function.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.frame.bars import Bar
from benchmarks.frame.plots import Bars, Plot

Sample = Mapping[str, Any]
"""One measurement as it goes into ``results.json``: plain values, units last in the names."""


class UnfitError(Exception):
    """The benchmark could not run, or its samples are not of what they should be; says which and why."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the samples say.

    Attributes:
        bars: What was promised, and what came out.
        notes: What a reader of the bars has to know; a sentence each.
        plots: For the page.
    """

    bars: tuple[Bar, ...]
    notes: tuple[str, ...] = ()
    plots: tuple[Plot | Bars, ...] = ()


@dataclass(frozen=True, slots=True)
class Bench:
    """What a run gives to a benchmark.

    Attributes:
        folder: Where logs may be left; exists.
        model: A model's folder instead of the default model, None for that.
        progress: Told what is going on: a text, how many steps are done, and of how many.
        alone: It was asked for by name: it may take ``alone_s`` instead of ``about_s``, for more rounds.
    """

    folder: Path
    model: Path | None
    progress: Callable[[str, int, int], None]
    alone: bool = True


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark.

    Attributes:
        name: That of its file.
        asks: The question it answers, one line.
        about_s: How long it takes on a quiet machine, as one of all.
        alone_s: The same when it was asked for by name.
        measure: Takes the samples; raises ``UnfitError`` when it cannot.
        judge: Samples to verdict, pure: the same samples give the same verdict, also from a file.
    """

    name: str
    asks: str
    about_s: float
    alone_s: float
    measure: Callable[[Bench], list[Sample]]
    judge: Callable[[Sequence[Sample]], Verdict]


class Registry:
    """Benchmarks by name."""

    def __init__(self) -> None:
        self._benchmarks: dict[str, Benchmark] = {}

    def benchmark(
        self,
        name: str,
        *,
        asks: str,
        about_s: float,
        judge: Callable[[Sequence[Sample]], Verdict],
        alone_s: float | None = None,
    ) -> Callable[[Callable[[Bench], list[Sample]]], Callable[[Bench], list[Sample]]]:
        """Register the function that is decorated; without ``alone_s`` it always does the same.

        Raises:
            ValueError: The name is taken.
        """
        if name in self._benchmarks:
            raise ValueError(f"there are two benchmarks of the name {name}")

        def register(measure: Callable[[Bench], list[Sample]]) -> Callable[[Bench], list[Sample]]:
            self._benchmarks[name] = Benchmark(
                name, asks, about_s, about_s if alone_s is None else alone_s, measure, judge
            )
            return measure

        return register

    def all(self) -> list[Benchmark]:
        """Return every benchmark, by name."""
        return [self._benchmarks[name] for name in sorted(self._benchmarks)]

    def get(self, name: str) -> Benchmark:
        """Return one.

        Raises:
            KeyError: There is none of that name; says which there are.
        """
        if name not in self._benchmarks:
            raise KeyError(f"no benchmark {name!r}; there are: {', '.join(sorted(self._benchmarks))}")
        return self._benchmarks[name]


REGISTRY = Registry()
benchmark = REGISTRY.benchmark


def discover() -> Registry:
    """Import every file beside ``run.py``, so that each registers itself."""
    import benchmarks

    for module in pkgutil.iter_modules(benchmarks.__path__):
        if not module.ispkg and module.name != "run":
            importlib.import_module(f"benchmarks.{module.name}")
    return REGISTRY
