"""What fits, when loading pays and what to set, against figures worked out by hand."""

from dataclasses import replace

import pytest

from kvtide.config import KVTideConfig, resolve
from kvtide.errors import ConfigError
from kvtide.plan.accelerators import accelerator_named, known_accelerators
from kvtide.plan.advice import Budget
from kvtide.plan.breakeven import break_evens, bytes_to_load, engine_of, pairs_of
from kvtide.plan.capacity import all_chunks, chunks_of, conversation_of, in_host_memory, on_device, on_disk
from kvtide.plan.fields import Fields
from kvtide.plan.groups import ModelKV, Ranks, kv_of, stages_of
from kvtide.plan.layers import layers_of
from kvtide.plan.models import configuration_of, known_models
from kvtide.plan.planning import Asked, Plan, plan_for
from kvtide.sim.serving_rates import known_rates

GIB = 1 << 30
TB = 10**12


def kept(name: str, tensor: int = 1, pipeline: int = 1, blocks_per_chunk: int = 1) -> ModelKV:
    layers = layers_of(Fields(configuration_of(name).fields, name))
    return kv_of(layers, Ranks(tensor, pipeline), blocks_per_chunk=blocks_per_chunk)


def planned(name: str, asked: Asked) -> Plan:
    return plan_for(configuration_of(name), asked)


# -- ranks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor", "on_a_rank", "shards"),
    [
        ("llama-3.1-70b", 4, 327_680 // 4, 4),
        ("llama-3.1-70b", 16, 327_680 // 8, 8),  # eight KV heads: neighbours have the same
        ("deepseek-v3", 8, 70_272, 1),  # latents: every rank has all of them
        ("gpt-oss-120b", 8, 73_728 // 8, 8),
    ],
)
def test_heads_are_shared_out_and_latents_are_not(
    name: str, tensor: int, on_a_rank: int, shards: int
) -> None:
    kv = kept(name, tensor)
    assert sum(kv.chunk_bytes(group, 0) for group in kv.groups) == 16 * on_a_rank
    assert {kv.shards(group) for group in kv.groups} == {shards}


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [(61, 4, [15, 15, 16, 15]), (32, 2, [16, 16]), (10, 4, [2, 3, 3, 2]), (11, 4, [3, 3, 3, 2])],
)
def test_stages_have_the_layers_that_vllm_gives_them(layers: int, stages: int, sizes: list[int]) -> None:
    found = stages_of(layers, stages)
    assert [len(stage) for stage in found] == sizes
    assert [layer for stage in found for layer in stage] == list(range(layers))


@pytest.mark.parametrize("name", known_models())
def test_stages_hold_together_what_one_rank_would(name: str) -> None:
    one, four = kept(name), kept(name, pipeline=4)
    for group, apart in zip(one.groups, four.groups, strict=True):
        assert sum(four.chunk_bytes(apart, stage) for stage in range(4)) == one.chunk_bytes(group, 0)


@pytest.mark.parametrize(
    ("name", "ranks", "says"),
    [
        ("llama-3.1-8b", Ranks(3), "--tp = 3: must divide the 32 heads"),
        ("llama-3.1-8b", Ranks(0), "--tp = 0"),
        ("llama-3.1-8b", Ranks(1, 33), "--pp = 33: give 1 to 32"),
        ("llama-3.1-8b", Ranks(1, 0), "--pp = 0"),
        ("llama-3.1-8b", Ranks(-8), "--tp = -8"),
    ],
)
def test_ranks_a_model_cannot_be_shared_out_among_are_refused(name: str, ranks: Ranks, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        kv_of(layers_of(Fields(configuration_of(name).fields, name)), ranks)
    assert says in str(refused.value)


# -- what fits --------------------------------------------------------------------------------------


def test_host_memory_holds_what_division_says() -> None:
    kv = kept("llama-3.1-8b")
    fit = in_host_memory(kv, 64 * GIB, conversation_of(kv, 8192, 8192))
    assert (fit.bytes_per_conversation, fit.conversations, fit.tokens) == (GIB, 64, 64 * 8192)


def test_latents_take_host_memory_on_every_rank_and_the_disk_once() -> None:
    one, eight = kept("deepseek-v3"), kept("deepseek-v3", 8)
    what = conversation_of(one, 8192, 8192)
    apart, together = in_host_memory(one, 512 * GIB, what), in_host_memory(eight, 512 * GIB, what)
    assert together.bytes_per_conversation == 8 * apart.bytes_per_conversation
    assert together.tokens == pytest.approx(apart.tokens / 8, rel=1e-3)
    assert on_disk(eight, TB, what) == on_disk(one, TB, what)
    # A chunk is 16 x 70,272 bytes, up to whole pages, with a page before it and a row in the index.
    assert on_disk(one, TB, what).bytes_per_conversation == 512 * (275 * 4096 + 4096 + 512)


def test_of_windows_the_last_before_each_restore_point_is_kept() -> None:
    kv = kept("gemma-3-27b")
    windows, full = kv.groups[0], kv.groups[-1]
    sparse = conversation_of(kv, 8192, 8192, restore_interval=4096)
    # 64 chunks of 16 tokens before 4,096; before 8,192 one more, as 8,176 can be continued as well.
    assert chunks_of(kv, windows, sparse) == 64 + 65
    assert chunks_of(kv, full, sparse) == 512
    every = replace(sparse, restore_interval=0)
    assert chunks_of(kv, windows, every) == 512
    assert all_chunks(kv, every) == 7 * 512
    # Slots are as large as ten layers' chunk, whatever is in them.
    assert in_host_memory(kv, 64 * GIB, sparse).bytes_per_conversation == (6 * 129 + 512) * 16 * 10 * 8192


def test_a_recurrent_layer_leaves_a_state_where_a_step_ends() -> None:
    kv = kept("qwen3-next-80b-a3b")
    what = conversation_of(kv, 32_768, 8192)
    assert [chunks_of(kv, group, what) for group in kv.groups] == [4, 4, 4, 32_768 // 544]


def test_a_device_holds_windows_alone_and_no_more_than_is_left() -> None:
    kv = kept("gemma-3-27b")
    what = conversation_of(kv, 8192, 8192)
    block = 16 * 10 * 8192
    assert on_device(kv, 100 * GIB, what).bytes_per_conversation == (6 * 65 + 512) * block
    assert on_device(kv, -5, what).conversations == 0


@pytest.mark.parametrize("tokens", [0, 15, -1, 1 << 40])
def test_conversations_of_which_nothing_is_kept_are_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match="--conversation"):
        conversation_of(kept("llama-3.1-8b"), tokens, 8192)


@pytest.mark.parametrize("name", known_models())
def test_a_budget_below_one_chunk_is_refused_with_one_that_does(name: str) -> None:
    kv = kept(name, pipeline=2)
    what = conversation_of(kv, 8192, 8192)
    for fill in (in_host_memory, on_disk):
        with pytest.raises(ConfigError, match="give at least") as refused:
            fill(kv, 1, what)
        least = int(refused.value.hint.split()[-2])
        assert fill(kv, least, what).conversations > 0
        with pytest.raises(ConfigError):
            fill(kv, least - 1, what)


# -- when loading pays ------------------------------------------------------------------------------


def test_a_prompt_takes_two_operations_a_parameter_and_four_a_pair() -> None:
    kv, h100 = kept("llama-3.1-8b"), accelerator_named("H100")
    met = 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    (even,) = break_evens(engine_of(kv, h100, met, utilisation=0.5), [4096])
    pairs = 4096 * 4097 // 2
    seconds = (2 * met * 4096 + 32 * 4 * 4096 * pairs) / (989e12 / 2)
    assert even.compute_s == pytest.approx(seconds)
    assert even.load_bytes == 4096 * 131_072
    assert even.bytes_per_s == pytest.approx(4096 * 131_072 / seconds)
    assert even.load_s["host memory"] == pytest.approx(4096 * 131_072 / (64e9 * 0.8))


def test_the_rates_of_a_replay_are_worked_out_the_same_way() -> None:
    # They take each token to meet all parameters.
    rates = known_rates()["llama-3.1-8b-h100"]
    engine = engine_of(kept("llama-3.1-8b"), accelerator_named("h100"), 8_030_000_000)
    assert engine.prompt_s(32_768) == pytest.approx(rates.prompt_s(0, 32_768), rel=0.01)
    assert engine.link_bytes_per_s == rates.load_bytes_per_s


def test_pairs_are_counted_within_what_a_layer_sees() -> None:
    full = kept("llama-3.1-8b").groups[0].layer
    assert pairs_of(full, 4) == 1 + 2 + 3 + 4
    window = replace(full, window_tokens=3)
    assert pairs_of(window, 5) == 1 + 2 + 3 + 3 + 3
    assert pairs_of(window, 2) == 1 + 2
    local = replace(full, local_tokens=3)
    assert pairs_of(local, 7) == (1 + 2 + 3) + (1 + 2 + 3) + 1


def test_a_reader_is_brought_windows_once_and_the_rest_for_every_token() -> None:
    kv = kept("gpt-oss-120b")
    # 127 tokens before the next one: eight chunks of 16, each of 18 layers.
    assert bytes_to_load(kv, 4096) == (8 + 256) * 16 * 36_864
    assert bytes_to_load(kept("deepseek-v3", 8), 4096) == 8 * 4096 * 70_272


def test_longer_prefixes_pay_sooner_and_twice_the_devices_ask_for_twice_the_pace() -> None:
    for name in known_models():
        plan = planned(
            name,
            Asked(
                Budget(64 * GIB),
                Ranks(8, 2) if "next" not in name else Ranks(4, 4),
                accelerator=accelerator_named("h200"),
            ),
        )
        paces = [one.bytes_per_s for one in plan.break_evens]
        assert paces == sorted(paces, reverse=True), name
        assert [one.tokens for one in plan.break_evens] == [4096, 32_768, 131_072]
    one = engine_of(kept("qwen3-8b"), accelerator_named("h100"), 7_000_000_000)
    two = engine_of(kept("qwen3-8b", 2), accelerator_named("h100"), 7_000_000_000)
    assert break_evens(two)[0].bytes_per_s == pytest.approx(2 * break_evens(one)[0].bytes_per_s)


def test_every_accelerator_says_who_published_its_figures() -> None:
    for accelerator in known_accelerators().values():
        assert "data sheet" in accelerator.source
        assert 1e9 < accelerator.link_bytes_per_s < accelerator.bf16_flops
        assert accelerator.fp8_flops is None or accelerator.fp8_flops > accelerator.bf16_flops


def test_a_model_whose_weights_do_not_fit_is_refused_with_how_many_would_do() -> None:
    asked = Asked(Budget(GIB), Ranks(), accelerator=accelerator_named("h100"))
    with pytest.raises(ConfigError, match="at least 2 of them"):
        planned("llama-3.1-70b", asked)
    assert planned("llama-3.1-70b", replace(asked, ranks=Ranks(2))).fits[0].tier == "device"
    assert planned("llama-3.1-70b", replace(asked, weight_bytes=40 * GIB)).fits[0].tier == "device"


def test_a_family_that_is_not_known_is_planned_for_once_its_parameters_are_given() -> None:
    known = configuration_of("llama-3.1-8b")
    strange = replace(known, fields={**known.fields, "model_type": "strange"})
    asked = Asked(Budget(GIB), Ranks(), accelerator=accelerator_named("h100"))
    with pytest.raises(ConfigError, match=r"--active-parameters = None: .*'strange'"):
        plan_for(strange, asked)
    plan = plan_for(strange, replace(asked, met_parameters=7_000_000_000))
    assert [fit.tier for fit in plan.fits] == ["host memory"]
    assert plan.weight_bytes is None
    assert len(plan.break_evens) == 3


# -- what to set ------------------------------------------------------------------------------------


def advised(plan: Plan) -> dict[str, str]:
    return {one.setting: one.value for one in plan.advice}


def test_queues_take_a_step_of_a_large_model_and_the_next() -> None:
    plan = planned("llama-3.1-8b", Asked(Budget(64 * GIB, TB, 6.5e9), Ranks()))
    config = resolve({"host_memory": "64GiB", "disk": "/d", "disk_limit": "1TB"} | advised(plan)).config
    # 8,192 tokens of 131,072 bytes are 1 GiB, and on disk a little more.
    assert 2 * GIB < config.disk_queue < 2.5 * GIB
    assert config.store_queue == 2 * GIB
    assert int(KVTideConfig.model_fields["disk_queue"].default) < GIB


def test_no_queue_is_larger_than_the_memory_that_what_waits_lies_in() -> None:
    asked = Asked(Budget(3 * GIB, TB, 6.5e9), Ranks(2), step_tokens=1 << 20)
    settings = advised(planned("llama-3.1-8b", asked))
    assert (settings["store_queue"], settings["disk_queue"]) == ("3GiB", "1.5GiB")
    assert "disk_queue" not in advised(planned("llama-3.1-8b", replace(asked, budget=Budget(GIB >> 2, TB))))


def test_small_records_are_joined_where_all_chunks_are_alike() -> None:
    disk = Budget(64 * GIB, TB, 6.5e9)
    assert "blocks_per_chunk" not in advised(planned("llama-3.1-8b", Asked(disk, Ranks())))
    plan = planned("llama-3.1-8b", Asked(disk, Ranks(8)))
    assert advised(plan)["blocks_per_chunk"] == "4"  # of 256 KiB each
    assert plan.kv.groups[0].geometry.tokens_per_chunk == 64
    assert "blocks_per_chunk" not in advised(planned("llama-3.1-8b", Asked(Budget(64 * GIB), Ranks(8))))
    assert "blocks_per_chunk" not in advised(planned("gpt-oss-120b", Asked(disk, Ranks(8))))


def test_windows_are_kept_less_often_and_a_word_of_ones_own_wins() -> None:
    asked = Asked(Budget(64 * GIB), Ranks())
    plan = planned("gemma-3-27b", asked)
    assert advised(plan)["restore_interval"] == "4096"
    dense = planned("gemma-3-27b", replace(asked, restore_interval=0))
    assert "restore_interval" not in advised(dense)
    assert plan.fits[0].tokens > 2 * dense.fits[0].tokens


def test_a_disk_that_is_slow_beside_the_model_is_waited_for_and_written_less() -> None:
    asked = Asked(
        Budget(16 * GIB, TB, 1e9), Ranks(), conversation_tokens=65_536, accelerator=accelerator_named("h100")
    )
    settings = advised(planned("llama-3.1-8b", asked))
    assert settings["promotion_share"] == "0.5"  # 8 GiB of 16
    assert settings["defer_limit_s"] == "13"  # half as long again as 8.6 s
    assert settings["disk_demotion"] == "second_sight"


@pytest.mark.parametrize("name", known_models())
@pytest.mark.parametrize("host_memory", [1, 64, 100_000])
def test_all_that_is_advised_can_be_set(name: str, host_memory: int) -> None:
    ranks = Ranks(4, 2)
    budget = Budget(host_memory * GIB, 8 * TB, 2e9)
    plan = planned(
        name, Asked(budget, ranks, accelerator=accelerator_named("b200"), conversation_tokens=131_072)
    )
    given = {"host_memory": f"{host_memory}GiB", "disk": "/d", "disk_limit": "8TB"}
    config = resolve(given | advised(plan)).config
    for setting in advised(plan):
        assert getattr(config, setting) != KVTideConfig.model_fields[setting].default
    assert all(one.reason for one in plan.advice)
