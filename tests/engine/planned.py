"""What ``kvtide plan`` says of a model, held against the groups and the bytes of an engine that runs it."""

import json
from pathlib import Path

from engine.tiny_engine import TinyEngine
from kvtide.geometry import GroupGeometry
from kvtide.jobs import Direction
from kvtide.plan.fields import Fields
from kvtide.plan.groups import kv_of
from kvtide.plan.layers import layers_of

AS_THE_ENGINE_COMPUTES = {"dtype": "bfloat16", "mamba_ssm_dtype": "float32"}
"""Tiny models are saved in float32; vLLM's CPU backend keeps recurrent states in it."""


def assert_planned(engine: TinyEngine, model: Path, block_tokens: int, blocks_per_chunk: int = 1) -> None:
    """Compare the groups, their blocks and chunks, and the bytes of each, with what vLLM has allocated."""
    config = json.loads((model / "config.json").read_text()) | AS_THE_ENGINE_COMPUTES
    kv = kv_of(layers_of(Fields(config, model.name)), None, None, block_tokens, blocks_per_chunk)
    regions = engine.worker._handlers[Direction.STORE]._groups
    planned = [(*told(group.geometry), kv.chunk_bytes(group, 0)) for group in kv.groups]
    groups = engine.deciding._geometry.groups
    seen = [(*told(group), region.chunk_bytes) for group, region in zip(groups, regions, strict=True)]
    assert planned == seen


def told(group: GroupGeometry) -> tuple[object, ...]:
    """What of a group's blocks and chunks has to be foreseen."""
    return (
        group.kind,
        group.tokens_per_block,
        group.blocks_per_chunk,
        group.window_tokens,
        group.local_tokens,
    )
