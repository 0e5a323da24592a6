"""KV cache groups, blocks and what each rank holds of them, as vLLM 0.32 would make them.

Knows layers and how they are shared out among ranks. Does not know budgets. The rules are those of vLLM's
``get_kv_cache_groups`` for models whose blocks are of one size; the tests hold the outcome against vLLM's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.errors import ConfigError
from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry
from kvtide.plan.layers import Layer, ModelLayers

STATE_WINDOW_TOKENS = 2
"""See ``GroupGeometry.window_tokens``."""

LATENTS = (GroupKind.MLA_ATTENTION, GroupKind.SLIDING_WINDOW_MLA)

MOST_RANKS = 4096


@dataclass(frozen=True, slots=True)
class Ranks:
    """How a model is shared out: layers among stages, and each layer among the ranks of a stage."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def count(self) -> int:
        """All of them."""
        return self.tensor * self.pipeline


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A KV cache group.

    Attributes:
        geometry: Its blocks and chunks.
        layer: What each of its layers keeps.
        layers: Which layers, counted from 0.
    """

    geometry: GroupGeometry
    layer: Layer
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelKV:
    """The KV cache of a model on some ranks.

    Attributes:
        layers: Of the model.
        groups: In vLLM's order of first layers.
        ranks: How it is shared out.
        kv_bytes: Of one number of KV.
        block_tokens: Of every group.
        padded_layers: Layers a group of vLLM's pool has room for.
    """

    layers: ModelLayers
    groups: tuple[PlannedGroup, ...]
    ranks: Ranks
    kv_bytes: int
    block_tokens: int
    padded_layers: int

    @property
    def geometry(self) -> KVGeometry:
        """What the scheduler half would be given."""
        return KVGeometry(tuple(group.geometry for group in self.groups), self.ranks.count)

    @property
    def is_one_prefix(self) -> bool:
        """One group that needs all chunks before a point: every chunk is as large as any other."""
        return self.geometry.is_one_prefix

    def token_bytes(self, group: PlannedGroup) -> int:
        """Bytes a token takes in all layers of a group, each counted once; 0 where states are kept."""
        return len(group.layers) * group.layer.kv_heads * group.layer.numbers_per_head * self.kv_bytes

    def state_bytes(self, group: PlannedGroup) -> int:
        """Bytes of one state of all layers of a group; 0 for attention."""
        return len(group.layers) * self._state_bytes(group.layer)

    def page_bytes(self, layer: Layer) -> int:
        """Bytes of one block of one layer on a rank."""
        if layer.state_heads:
            return self._state_bytes(layer) // self.ranks.tensor
        heads = max(1, layer.kv_heads // self.ranks.tensor)
        return heads * layer.numbers_per_head * self.block_tokens * self.kv_bytes

    def chunk_bytes(self, group: PlannedGroup, stage: int) -> int:
        """Bytes of one chunk on each rank of a stage."""
        here = stages_of(len(self.layers.layers), self.ranks.pipeline)[stage]
        layers = sum(layer in here for layer in group.layers)
        return layers * self.page_bytes(group.layer) * group.geometry.blocks_per_chunk

    def slot_bytes(self, stage: int) -> int:
        """Bytes of one slot of host memory on each rank of a stage: the largest chunk of any group."""
        return max(self.chunk_bytes(group, stage) for group in self.groups)

    @property
    def all_slots_bytes(self) -> int:
        """Bytes of one slot, all ranks together."""
        return sum(self.slot_bytes(stage) for stage in range(self.ranks.pipeline)) * self.ranks.tensor

    def shards(self, group: PlannedGroup) -> int:
        """How many different parts of a chunk the ranks of a stage hold: as ``vllm.identity`` counts them."""
        tensor, heads = self.ranks.tensor, group.layer.kv_heads
        if group.layer.kind in LATENTS:
            return 1
        alike = self.is_one_prefix and group.layer.kind is GroupKind.FULL_ATTENTION
        return heads if alike and heads < tensor else tensor

    def _state_bytes(self, layer: Layer) -> int:
        return (
            layer.convolution_numbers * self.layers.dtype_bytes
            + layer.state_numbers * self.layers.state_bytes
        )


def kv_of(
    layers: ModelLayers,
    ranks: Ranks | None = None,
    kv_bytes: int | None = None,
    block_tokens: int = 16,
    blocks_per_chunk: int = 1,
) -> ModelKV:
    """Say what a model keeps on some ranks.

    Args:
        layers: Of the model.
        ranks: One, unless said otherwise.
        kv_bytes: Of one number of KV; as the model computes unless said otherwise.
        block_tokens: As asked for; with recurrent layers it may have to be more.
        blocks_per_chunk: As the setting; groups that look back over a window keep 1.

    Raises:
        ConfigError: It cannot be shared out so.
    """
    ranks = Ranks() if ranks is None else ranks
    _refuse_ranks(layers, ranks)
    kv_bytes = layers.dtype_bytes if kv_bytes is None else kv_bytes
    block_tokens = _aligned(layers, ranks, kv_bytes, block_tokens)
    chosen = _grouped(layers.layers)
    groups = tuple(
        PlannedGroup(
            _geometry(index, layers.layers[numbers[0]], block_tokens, blocks_per_chunk),
            layers.layers[numbers[0]],
            numbers,
        )
        for index, numbers in enumerate(chosen)
    )
    return ModelKV(layers, groups, ranks, kv_bytes, block_tokens, max(map(len, chosen)))


def stages_of(layer_count: int, stage_count: int) -> list[range]:
    """Share layers out among stages as vLLM does: what is over goes to all but the last, from behind."""
    sizes = [layer_count // stage_count] * stage_count
    for number in range(layer_count % stage_count):
        sizes[-2 - number] += 1
    ends = [sum(sizes[: stage + 1]) for stage in range(stage_count)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _grouped(layers: Sequence[Layer]) -> list[tuple[int, ...]]:
    """Part layers into groups of one kind and of about as many layers as the rarest kind has."""
    buckets: dict[Layer, list[int]] = {}
    for number, layer in enumerate(layers):
        buckets.setdefault(layer, []).append(number)
    least, most = min(map(len, buckets.values())), max(map(len, buckets.values()))
    # One layer more or less than the others must not double the groups.
    size = most if most < 1.5 * least else least
    groups = []
    for numbers in buckets.values():
        count = -(-len(numbers) // size)
        groups += [tuple(numbers[first::count]) for first in range(count)]
    return groups


def _aligned(layers: ModelLayers, ranks: Ranks, kv_bytes: int, block_tokens: int) -> int:
    """Make a block of attention no smaller than a recurrent state, as vLLM does: both lie in one pool."""
    attention = next((layer for layer in layers.layers if not layer.state_heads), None)
    recurrent = next((layer for layer in layers.layers if layer.state_heads), None)
    if attention is None or recurrent is None:
        return block_tokens
    per_token = ModelKV(layers, (), ranks, kv_bytes, 1, 0).page_bytes(attention)
    state = ModelKV(layers, (), ranks, kv_bytes, 1, 0).page_bytes(recurrent)
    return block_tokens * -(-state // (block_tokens * per_token))


def _geometry(index: int, layer: Layer, block_tokens: int, blocks_per_chunk: int) -> GroupGeometry:
    window = STATE_WINDOW_TOKENS if layer.state_heads else layer.window_tokens
    looks_back = window is None and layer.local_tokens is None
    return GroupGeometry(
        index,
        layer.kind,
        block_tokens,
        blocks_per_chunk if looks_back else 1,
        block_tokens,
        window,
        layer.local_tokens,
    )


def _refuse_ranks(layers: ModelLayers, ranks: Ranks) -> None:
    if not 1 <= ranks.tensor <= MOST_RANKS:
        raise ConfigError("--tp", ranks.tensor, f"give a whole number from 1 to {MOST_RANKS}")
    if not 1 <= ranks.pipeline <= len(layers.layers):
        raise ConfigError("--pp", ranks.pipeline, f"give 1 to {len(layers.layers)}, the layers of the model")
    if layers.query_heads % ranks.tensor:
        raise ConfigError("--tp", ranks.tensor, f"must divide the {layers.query_heads} heads of the model")
    for layer in dict.fromkeys(layers.layers):
        latent = layer.kind in LATENTS
        heads = layer.state_heads or layer.kv_heads
        fits = heads % ranks.tensor == 0 or (not layer.state_heads and ranks.tensor % heads == 0)
        if not latent and not fits:
            what = "key heads of the recurrent layers" if layer.state_heads else "KV heads"
            raise ConfigError("--tp", ranks.tensor, f"does not fit the {heads} {what}")
