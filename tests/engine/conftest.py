"""What all engine tests share: their mark, and vLLM's own warnings."""

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NO_VLLM = pytest.mark.skip(reason="vLLM is not installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything here; what vLLM and what it imports warn of themselves is not our test's business."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.engine)
        item.add_marker(pytest.mark.filterwarnings("ignore:::(vllm|torch|transformers)"))
        if importlib.util.find_spec("vllm") is None:
            item.add_marker(NO_VLLM)
