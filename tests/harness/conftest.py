"""The harness in both kinds of scheduling."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtide.vllm.testing import Harness


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def build(tmp_path: Path, asynchronous: bool) -> Callable[..., Harness]:
    def build_harness(**arguments: Any) -> Harness:
        arguments.setdefault("asynchronous", asynchronous)
        return Harness(tmp_path, **arguments)

    return build_harness
