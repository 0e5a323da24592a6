"""What all engine tests share: their mark, vLLM's own warnings, and the models."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything here; what vLLM and what it imports warn of themselves is not our test's business."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.filterwarnings("ignore:::(vllm|torch|transformers)"))
