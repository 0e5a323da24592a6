"""Which running requests are worth a look in a step.

A request that decodes gains a token a step, so one that lacks 200 tokens of its next piece need not be looked
at for 200 steps: of hundreds that decode, a step looks at the few whose turn it is. Knows request ids and
steps; what is looked for is the scheduler's business.
"""

from collections.abc import Container


class DueRequests:
    """Request ids by the step in which they are to be looked at.

    Attributes:
        soon: To be looked at in the first step that schedules them.
    """

    def __init__(self) -> None:
        self.soon: set[str] = set()
        self._step = 0
        self._at_step: dict[int, list[str]] = {}

    def begin_step(self, known: Container[str]) -> None:
        """Count a step; those whose turn it is are due soon, unless they are gone."""
        self._step += 1
        self.soon.update(one for one in self._at_step.pop(self._step, ()) if one in known)

    def look_after(self, request_id: str, token_count: int, limit: int) -> None:
        """Note that a request was looked at and lacks so many tokens; ``limit`` or more are never reached."""
        if token_count <= 0:
            self.soon.add(request_id)
            return
        self.soon.discard(request_id)
        if token_count < limit:
            self._at_step.setdefault(self._step + token_count, []).append(request_id)
