"""What the random walks have found, each as short as it can be told."""

from collections.abc import Callable

import pytest

from kvtide.vllm.testing import Harness, Siblings
from kvtide.vllm.testing.model import PatternModel

Build = Callable[..., Harness]
PROMPT = list(range(1, 31))  # 7 whole blocks of 4 tokens, and 2 tokens


class Ordered:
    """Takes the place of chance in a sibling: so many steps, and well or not."""

    def __init__(self, steps: int, fails: bool = False) -> None:
        self._steps = steps
        self._fails = fails

    def randrange(self, _: int) -> int:
        return self._steps

    def random(self) -> float:
        return 0.0 if self._fails else 1.0


def held_by_the_sibling(tokens: int) -> dict[str, object]:
    return {"extra_args": {"kv_transfer_params": {"sibling_tokens": tokens}}}


@pytest.mark.xfail(strict=True, reason="blocks that another connector was loading into are stored")
def test_a_request_aborted_while_another_connector_loads_is_not_stored(build: Build) -> None:
    harness = build(siblings=Siblings.AFTER)
    harness.sibling.chance = Ordered(steps=4)
    harness.add("loading", PROMPT, 1, **held_by_the_sibling(28))
    harness.step()
    harness.abort("loading")
    harness.store.auto_finish = True  # before the sibling has brought anything
    harness.drain()
    harness.scheduler.reset_prefix_cache()
    harness.add("reader", PROMPT, 1)
    harness.drain()
    assert harness.outputs["reader"] == PatternModel.answer(PROMPT, 1)


@pytest.mark.xfail(strict=True, reason="vLLM reserves a failed load's blocks against the request's next load")
def test_a_request_whose_load_failed_is_not_offered_another_load(build: Build) -> None:
    # vLLM 0.32 keeps a request whose load has failed among its in-flight prefills: the blocks it still needs
    # are reserved against its own next load, and where both do not fit the engine stands still.
    harness = build(num_blocks=13, siblings=Siblings.BEFORE)
    harness.sibling.chance = Ordered(steps=0, fails=True)
    harness.add("writer", PROMPT, 1)
    harness.drain()
    harness.scheduler.reset_prefix_cache()
    harness.add("reader", PROMPT, 1, **held_by_the_sibling(28))
    harness.drain()
    assert harness.outputs["reader"] == PatternModel.answer(PROMPT, 1)

