"""Which ranks hold the same bytes of a chunk, and so write them once.

The oracle says what a rank keeps: a stage's layers, of some heads, of some tokens. As vLLM lays it out, a
head is on neighbouring ranks where there are more ranks than heads, and decode-context parallelism gives
tokens to neighbours in turn.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry
from kvtide.tiers.records import Shard
from kvtide.tiers.replicas import writers_of
from kvtide.vllm.identity import shards_of

MLA, FULL = GroupKind.MLA_ATTENTION, GroupKind.FULL_ATTENTION


def engine(tensor: int, pipeline: int = 1, context: int = 1, heads: int = 8, drafter: Any = None) -> Any:
    parallel = SimpleNamespace(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        decode_context_parallel_size=context,
    )
    model = SimpleNamespace(get_total_num_kv_heads=lambda: heads)
    return SimpleNamespace(parallel_config=parallel, model_config=model, speculative_config=drafter)


def geometry_of(*kinds: GroupKind, ranks: int) -> KVGeometry:
    groups = [
        GroupGeometry(index, kind, 16, 1, 16, window_tokens=33 if kind is GroupKind.SLIDING_WINDOW else None)
        for index, kind in enumerate(kinds)
    ]
    return KVGeometry(tuple(groups), ranks)


def all_shards(config: Any, *kinds: GroupKind) -> list[tuple[Shard, ...]]:
    parallel = config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return [shards_of(config, geometry_of(*kinds, ranks=ranks), rank) for rank in range(ranks)]


def kept(rank: int, tensor: int, context: int, heads: int) -> tuple[int, frozenset[int], int]:
    """Stage, heads and turn among the tokens: what a rank keeps."""
    stage, place = divmod(rank, tensor)
    if tensor >= heads:
        own = {place // (tensor // heads)}
    else:
        own = set(range(place * (heads // tensor), (place + 1) * (heads // tensor)))
    return stage, frozenset(own), place % context


@pytest.mark.parametrize("pipeline", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "heads", "tensor", "context"),
    [(MLA, 1, tensor, context) for tensor in (1, 2, 4, 8) for context in (1, 2, 4, 8) if context <= tensor]
    + [
        (FULL, heads, tensor, context)
        for heads in (1, 2, 4, 8)
        for tensor in (1, 2, 4, 8, 16)
        for context in (1, 2, 4)
        if context == 1 or context <= tensor // heads
    ],
)
def test_ranks_hold_one_shard_exactly_where_they_keep_the_same(
    kind: GroupKind, heads: int, tensor: int, context: int, pipeline: int
) -> None:
    found = [shard for (shard,) in all_shards(engine(tensor, pipeline, context, heads), kind)]
    contents = [kept(rank, tensor, context, heads) for rank in range(tensor * pipeline)]
    for shard, content in zip(found, contents, strict=True):
        assert [other == shard for other in found] == [other == content for other in contents]
    assert {shard.count for shard in found} == {len(set(contents))}
    assert {shard.index for shard in found} == set(range(len(set(contents)))), "a chunk is all of them"


@pytest.mark.parametrize(
    ("config", "kind", "indices", "count"),
    [
        (engine(2), MLA, [0, 0], 1),
        (engine(4), MLA, [0, 0, 0, 0], 1),
        (engine(2, context=2), MLA, [0, 1], 2),
        (engine(4, context=2), MLA, [0, 1, 0, 1], 2),
        (engine(4, context=4), MLA, [0, 1, 2, 3], 4),
        (engine(2, pipeline=2), MLA, [0, 0, 1, 1], 2),
        (engine(4, heads=2), FULL, [0, 0, 1, 1], 2),
        (engine(8, heads=2, context=2), FULL, [0, 1, 0, 1, 2, 3, 2, 3], 4),
        (engine(4, heads=8), FULL, [0, 1, 2, 3], 4),
        (engine(2, pipeline=2, heads=8), FULL, [0, 1, 2, 3], 4),
        (engine(2, pipeline=2, heads=1), FULL, [0, 0, 1, 1], 2),
    ],
)
def test_shards_of_some_layouts_by_hand(config: Any, kind: GroupKind, indices: list[int], count: int) -> None:
    assert all_shards(config, kind) == [(Shard(index, count),) for index in indices]


def writers(config: Any, *kinds: GroupKind) -> list[tuple[int, ...]]:
    shards = all_shards(config, *kinds)
    return [writers_of(shards, rank) for rank in range(len(shards))]


def test_latents_are_written_once_by_the_lowest_rank_of_each_stage_and_turn() -> None:
    assert writers(engine(4), MLA) == [(0,)] * 4
    assert writers(engine(4, context=2), MLA) == [(0,), (1,), (0,), (1,)]
    assert writers(engine(2, pipeline=2), MLA) == [(0,), (0,), (2,), (2,)]
    assert writers(engine(4, heads=2), FULL) == [(0,), (0,), (2,), (2,)]
    assert writers(engine(4), FULL) == [(0,), (1,), (2,), (3,)]


def test_each_part_of_a_chunk_has_one_writer_and_only_those_are_asked_for_it() -> None:
    for tensor, context, pipeline in ((2, 1, 1), (4, 2, 1), (4, 1, 2), (8, 4, 2)):
        config = engine(tensor, pipeline, context)
        shards = all_shards(config, MLA)
        who = [rank for rank, (writer,) in enumerate(writers(config, MLA)) if writer == rank]
        assert sorted(shards[rank][0].index for rank in who) == list(range(shards[0][0].count))


def test_groups_of_one_model_may_be_divided_differently() -> None:
    found = all_shards(engine(4, heads=8), MLA, GroupKind.SLIDING_WINDOW_MLA)
    assert found == [(Shard(0, 1), Shard(0, 1))] * 4


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (engine(4, heads=2, drafter=object()), (FULL,)),
        (engine(4, heads=2), (FULL, GroupKind.SLIDING_WINDOW)),
        (engine(4, heads=2), (FULL, GroupKind.MAMBA)),
        (engine(4, heads=0), (FULL,)),
        (engine(3, heads=2), (FULL,)),
    ],
)
def test_where_layers_may_differ_in_heads_each_rank_has_bytes_of_its_own(
    config: Any, kinds: tuple[GroupKind, ...]
) -> None:
    ranks = config.parallel_config.tensor_parallel_size
    assert all_shards(config, *kinds) == [(Shard(rank, ranks),) * len(kinds) for rank in range(ranks)]
