"""What ``kvtide plan`` works out, held against vLLM's own rules and against ours at run time.

vLLM's grouping is asked with its own specs, made of the figures in the models' reports.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.utils import get_pp_indices
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

from kvtide.geometry import GroupKind
from kvtide.plan.fields import Fields
from kvtide.plan.groups import ModelKV, Ranks, kv_of, stages_of
from kvtide.plan.layers import layers_of
from kvtide.plan.models import configuration_of, known_models
from kvtide.tiers.replicas import writers_of
from kvtide.vllm.identity import shards_of


def kept(name: str, tensor: int = 1, pipeline: int = 1) -> ModelKV:
    return kv_of(layers_of(Fields(configuration_of(name).fields, name)), Ranks(tensor, pipeline))


def full(tokens: int, heads: int, size: int) -> KVCacheSpec:
    return FullAttentionSpec(block_size=tokens, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16)


def sliding(heads: int, size: int, window: int) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=16, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16, sliding_window=window
    )


def recurrent(tokens: int, page_bytes: int) -> KVCacheSpec:
    return MambaSpec(
        block_size=tokens,
        shapes=((8192, 3), (32, 128, 128)),
        dtypes=(torch.bfloat16, torch.bfloat16),
        page_size_padded=page_bytes,
        mamba_cache_mode="align",
    )


SPECS: dict[str, list[KVCacheSpec]] = {
    "gemma-3-27b": [
        full(16, 16, 128) if (layer + 1) % 6 == 0 else sliding(16, 128, 1024) for layer in range(62)
    ],
    "gpt-oss-120b": [full(16, 8, 64) if layer % 2 else sliding(8, 64, 128) for layer in range(36)],
    "qwen3-next-80b-a3b": [
        full(544, 2, 256) if (layer + 1) % 4 == 0 else recurrent(544, 544 * 2048) for layer in range(48)
    ],
}


@pytest.mark.parametrize("name", SPECS)
def test_vllm_parts_the_layers_of_a_published_hybrid_into_the_same_groups(name: str) -> None:
    kv = kept(name)
    groups = _get_kv_cache_groups_uniform_page_size({str(at): spec for at, spec in enumerate(SPECS[name])})
    assert [sorted(map(int, group.layer_names)) for group in groups] == [list(g.layers) for g in kv.groups]
    for group, planned in zip(groups, kv.groups, strict=True):
        spec = group.kv_cache_spec
        one = spec.real_page_size_bytes
        assert kv.chunk_bytes(planned, 0) == one * len(planned.layers)
        assert spec.block_size == planned.geometry.tokens_per_block
        assert (planned.geometry.kind is GroupKind.MAMBA) == isinstance(spec, MambaSpec)


@pytest.mark.parametrize("layers", [2, 10, 32, 61, 62])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
def test_vllm_gives_stages_the_same_layers(layers: int, stages: int) -> None:
    if layers < stages:
        stages = layers
    found = [(stage.start, stage.stop) for stage in stages_of(layers, stages)]
    assert found == [get_pp_indices(layers, stage, stages) for stage in range(stages)]


@pytest.mark.parametrize("name", known_models())
@pytest.mark.parametrize("ranks", [Ranks(1), Ranks(4), Ranks(16), Ranks(4, 2)])
def test_as_many_ranks_write_to_disk_as_a_server_would_have_write(name: str, ranks: Ranks) -> None:
    if "next" in name and ranks.tensor > 2 and ranks.tensor != 4:
        ranks = Ranks(2)
    kv = kept(name, ranks.tensor, ranks.pipeline)
    heads = configuration_of(name).fields["num_key_value_heads"]
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks.tensor,
            pipeline_parallel_size=ranks.pipeline,
            decode_context_parallel_size=1,
        ),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
        speculative_config=None,
    )
    shards = [shards_of(config, kv.geometry, rank) for rank in range(ranks.count)]
    for index, group in enumerate(kv.groups):
        assert len({of_rank[index] for of_rank in shards}) == kv.shards(group) * ranks.pipeline
    writers = {writer for rank in range(ranks.count) for writer in writers_of(shards, rank)}
    assert len(writers) == max(map(kv.shards, kv.groups)) * ranks.pipeline
