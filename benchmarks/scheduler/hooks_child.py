"""The rows 1a to 1e: both arms in one process, taking turns.

Knows in which order engines are built, filled and asked. kvtide's comes first and is filled alone, so that no
collection of garbage during its hooks walks over the other's books.
"""

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.frame.children import Tell
from benchmarks.frame.rounds import rounds
from benchmarks.scheduler.engine import Engine
from benchmarks.scheduler.filling import Filler
from benchmarks.scheduler.rows import Chat, Waiting, rested, store_and_load
from benchmarks.scheduler.vocabulary import CALLS, FULL, LONG_CHUNKS, hooks_of


def measure_hooks(
    tell: Tell,
    arms: tuple[str, ...],
    sizes: tuple[int, ...],
    prompt_only_size: int,
    count: int,
    decode_steps: int,
) -> list[dict[str, Any]]:
    """Take all samples.

    Args:
        tell: Is told what is going on.
        arms: Who takes turns; ours alone in a pass that only looks for slow calls.
        sizes: Chunks of the pools, each with all arms.
        prompt_only_size: The same, for engines that do not store what is generated.
        count: Rounds of each row.
        decode_steps: Steps of each turn of 1d.
    """
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            samples += _Engines(tell, arms, size, False, Path(folder)).measure(count, decode_steps)
        samples += _Engines(tell, arms, prompt_only_size, True, Path(folder)).measure_decode(
            count, decode_steps
        )
    return samples


class _Engines:
    """All arms with pools of one size, filled to the last chunk with prompts of 32 chunks."""

    def __init__(self, tell: Tell, arms: tuple[str, ...], size: int, prompt_only: bool, folder: Path) -> None:
        self._tell = tell
        self._arms = arms
        self._size = size
        self._told = {"resident_chunks": size, "prompt_only": prompt_only}
        self._samples: list[dict[str, Any]] = []
        self._engines: dict[str, Engine] = {}
        self._fillers: dict[str, Filler] = {}
        for arm in self._arms:
            self._engines[arm] = Engine(arm, size, prompt_only, folder)
            self._fillers[arm] = Filler(self._engines[arm])
            gc.freeze()
            self._engines[arm].clock.calls.forget()
            self._engines[arm].clock.calls.phase = "filling"
            self._fillers[arm].fill(size, self._filling(arm))
            resident = self._engines[arm].resident_chunks()
            self._samples.append(self._told | {"row": FULL, "arm": arm, "chunks": resident})
            gc.freeze()

    def _filling(self, arm: str) -> Callable[[int], None]:
        step = 200_000
        told = step

        def progress(done: int) -> None:
            nonlocal told
            if done >= told:
                self._tell(f"{arm}: {done:,} of {self._size:,} chunks")
                told += step

        return progress

    def measure(self, count: int, decode_steps: int) -> list[dict[str, Any]]:
        """All rows; those that wait come first, as nothing may have been computed before."""
        self._wait(count)
        self._decode(count, decode_steps)
        self._begin("storing and loading")
        for index, order in rounds(self._arms, count):
            for place, arm in enumerate(order):
                # At least as many chunks as the long prompt has pushed out, and all of a small pool.
                self._fillers[arm].fill(min(self._size, 2 * LONG_CHUNKS))
                for sample in store_and_load(self._engines[arm], f"long/{index}"):
                    self._note(sample, arm, index, place)
        return self._ended()

    def measure_decode(self, count: int, decode_steps: int) -> list[dict[str, Any]]:
        """The decode row alone."""
        self._decode(count, decode_steps)
        return self._ended()

    def _wait(self, count: int) -> None:
        self._begin("waiting requests")
        waiting = {arm: Waiting(self._engines[arm], self._fillers[arm]) for arm in self._arms}
        for changed in (False, True):
            for index, order in rounds(self._arms, count):
                for place, arm in enumerate(order):
                    for sample in waiting[arm].steps(changed, 1):
                        self._note(sample, arm, index, place)
        for one in waiting.values():
            one.end()
        rested(list(self._engines.values()))

    def _decode(self, count: int, decode_steps: int) -> None:
        self._begin("decoding")
        chats = {arm: Chat(self._engines[arm]) for arm in self._arms}
        for index, order in rounds(self._arms, count):
            for place, arm in enumerate(order):
                for sample in chats[arm].steps(decode_steps):
                    self._note(sample, arm, index, place)
        for chat in chats.values():
            chat.end()
        rested(list(self._engines.values()))

    def _begin(self, phase: str) -> None:
        self._tell(f"{phase}, {self._size:,} chunks")
        for engine in self._engines.values():
            engine.clock.calls.phase = phase

    def _note(self, sample: dict[str, Any], arm: str, index: int, place: int) -> None:
        self._samples.append(self._told | {"arm": arm, "round": index, "place": place} | sample)

    def _ended(self) -> list[dict[str, Any]]:
        of = hooks_of(self._size, self._told["prompt_only"])
        for arm, engine in self._engines.items():
            calls = {"row": CALLS, "of": of, "arm": arm} | engine.clock.calls.record()
            self._samples.append(calls)
        rested(list(self._engines.values()))
        return self._samples
