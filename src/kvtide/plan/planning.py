"""A whole plan: a model, ranks and a budget in, what fits, what pays and what to set out.

Puts the parts of this package together; prints nothing.
"""

from dataclasses import dataclass

from kvtide.errors import ConfigError
from kvtide.plan.accelerators import Accelerator
from kvtide.plan.advice import Advice, Budget, advice_for, blocks_per_chunk_for, restore_interval_for
from kvtide.plan.breakeven import UTILISATION, BreakEven, break_evens, engine_of
from kvtide.plan.capacity import Conversation, Fit, conversation_of, in_host_memory, on_device, on_disk
from kvtide.plan.fields import Fields
from kvtide.plan.groups import ModelKV, Ranks, kv_of
from kvtide.plan.layers import ModelLayers, layers_of
from kvtide.plan.models import Configuration
from kvtide.plan.weights import computes_in_fp8, parameters_of, weight_bytes

MEMORY_SHARE = 0.92
"""Of a device's memory, what vLLM 0.32 takes by default (``gpu_memory_utilization``)."""

USUAL_STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Asked:
    """What somebody wants to know.

    Attributes:
        budget: What there is.
        ranks: How the model is shared out.
        kv_bytes: Of one number of KV; None for what the model computes in.
        block_tokens: Of the engine's blocks.
        conversation_tokens: How long conversations are.
        accelerator: Which; None to leave out all that depends on it.
        step_tokens: That the engine computes in a step; None for what vLLM takes on that accelerator.
        blocks_per_chunk: As the setting; None to have it chosen.
        restore_interval: Likewise.
        weight_bytes: Of all weights in device memory; None to have them counted.
        met_parameters: By each token; likewise.
        utilisation: Share of the arithmetic that computing prompts reaches.
    """

    budget: Budget
    ranks: Ranks
    kv_bytes: int | None = None
    block_tokens: int = 16
    conversation_tokens: int = 8192
    accelerator: Accelerator | None = None
    step_tokens: int | None = None
    blocks_per_chunk: int | None = None
    restore_interval: int | None = None
    weight_bytes: int | None = None
    met_parameters: int | None = None
    utilisation: float = UTILISATION


@dataclass(frozen=True, slots=True)
class Plan:
    """The answers.

    Attributes:
        configuration: Of the model.
        kv: What it keeps.
        conversation: What is kept of each.
        fits: By tier, the nearest first; the device only where it is known and the weights are.
        break_evens: By length of prefix; none without an accelerator.
        advice: What to set beside the budget.
        weight_bytes: Of all weights; None where unknown, or not asked for.
        met_parameters: By each token of a prompt; likewise.
    """

    configuration: Configuration
    kv: ModelKV
    conversation: Conversation
    fits: list[Fit]
    break_evens: list[BreakEven]
    advice: list[Advice]
    weight_bytes: int | None
    met_parameters: int | None


def kv_of_configuration(configuration: Configuration, ranks: Ranks | None = None) -> ModelKV:
    """Say what a model keeps, with blocks of 16 tokens.

    Raises:
        ConfigError: Its configuration is not understood; names the field.
    """
    return kv_of(layers_of(Fields(configuration.fields, configuration.name)), ranks)


def plan_for(configuration: Configuration, asked: Asked) -> Plan:
    """Work it all out.

    Raises:
        ConfigError: The configuration, or something that was asked for, is wrong; names it.
    """
    fields = Fields(configuration.fields, configuration.name)
    layers = layers_of(fields)
    kv = _kv(layers, asked)
    usual = asked.accelerator.step_tokens if asked.accelerator else USUAL_STEP_TOKENS
    step = usual if asked.step_tokens is None else asked.step_tokens
    interval = restore_interval_for(kv) if asked.restore_interval is None else asked.restore_interval
    conversation = conversation_of(kv, asked.conversation_tokens, step, interval)
    fits = [in_host_memory(kv, asked.budget.host_memory, conversation)]
    if asked.budget.disk_limit:
        fits.append(on_disk(kv, asked.budget.disk_limit, conversation))
    if asked.accelerator is None:
        advice = advice_for(kv, asked.budget, conversation)
        return Plan(configuration, kv, conversation, fits, [], advice, asked.weight_bytes, None)
    weights, met = _weights_and_met(fields, layers, asked)
    if weights is not None:
        fits.insert(0, on_device(kv, _left(asked.accelerator, asked.ranks, weights), conversation))
    engine = engine_of(kv, asked.accelerator, met, computes_in_fp8(fields), asked.utilisation)
    evens = break_evens(engine, disk=asked.budget.disk_bytes_per_s or None)
    advice = advice_for(kv, asked.budget, conversation, engine.prompt_s(conversation.tokens))
    return Plan(configuration, kv, conversation, fits, evens, advice, weights, met)


def _weights_and_met(fields: Fields, layers: ModelLayers, asked: Asked) -> tuple[int | None, int]:
    """Say what weights take, None where that is not known, and how many parameters a token meets."""
    weights, met = asked.weight_bytes, asked.met_parameters
    if weights is None or met is None:
        try:
            parameters = parameters_of(fields, layers)
        except ConfigError as error:
            hint = f"{error.hint}; or give --weights and --active-parameters"
            raise ConfigError(error.setting, error.value, hint) from None
        if parameters is not None:
            known = weight_bytes(fields, parameters, layers.dtype_bytes)
            weights = known if weights is None else weights
            met = parameters.met if met is None else met
    if met is None:
        hint = f"cannot be counted for a {fields.text('model_type')!r}: give it, such as 8e9"
        raise ConfigError("--active-parameters", None, hint)
    return weights, met


def _kv(layers: ModelLayers, asked: Asked) -> ModelKV:
    whole = kv_of(layers, asked.ranks, asked.kv_bytes, asked.block_tokens)
    chosen = asked.blocks_per_chunk
    blocks = blocks_per_chunk_for(whole, asked.budget) if chosen is None else chosen
    return kv_of(layers, asked.ranks, asked.kv_bytes, asked.block_tokens, blocks)


def _left(accelerator: Accelerator, ranks: Ranks, weights: int) -> int:
    """Bytes that devices have left for KV cache at most: what a forward needs is not known here."""
    left = int(accelerator.memory_bytes * MEMORY_SHARE) * ranks.count - weights
    if left <= 0:
        least = -(-weights // int(accelerator.memory_bytes * MEMORY_SHARE))
        hint = (
            f"{accelerator.label} does not hold the weights of {weights:,} bytes: at least {least} of them do"
        )
        raise ConfigError("--tp", ranks.tensor, hint)
    return left
