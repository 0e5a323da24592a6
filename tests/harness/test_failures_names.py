"""Failures of the field, F3, F4 and F8: geometry counted wrong, caches that are only written, weak names.

Each test has in ``failure_rules.py`` the line of the connector without which it fails.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_groups import ask, engine_of, tokens
from test_lives import PROMPT, Build, hit_tokens, run
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from kvtide.errors import LayoutError
from kvtide.jobs import CPULoadStoreSpec, Direction, GPULoadStoreSpec, Hop, JobId
from kvtide.testing import HeldDevice
from kvtide.transfer.handler import SingleDirectionOffloadingHandler
from kvtide.transfer.pool import HostPool
from kvtide.transfer.region import group_regions, layer_view
from kvtide.vllm.testing import EngineShape, ModelEngine
from kvtide.vllm.testing import shape as shapes
from kvtide.vllm.testing.asks import ADAPTERS
from kvtide.vllm.testing.groups import GroupShape, Kind
from kvtide.vllm.testing.model import PatternModel
from kvtide.vllm.testing.shape import Runner

FULL = GroupShape(("full.0", "full.1"), 4)
WINDOW = GroupShape(("window.0",), 4, Kind.WINDOW, 9)


@pytest.fixture
def engine(tmp_path: Path, asynchronous: bool) -> Callable[[EngineShape], ModelEngine]:
    """Builds an engine whose copies are instant, in both kinds of scheduling."""
    return lambda shape: engine_of(tmp_path, replace(shape, asynchronous=asynchronous))


# -- F3: geometry counted wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True])
def test_of_a_hybrid_model_only_what_has_a_hash_is_stored_in_every_group(build: Build) -> None:
    # vLLM #43884: with asynchronous scheduling, tokens are counted that nobody has sampled yet.
    harness = build(window_tokens=5, num_blocks=257, host_pages=64)
    prompts = {"one": PROMPT, "two": [*PROMPT[:20], 9, 8, 7]}
    harness.store.auto_finish = True
    for name, prompt in prompts.items():
        harness.add(name, prompt, 300)
    for _ in range(350):
        if harness.scheduler.has_requests():
            harness.step()
    harness.drain(limit=400)
    for name, prompt in prompts.items():
        assert harness.outputs[name] == PatternModel.answer(prompt, 300)
        harness.scheduler.reset_prefix_cache()
        before = hit_tokens(harness)
        run(harness, f"{name} again", prompt + harness.outputs[name], 2)
        assert hit_tokens(harness) - before >= 300


def test_a_group_that_cannot_be_cached_by_prefix_stays_out_of_every_count(
    engine: Callable[[EngineShape], ModelEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM #54413: 4 tokens of scratch beside blocks of 3,584.
    monkeypatch.setattr(shapes, "MAX_MODEL_LEN", 16384)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    scratch = GroupShape(("scratch.0",), 4, Kind.RING, 4)
    wide = GroupShape(("full.0", "full.1"), 3584)
    one = engine(EngineShape(9, (scratch, wide), budget_tokens=4096, host_pages=64))
    prompt = tokens(2 * 3584 + 5, seed=3)
    assert ask(one, "first", prompt, 2) == 0
    one.scheduler.reset_prefix_cache()
    assert ask(one, "again", prompt, 2) == 2 * 3584
    one.close()


def test_k_and_v_packed_in_the_last_dimension_come_back_and_what_is_not_one_piece_is_refused() -> None:
    # LMCache #4463: with 2 KV heads, "K and V, then heads" and "heads, then K and V" have one shape.
    packed = torch.arange(6 * 2 * 4 * 16, dtype=torch.int32).view(6, 2, 4, 16)
    separate = packed.clone().view(6, 2, 4, 16)
    regions = group_regions([layer_view("packed", packed, 6), layer_view("separate", separate, 6)], 1)
    pool = HostPool(2, regions.chunk_bytes, prefault=False)
    before = packed[3:5].clone()
    blocks = GPULoadStoreSpec((3, 4), (2,), (0,))
    slots = CPULoadStoreSpec((1, 0), (2,))
    for direction, hop in (
        (Direction.STORE, Hop(blocks, slots)),
        (Direction.LOAD, Hop(slots, GPULoadStoreSpec((0, 1), (2,), (0,)))),
    ):
        copier = HeldDevice(direction)
        handler = SingleDirectionOffloadingHandler(direction, [regions], pool, copier)
        handler.transfer_async(JobId(0), hop, 1.0)
        copier.finish()
        packed[3:5] = separate[3:5] = 0
    assert torch.equal(packed[:2], before)
    assert torch.equal(separate[:2], before)
    with pytest.raises(LayoutError, match="not one dense piece"):
        layer_view("K outermost", torch.zeros(2, 6, 4, 16).transpose(0, 1), 6)


# -- F4: a cache that is only ever written ----------------------------------------------------------------


@pytest.mark.parametrize("window_tokens", [5, 8, 9])
@pytest.mark.parametrize("with_draft", [True, False])
@pytest.mark.parametrize("restore_interval", [0, 64])
def test_a_window_is_hit_again_with_and_without_a_draft_group_beside_it(
    engine: Callable[[EngineShape], ModelEngine], restore_interval: int, window_tokens: int, with_draft: bool
) -> None:
    # vLLM #53951: the writer kept ``tail`` blocks, the reader wanted ``tail + 1``.
    groups: tuple[GroupShape, ...] = (FULL, replace(WINDOW, window_tokens=window_tokens))
    if with_draft:
        groups += (GroupShape(("draft.0",), 4, draft=True),)
    guesses = 2 if with_draft else 0
    runner = Runner.V1_DRAFTING if with_draft else Runner.V1
    shape = EngineShape(65, groups, budget_tokens=16, guesses=guesses, runner=runner, host_pages=16)
    one = engine(replace(shape, settings={"restore_interval": restore_interval}))
    prompt = tokens(41, seed=4)
    assert ask(one, "first", prompt, 2) == 0
    one.scheduler.reset_prefix_cache()
    assert ask(one, "again", prompt, 2) >= 36
    one.close()


def test_with_a_drafter_that_keeps_nothing_a_prompt_of_one_chunk_is_hit(
    engine: Callable[[EngineShape], ModelEngine],
) -> None:
    # vLLM #52735: every group dropped its last chunk, a group of one chunk dropped to 0, and so did the hit.
    one = engine(EngineShape(65, (FULL, WINDOW), guesses=2, runner=Runner.V1_DRAFTING))
    prompt = tokens(5, seed=5)
    assert ask(one, "first", prompt, 1) == 0
    one.scheduler.reset_prefix_cache()
    assert ask(one, "again", prompt, 1) == 4
    one.close()


# -- F8: identity too weak --------------------------------------------------------------------------------


def test_two_adapters_with_one_prompt_do_not_share_what_they_keep(build: Build) -> None:
    # vLLM #44250
    harness = build()
    hits = []
    for index, adapter in enumerate((ADAPTERS[0], ADAPTERS[1], None, ADAPTERS[0])):
        harness.scheduler.reset_prefix_cache()
        before = hit_tokens(harness)
        name = f"request {index}"
        harness.add(name, PROMPT, 2, lora_request=adapter)
        harness.drain()
        hits.append(hit_tokens(harness) - before)
        identity = f"{adapter.lora_name}/None" if adapter is not None else ""
        assert harness.outputs[name] == PatternModel.answer(PROMPT, 2, identity)
    assert hits == [0, 0, 0, 28]


def test_two_images_behind_equal_placeholders_do_not_share_what_they_keep(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    # LMCache #690
    harness = build()
    expect, hash_blocks = harness.oracle.expect, harness._hasher
    prompt = [*PROMPT[:4], *[96] * 8, *PROMPT[4:]]

    def image_of(request_id: str) -> int:
        return 90 if request_id.startswith("cat") else 91

    def seen(prompt: list[int], image: int) -> list[int]:
        """What the model computes with: the image in place of its placeholders."""
        return [image if token == 96 else token for token in prompt]

    def expect_image(request_id: str, prompt: list[int], *rest: Any) -> Any:
        return expect(request_id, seen(prompt, image_of(request_id)), *rest)

    def hash_with_image(request: Request) -> Any:
        # The engine under test has no encoder: of the image, the request keeps only what it does to hashes.
        place = PlaceholderRange(offset=4, length=8)
        name = str(image_of(request.request_id))
        request.mm_features = [MultiModalFeatureSpec(None, "image", name, place)]
        try:
            return hash_blocks(request)
        finally:
            request.mm_features = []

    monkeypatch.setattr(harness.oracle, "expect", expect_image)
    monkeypatch.setattr(harness, "_hasher", hash_with_image)
    hits = []
    for name in ("cat 1", "dog 1", "cat 2"):
        harness.scheduler.reset_prefix_cache()
        before = hit_tokens(harness)
        harness.add(name, prompt, 2)
        harness.drain()
        hits.append(hit_tokens(harness) - before)
        assert harness.outputs[name] == PatternModel.answer(seen(prompt, image_of(name)), 2)
    assert hits == [0, 4, 36], "what stands before the image is shared"
