"""Layouts of the KV cache: which one kvtide asks vLLM for, what each does to bytes, and what is refused.

The choice is held against vLLM's own: what we ask for has to be what vLLM 0.32 takes without a warning.
"""

import itertools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_groups import ask, empty, engine_of, tokens
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends import utils
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvtide.errors import LayoutError
from kvtide.vllm.layout import geometry_of, layout_among, required_layout
from kvtide.vllm.testing.groups import GroupShape, Kind
from kvtide.vllm.testing.shape import EngineShape

LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC = (
    KVCacheLayout[name] for name in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
)
COMPACT = (LBHNC, LBNHC, BLHNC, BLNHC)


# -- what is asked for ---------------------------------------------------------------------------------


class AnyBackend:
    """An attention backend, as far as layouts go."""

    layouts: tuple[KVCacheLayout, ...] | None = None
    sizes: tuple[Any, ...] = (MultipleOf(16),)
    recurrent = False

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        return cls.__module__, cls.__qualname__

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        return cls.layouts

    @classmethod
    def get_supported_kernel_block_sizes(cls, spec: object = None) -> list[Any]:
        return list(cls.sizes)

    @classmethod
    def is_ssm(cls) -> bool:
        return cls.recurrent


def backend(**values: Any) -> type[AnyBackend]:
    return type(f"Backend{next(NUMBERS)}", (AnyBackend,), values)


NUMBERS = itertools.count()


class Layer(AttentionLayerBase):
    def __init__(self, backend: type[AnyBackend]) -> None:
        self._backend = backend

    def get_attn_backend(self) -> Any:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        raise NotImplementedError


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    """An engine with kvtide on an accelerator, before its layout is resolved."""
    config = EngineShape().vllm_config(tmp_path)
    config.device_config.device_type = "cuda"
    config.cache_config.kv_cache_layout = None
    config.cache_config.block_size = 64
    return config


def asked(config: VllmConfig, *backends: type[AnyBackend]) -> str | None:
    layers = {f"layer.{index}": Layer(one) for index, one in enumerate(backends)}
    config.compilation_config.static_forward_context = layers
    return required_layout(config)


RECURRENT = backend(recurrent=True, sizes=())
MODELS: dict[str, tuple[list[type[AnyBackend]], str | None]] = {
    "whatever the kernels are given": ([AnyBackend], "BLNHC"),
    "heads first": ([backend(layouts=(LBHNC, BLHNC))], "BLHNC"),
    "tokens first": ([backend(layouts=(LBNHC, BLNHC, BLHNC))], "BLNHC"),
    "one layout": ([backend(layouts=(LBNHC,))], None),
    "heads apart by preference": ([backend(layouts=(LHBNC, LBHNC))], "LBHNC"),
    "heads apart and nothing else": ([backend(layouts=(LHBNC, BHLNC))], None),
    "block outermost already": ([backend(layouts=(BLHNC,))], "BLHNC"),
    "two that agree on one": ([backend(layouts=(LBHNC, BLHNC)), backend(layouts=(BLNHC, BLHNC))], "BLHNC"),
    "states beside attention": ([AnyBackend, RECURRENT], "BLNHC"),
    "blocks that kernels split": ([backend(sizes=(32,))], None),
    "blocks that kernels split, heads apart": (
        [backend(layouts=(LHBNC, BLHNC, LBHNC), sizes=(32,))],
        "LBHNC",
    ),
    "blocks that kernels take": ([backend(sizes=(32, 64))], "BLNHC"),
}


@pytest.mark.parametrize("name", MODELS)
def test_vllm_takes_what_is_asked_for_and_warns_of_nothing(
    config: VllmConfig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends, expected = MODELS[name]
    assert asked(config, *backends) == expected
    warned: list[str] = []
    monkeypatch.setattr(utils.logger, "warning_once", lambda text, *_: warned.append(text))
    names = [layout.name for layout in utils.get_supported_kv_cache_layouts(backends)]  # type: ignore[arg-type]
    resolved = utils.resolve_kv_cache_layout(config, [names])
    assert resolved.name == (expected or names[0])
    assert warned == []


def test_what_vllm_was_told_to_use_is_used(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "NHD")
    names = [layout.name for layout in utils.get_supported_kv_cache_layouts([AnyBackend])]  # type: ignore[list-item]
    assert utils.resolve_kv_cache_layout(config, [names]) is LBNHC


def test_without_layers_in_this_process_the_backend_is_the_one_that_vllm_selects(config: VllmConfig) -> None:
    # On this platform it is that of the CPU, which reads one layout.
    assert asked(config) is None


@pytest.mark.parametrize(
    ("is_hybrid", "user_specified", "sizes", "expected"),
    [
        (False, False, (32,), "BLNHC"),  # workers choose 32
        (False, True, (32,), None),
        (False, True, (MultipleOf(16),), "BLNHC"),
        (True, False, (32,), None),  # a multiple of 32
        (True, False, (MultipleOf(16),), "BLNHC"),
    ],
)
def test_before_workers_have_chosen_a_block_size(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    is_hybrid: bool,
    user_specified: bool,
    sizes: tuple[Any, ...],
    expected: str | None,
) -> None:
    chosen = backend(sizes=sizes)
    monkeypatch.setattr("vllm.v1.attention.selector.get_attn_backend", lambda **_: chosen)
    monkeypatch.setattr(type(config.model_config), "is_hybrid", property(lambda _: is_hybrid))
    config.cache_config.user_specified_block_size = user_specified
    assert asked(config) == expected


def test_where_the_backend_cannot_be_known_the_choice_is_vllms(
    config: VllmConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvtide"):
        assert asked(config, backend(layouts=(LBNHC,)), backend(layouts=(LBHNC,))) is None
    assert "asks for no KV cache layout" in caplog.text
    config.device_config.device_type = "cpu"
    assert asked(config, AnyBackend) is None


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_is_asked_for_is_always_among_the_candidates(count: int) -> None:
    for candidates in itertools.permutations(KVCacheLayout, count):
        for splits in (False, True):
            name = layout_among(candidates, splits)
            chosen = KVCacheLayout[name] if name else candidates[0]
            assert chosen in candidates
            # Whole blocks wherever there is one, and outermost wherever kernels allow it.
            assert chosen.is_block_compact == any(one.is_block_compact for one in candidates)
            if not splits and set(candidates) & {BLHNC, BLNHC}:
                assert chosen.is_block_outermost


# -- what it does to bytes -------------------------------------------------------------------------------


def group(name: str, *arguments: Any, **more: Any) -> GroupShape:
    return GroupShape((f"{name}.0", f"{name}.1"), *arguments, words=4, heads=2, **more)


GROUPS = {
    "alone": (group("full", 4),),
    "padded": (group("full", 4, padded_words=19),),
    "split": (group("full", 4, split=True),),
    "beside a window, of other pages": (
        group("full", 4),
        group("window", 4, Kind.WINDOW, 10, padded_words=21),
    ),
    "beside states": (group("full", 4), GroupShape(("state.0",), 4, Kind.MAMBA, words=3)),
}


@pytest.mark.parametrize("layout", COMPACT, ids=lambda layout: layout.name)
@pytest.mark.parametrize("groups", GROUPS)
def test_every_compact_layout_is_stored_and_hit_exactly(
    tmp_path: Path, layout: KVCacheLayout, groups: str
) -> None:
    shape = EngineShape(
        num_blocks=65,
        groups=GROUPS[groups],
        block_first=layout.is_block_outermost,
        token_first=layout.name.endswith("NHC"),
        settings={"self_test": True, "blocks_per_chunk": 2},
    )
    assert shape.layout is layout
    engine = engine_of(tmp_path, shape)
    (view, *_) = engine.memory.kv_caches[0].values()
    # Of two heads the order shows in the strides of what vLLM hands over.
    assert (view.stride(1) > view.stride(2)) == layout.name.endswith("HNC")
    prompt = tokens(43, seed=3)
    assert ask(engine, "first", prompt) == 0
    empty(engine)
    assert ask(engine, "again", prompt) >= 32
    engine.close()


@pytest.mark.parametrize("layout", [LHBNC, BHLNC], ids=lambda layout: layout.name)
def test_a_layout_that_keeps_heads_apart_is_refused_by_name(tmp_path: Path, layout: KVCacheLayout) -> None:
    shape = EngineShape(groups=GROUPS["alone"])
    config = shape.vllm_config(tmp_path)
    (described,) = shape.kv_cache_configs(config)
    described.kv_cache_layout = layout.name
    with pytest.raises(LayoutError, match=f"{layout.name} keeps the heads.*LBHNC.*VLLM_KV_CACHE_LAYOUT"):
        geometry_of(config, described, 1)
    (of_one_head,) = replace(shape, groups=(GroupShape(("one.0",), 4),)).kv_cache_configs(config)
    of_one_head.kv_cache_layout = layout.name
    assert geometry_of(config, of_one_head, 1).groups
