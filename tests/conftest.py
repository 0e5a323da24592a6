"""What holds for every test."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Keep our lines where pytest sees them: vLLM's logger, once configured, does not propagate."""
    ours = logging.getLogger("kvtide")
    parent, ours.parent = ours.parent, logging.getLogger()
    yield
    ours.parent = parent
