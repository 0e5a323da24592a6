"""What holds for every test."""

import gc
import logging
from collections.abc import Iterator

import pytest


def pytest_collection_finish() -> None:
    """Leave out of every collection of garbage what was imported for the tests: it stays until the end.

    Vast where vLLM is among it: 20 ms of a test that collects a dozen times become ten seconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Keep our lines where pytest sees them: vLLM's logger, once configured, does not propagate."""
    ours = logging.getLogger("kvtide")
    parent, ours.parent = ours.parent, logging.getLogger()
    yield
    ours.parent = parent
