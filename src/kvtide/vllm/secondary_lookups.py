"""Which chunks a tier holds, asked by a thread and told to whoever asks in the engine's.

vLLM asks chunk by chunk, in every step, and takes "later" for an answer without end. So each question is put
to the tier once, all of a step together, and ends after a bounded time, whatever the tier does. Knows keys
and names of requests; does not know what is done with an answer.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvtide.errors import NodeUnavailableError, TierError
from kvtide.keys import OffloadKey
from kvtide.tiers.breaker import Breaker

logger = logging.getLogger(__name__)

KEYS_AT_ONCE = 256
"""In one call to the tier: the first answers of a long prompt need not wait for the last."""


@dataclass(frozen=True, slots=True)
class _Question:
    request_id: str
    key: OffloadKey
    asked_s: float
    round: int


class Lookups:
    """Answers that a tier has given, by request.

    All calls but ``contains`` are made by one thread, the engine's.

    Args:
        contains: Of the tier; may block, and may raise anything.
        name: Of the tier, for threads and logs.
        deadline_s: After which a question that has not been answered is a no.
        clock: Seconds.
    """

    def __init__(
        self,
        contains: Callable[[Sequence[OffloadKey], float], list[bool]],
        name: str,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._contains, self._name, self._deadline_s, self._clock = contains, name, deadline_s, clock
        self._breaker = Breaker()
        self._known: dict[str, dict[OffloadKey, bool | float]] = {}  # the answer, or when it was asked
        self._batch: list[_Question] = []
        self._round = 0  # answers of before a reset are of an earlier one
        self._changed = threading.Condition()
        self._asked: deque[list[_Question]] = deque()
        self._answered: deque[tuple[_Question, bool]] = deque()
        self._began_s: float | None = None  # since when the tier is being asked
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"kvtide-{name}-lookups", daemon=True)
        self._thread.start()

    # -- asked by the engine's thread ---------------------------------------------------------------

    def ask(self, request_id: str, key: OffloadKey) -> bool | None:
        """Say whether the tier holds a chunk, as far as this request is told; None: ask again later."""
        self._take_answers()
        known = self._known.setdefault(request_id, {})
        answer, now_s = known.get(key), self._clock()
        if isinstance(answer, bool):
            return answer
        if answer is None:
            if not self._is_stuck(now_s):
                known[key] = now_s
                self._batch.append(_Question(request_id, key, now_s, self._round))
                return None
        elif now_s <= answer + self._deadline_s:
            return None
        known[key] = False
        return False

    def flush(self) -> None:
        """Put the questions of a step to the tier."""
        if not self._batch:
            return
        with self._changed:
            self._asked.append(self._batch)
            self._changed.notify()
        self._batch = []

    def refuse(self, request_id: str, keys: Collection[OffloadKey]) -> None:
        """Say no to a request from now on: it was promised these, and they could not be had."""
        known = self._known.get(request_id)
        if known is not None:
            known.update(dict.fromkeys(keys, False))

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._known.pop(request_id, None)

    def reset(self) -> None:
        """Nothing that was answered holds any longer; what is asked again is put to the tier again."""
        self._round += 1
        self._batch = []
        for known in self._known.values():
            known.clear()

    def close(self, patience_s: float) -> bool:
        """End; False when the tier has not answered in time, and its thread is left to itself."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _take_answers(self) -> None:
        while self._answered:
            question, found = self._answered.popleft()
            known = self._known.get(question.request_id)
            # Not where it was refused meanwhile, or has waited for too long.
            if (
                known is not None
                and question.round == self._round
                and known.get(question.key) == (question.asked_s)
            ):
                known[question.key] = found

    def _is_stuck(self, now_s: float) -> bool:
        began_s = self._began_s
        return began_s is not None and now_s > began_s + self._deadline_s

    # -- the thread ---------------------------------------------------------------------------------

    def _work(self) -> None:
        while (batch := self._next_batch()) is not None:
            for start in range(0, len(batch), KEYS_AT_ONCE):
                part = batch[start : start + KEYS_AT_ONCE]
                if self._closing:
                    return
                if self._clock() > part[0].asked_s + self._deadline_s:
                    continue  # nobody waits for these any more
                found = self._found([question.key for question in part])
                self._answered.extend(zip(part, found, strict=True))

    def _next_batch(self) -> list[_Question] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._asked or self._closing)
            return None if self._closing else self._asked.popleft()

    def _found(self, keys: list[OffloadKey]) -> list[bool]:
        nothing = [False] * len(keys)
        if not self._breaker.allows(self._clock()):
            return nothing
        self._began_s = began_s = self._clock()
        try:
            found = self._contains(keys, self._deadline_s)
            if len(found) != len(keys):
                raise TierError(f"{len(found)} answers to {len(keys)} questions")
        except NodeUnavailableError as error:
            logger.debug("%s: %s", self._name, error)
            return nothing
        except Exception as error:  # of a tier that others wrote: serving goes on
            self._note_trouble(error)
            return nothing
        finally:
            self._began_s = None
        if self._clock() > began_s + self._deadline_s:
            self._breaker.failed(self._clock())
        else:
            self._breaker.succeeded()
        return [bool(one) for one in found]

    def _note_trouble(self, error: Exception) -> None:
        if self._breaker.failed(self._clock()):
            unforeseen = not isinstance(error, TierError)
            logger.warning("%s is not asked for a while: %s", self._name, error, exc_info=unforeseen)
