"""Which groups, drafters and stages an engine under test has: drawn from all that vLLM pages.

A seed adds to a configuration what its row does not fix. Knows which combinations vLLM 0.32 runs; does not
know what any of them costs.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvtide.vllm.testing.groups import GroupShape, Kind


@dataclass(frozen=True, slots=True)
class Model:
    """What a model needs of an engine; see ``EngineShape``.

    Attributes:
        family: For counting.
        groups: Its groups.
        guesses: Of a drafter.
        stages: Of a pipeline.
        match_tokens: Tokens of a block hash.
        retention_tokens: How much the engine's own cache keeps of windows and states.
    """

    family: str
    groups: tuple[GroupShape, ...]
    guesses: int = 0
    stages: int = 1
    match_tokens: int | None = None
    retention_tokens: int | None = None


def draw_model(chance: random.Random, rank_count: int) -> Model:
    """Draw a model that runs on so many ranks."""
    able = {name: one for name, one in FAMILIES.items() if one.least_ranks <= rank_count}
    family = chance.choices(list(able), [one.weight for one in able.values()])[0]
    return FAMILIES[family].draw(chance, rank_count, family)


class _Layers:
    """Hands out groups with layers of their own."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._count = 0

    def group(
        self, tokens_per_block: int, kind: Kind = Kind.FULL, window_tokens: int | None = None, **more: Any
    ) -> GroupShape:
        """Draw how many layers and heads a group has, and whether its pages are padded.

        ``more``: of ``GroupShape``.
        """
        self._count += 1
        names = tuple(f"group{self._count}.layers.{layer}" for layer in range(self._chance.choice((1, 2, 3))))
        split = kind not in (Kind.MAMBA, Kind.RING) and self._chance.random() < 0.2
        if kind in (Kind.FULL, Kind.WINDOW, Kind.CHUNKED) and self._chance.random() < 0.4:
            more |= {"heads": 2, "words": 2}
        shape = GroupShape(names, tokens_per_block, kind, window_tokens, split=split, **more)
        padding = self._chance.choice((0, 0, 1, 3))
        return replace(shape, padded_words=shape.page_words + padding) if padding else shape


def _block(chance: random.Random) -> int:
    return chance.choice((2, 4, 4, 8))


def _window(chance: random.Random) -> int:
    return chance.choice((2, 5, 8, 13, 24, 50))


def _retention(chance: random.Random, tokens_per_block: int) -> int | None:
    return chance.choice((0, None, None, tokens_per_block, 2 * tokens_per_block))


def _full(chance: random.Random, rank_count: int, family: str) -> Model:
    group = _Layers(chance).group(_block(chance))
    if chance.random() < 0.3:
        words = tuple(chance.choice((1, 2)) for _ in group.layer_names)
        group = replace(group, words_by_layer=words, padded_words=0, heads=1)
    return Model(family, (group,))


def _windows(chance: random.Random, rank_count: int, family: str) -> Model:
    layers, block = _Layers(chance), _block(chance)
    groups = [layers.group(block)]
    groups += [layers.group(block, Kind.WINDOW, _window(chance)) for _ in range(chance.choice((1, 2)))]
    return Model(family, tuple(groups), retention_tokens=_retention(chance, block))


def _recurrent(chance: random.Random, rank_count: int, family: str) -> Model:
    layers, block = _Layers(chance), chance.choice((4, 8))
    kept = chance.random() < 0.4
    states = [
        layers.group(block, Kind.MAMBA, words=chance.choice((1, 3)), checkpoints=kept)
        for _ in range(chance.choice((1, 2)))
    ]
    # With both, vLLM 0.32 runs on from within a block and hashes it as if it had stopped at its end.
    match = chance.choice((None, None, block // 2)) if not kept else None
    return Model(
        family,
        (layers.group(block), *states),
        match_tokens=match,
        retention_tokens=_retention(chance, block),
    )


def _unequal(chance: random.Random, rank_count: int, family: str) -> Model:
    layers, block = _Layers(chance), chance.choice((2, 4))
    larger, window = chance.choice((2, 3)) * block, _window(chance)
    pairs = (
        (layers.group(larger), layers.group(block, Kind.WINDOW, window)),
        (layers.group(block), layers.group(larger, Kind.WINDOW, window)),
        (layers.group(larger), layers.group(block)),
    )
    return Model(family, chance.choice(pairs), retention_tokens=_retention(chance, larger))


def _recurrent_windows(chance: random.Random, rank_count: int, family: str) -> Model:
    layers, block = _Layers(chance), chance.choice((2, 4))
    groups = (
        layers.group(block),
        layers.group(block, Kind.MAMBA, words=2),
        layers.group(block, Kind.WINDOW, _window(chance)),
    )
    return Model(family, groups, retention_tokens=_retention(chance, block))


def _latent(chance: random.Random, rank_count: int, family: str) -> Model:
    layers, block = _Layers(chance), _block(chance)
    groups = [layers.group(block, Kind.MLA, words=chance.choice((1, 2)))]
    if chance.random() < 0.6:
        groups.append(layers.group(block, Kind.WINDOW_MLA, _window(chance)))
    elif chance.random() < 0.5:
        # Some layers keep an index beside what they attend to.
        words = tuple(chance.choice((1, 3)) for _ in groups[0].layer_names)
        groups = [replace(groups[0], words_by_layer=words, padded_words=0)]
    return Model(family, tuple(groups), retention_tokens=_retention(chance, block))


def _local(chance: random.Random, rank_count: int, family: str) -> Model:
    layers, block = _Layers(chance), chance.choice((2, 4))
    local = layers.group(block, Kind.CHUNKED, block * chance.choice((1, 2, 5)))
    return Model(family, (layers.group(block), local))


def _kept_out(chance: random.Random, rank_count: int, family: str) -> Model:
    layers, block = _Layers(chance), chance.choice((4, 8))
    kept = layers.group(block, chance.choice((Kind.MLA, Kind.FULL)))
    if chance.random() < 0.5:
        return Model(family, (kept, layers.group(8, Kind.RING, 4)))
    return Model(family, (kept, layers.group(block, Kind.REPLAY, chance.choice((1, 2, 4)) * block)))


def _context(chance: random.Random, rank_count: int, family: str) -> Model:
    layers, block = _Layers(chance), chance.choice((2, 4))
    ranks = chance.choice([count for count in (2, 4) if rank_count % count == 0])
    groups = [layers.group(block, chance.choice((Kind.FULL, Kind.MLA)), context_ranks=ranks)]
    if chance.random() < 0.4:
        groups.append(layers.group(block, Kind.MAMBA, words=2))
    return Model(family, tuple(groups), retention_tokens=_retention(chance, block * ranks))


def _stages(chance: random.Random, rank_count: int, family: str) -> Model:
    model = _windows(chance, rank_count, family)
    return replace(model, stages=2)


def _guesses(chance: random.Random, rank_count: int, family: str) -> Model:
    model = chance.choice((_full, _windows))(chance, rank_count, family)
    return replace(model, guesses=chance.choice((1, 2, 4)))


def _drafter(chance: random.Random, rank_count: int, family: str) -> Model:
    layers, block, guesses = _Layers(chance), chance.choice((2, 4)), chance.choice((1, 2, 3))
    groups = [layers.group(block), layers.group(block, draft=True)]
    if chance.random() < 0.3:
        groups.append(layers.group(block, Kind.WINDOW, _window(chance)))
    return Model(family, tuple(groups), guesses, retention_tokens=_retention(chance, block))


def _recurrent_guesses(chance: random.Random, rank_count: int, family: str) -> Model:
    layers, guesses = _Layers(chance), chance.choice((1, 2))
    groups = [layers.group(4), layers.group(4, Kind.MAMBA, words=2, guesses=guesses)]
    if chance.random() < 0.5:
        groups.append(layers.group(4, draft=True))
    return Model(family, tuple(groups), guesses, retention_tokens=_retention(chance, 4))


@dataclass(frozen=True, slots=True)
class Family:
    """Models that are drawn in one way.

    Attributes:
        draw: Draws one, for a number of ranks.
        weight: How often.
        least_ranks: With fewer it cannot be.
    """

    draw: Callable[[random.Random, int, str], Model]
    weight: int
    least_ranks: int = 1


FAMILIES: dict[str, Family] = {
    "full attention": Family(_full, 2),
    "windows": Family(_windows, 3),
    "unequal blocks": Family(_unequal, 2),
    "latent attention": Family(_latent, 2),
    "chunked-local attention": Family(_local, 2),
    "kept out": Family(_kept_out, 3),
    "recurrent": Family(_recurrent, 3),
    "recurrent and windows": Family(_recurrent_windows, 2),
    "tokens over ranks": Family(_context, 4, least_ranks=2),
    "two stages": Family(_stages, 3, least_ranks=2),
    "guesses": Family(_guesses, 2),
    "a drafter": Family(_drafter, 2),
    "recurrent and guesses": Family(_recurrent_guesses, 2),
}
"""All that is drawn."""
