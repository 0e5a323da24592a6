"""What one step of the engine stores, and the queues that nobody has set."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ByteSize

from kvtide.config import KVTideConfig
from kvtide.vllm import connector
from kvtide.vllm.testing import Harness

BLOCK_BYTES = 3 * 4 * 8  # three layers, four tokens, a word each


def test_both_halves_size_a_disks_queue_by_what_one_step_stores(
    build: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []

    def sized_for(config: KVTideConfig, step_bytes: int, rank_count: int) -> KVTideConfig:
        told.append((step_bytes, rank_count))
        return config.model_copy(update={"disk_queue": ByteSize(123_456)})

    monkeypatch.setattr(connector, "sized_for", sized_for)
    harness = build(budget_tokens=256, disk=str(tmp_path / "disk"), disk_limit="64MiB", disk_reserve=0)
    # 64 whole blocks, and a block that each of 16 requests begins.
    assert told == [((64 + 16) * BLOCK_BYTES, 1)] * 2
    (tier,) = harness.connector._deciding._lower._ladder.tiers
    lanes = [rank._worker._hops._seats[0].lane for rank in harness.ranks]
    assert [tier.plan.queue_bytes, *(lane._settings.queue_bytes for lane in lanes)] == [123_456] * 2
