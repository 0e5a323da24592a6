"""What ``kvtide plan`` shows: tables and sentences for people, JSON for programs.

Knows terminals; works nothing out beyond what a reader would.
"""

import shlex
from dataclasses import asdict, dataclass
from typing import Any

import typer

from kvtide.cli import transfer_config
from kvtide.cli.folders import counted, show_under, table, tell
from kvtide.cli.options import option_of
from kvtide.cli.replay_serving import seconds
from kvtide.plan.breakeven import LINK_SHARE, PATHS, BreakEven
from kvtide.plan.groups import ModelKV, PlannedGroup
from kvtide.plan.planning import MEMORY_SHARE, Asked, Plan
from kvtide.transfer.memory import humanised

FOLDER = "/var/cache/kvtide"
"""Stands for the folder of a disk, which only whoever serves knows."""


@dataclass(frozen=True, slots=True)
class Command:
    """How to begin.

    Attributes:
        line: For ``kvtide serve``.
        transfer_config: The same for plain vLLM.
    """

    line: str
    transfer_config: str


def command_of(
    plan: Plan, asked: Asked, host_memory: str, disk: str | None, kv_dtype: str | None, step: int | None
) -> Command:
    """Write the command that serves as planned.

    Args:
        plan: What was worked out.
        asked: From what.
        host_memory: As it was written.
        disk: Likewise.
        kv_dtype: Likewise; None for the model's own.
        step: Likewise.
    """
    engine: list[tuple[str, object, object]] = [
        ("--tensor-parallel-size", asked.ranks.tensor, 1),
        ("--pipeline-parallel-size", asked.ranks.pipeline, 1),
        ("--kv-cache-dtype", kv_dtype, None),
        ("--block-size", asked.block_tokens, 16),
        ("--max-num-batched-tokens", step, None),
    ]
    settings: dict[str, object] = {"host_memory": host_memory.strip()}
    if disk is not None:
        settings |= {"disk": FOLDER, "disk_limit": disk.partition("@")[0].strip()}
    settings |= {one.setting: _typed(one.value) for one in plan.advice}
    words = ["kvtide", "serve", plan.configuration.served_as]
    for option, value, usual in engine:
        if value != usual:
            words += [option, str(value)]
    for name, value in settings.items():
        words += [option_of(name), str(value)]
    return Command(shlex.join(words), transfer_config.composed({}, settings))


def show_plan(plan: Plan, asked: Asked, command: Command) -> None:
    """Print a plan for people."""
    _show_groups(plan)
    _show_fits(plan, asked)
    if plan.break_evens:
        _show_break_evens(plan, asked)
    _show_settings(plan, command)


def plain(plan: Plan, asked: Asked, command: Command) -> dict[str, Any]:
    """Put a plan into plain types for JSON."""
    kv, accelerator = plan.kv, asked.accelerator
    return {
        "model": plan.configuration.served_as,
        "source": plan.configuration.source,
        "tensor_parallel": kv.ranks.tensor,
        "pipeline_parallel": kv.ranks.pipeline,
        "block_tokens": kv.block_tokens,
        "bytes_per_token": sum(kv.token_bytes(group) for group in kv.groups),
        "bytes_per_token_on_a_rank": _bytes_on_a_rank(kv),
        "slot_bytes": [kv.slot_bytes(stage) for stage in range(kv.ranks.pipeline)],
        "groups": [_plain_group(kv, group) for group in kv.groups],
        "weight_bytes": plan.weight_bytes,
        "parameters_met": plan.met_parameters,
        "conversation": asdict(plan.conversation),
        "fits": [asdict(fit) for fit in plan.fits],
        "accelerator": None if accelerator is None else asdict(accelerator),
        "utilisation": asked.utilisation,
        "break_evens": [asdict(one) for one in plan.break_evens],
        "settings": [asdict(one) for one in plan.advice],
        "command": command.line,
        "kv_transfer_config": command.transfer_config,
    }


def keeps(group: PlannedGroup) -> str:
    """Say what a group keeps."""
    layer, kind = group.layer, group.geometry.kind.value.replace("_", " ")
    if layer.window_tokens is not None:
        return f"sliding window of {layer.window_tokens:,}"
    if layer.local_tokens is not None:
        return f"chunks of {layer.local_tokens:,} (local)"
    return {"mla attention": "latents (MLA)", "mamba": "recurrent state"}.get(kind, kind)


def _typed(value: str) -> object:
    try:
        return int(value)
    except ValueError:
        pass
    try:
        return float(value)
    except ValueError:
        return value


def _bytes_on_a_rank(kv: ModelKV) -> int:
    """Of a token, what the fullest rank holds; what looks back over a window counted for all tokens."""
    stages = range(kv.ranks.pipeline)
    kept = [group for group in kv.groups if not group.geometry.keeps_states]
    return max(sum(kv.chunk_bytes(g, s) // g.geometry.tokens_per_chunk for g in kept) for s in stages)


def _plain_group(kv: ModelKV, group: PlannedGroup) -> dict[str, Any]:
    geometry = group.geometry
    return {
        "kind": geometry.kind.value,
        "layers": list(group.layers),
        "bytes_per_token": kv.token_bytes(group),
        "state_bytes": kv.state_bytes(group),
        "bytes_per_sequence": _most_of_a_sequence(kv, group),
        "window_tokens": group.layer.window_tokens,
        "local_tokens": group.layer.local_tokens,
        "tokens_per_chunk": geometry.tokens_per_chunk,
        "chunk_bytes": [kv.chunk_bytes(group, stage) for stage in range(kv.ranks.pipeline)],
        "different_shards": kv.shards(group),
    }


def _most_of_a_sequence(kv: ModelKV, group: PlannedGroup) -> int | None:
    """What one sequence needs of a group at most, each layer counted once; None where it grows with it."""
    if group.geometry.keeps_states:
        return kv.state_bytes(group)
    tokens = group.layer.window_tokens or group.layer.local_tokens
    return None if tokens is None else tokens * kv.token_bytes(group)


def _show_groups(plan: Plan) -> None:
    kv = plan.kv
    tell("model", f"{plan.configuration.served_as}, {counted(len(kv.layers.layers), 'layer')}")
    tell("source", plan.configuration.source)
    stages, tensor = kv.ranks.pipeline, kv.ranks.tensor
    ranks = (
        ""
        if kv.ranks.count == 1
        else f", {_bytes_on_a_rank(kv):,} of them on a rank (TP {tensor}, PP {stages})"
    )
    tell("a token", f"{sum(kv.token_bytes(group) for group in kv.groups):,} bytes of KV in all{ranks}")
    typer.echo()
    heads = ["layers", "bytes\na token", "a sequence\nat most", "a chunk is\ntokens", "on a rank"]
    rows = table(["group", "keeps"], heads)
    for number, group in enumerate(kv.groups):
        most = _most_of_a_sequence(kv, group)
        chunk = max(kv.chunk_bytes(group, stage) for stage in range(stages))
        rows.add_row(
            str(number),
            keeps(group),
            str(len(group.layers)),
            f"{kv.token_bytes(group):,}" if kv.token_bytes(group) else "-",
            "all tokens" if most is None else humanised(most),
            f"{group.geometry.tokens_per_chunk:,}",
            humanised(chunk),
        )
    show_under("KV cache groups, as vLLM makes them", rows)
    alike = [group for group in kv.groups if kv.shards(group) < tensor]
    if alike:
        apart = kv.shards(alike[0])
        of = f"{tensor} ranks{' of a stage' if stages > 1 else ''}"
        who = f"all {of}" if apart == 1 else f"each {tensor // apart} of {of}"
        tell("ranks", f"{who} hold the same: in host memory every rank has it, on a disk it lies once")
        typer.echo()


def _show_fits(plan: Plan, asked: Asked) -> None:
    rows = table(["tier"], ["budget", "a conversation", "conversations", "tokens"])
    for fit in plan.fits:
        rows.add_row(
            fit.tier,
            humanised(fit.budget_bytes),
            humanised(fit.bytes_per_conversation),
            _many(fit.conversations),
            f"{fit.tokens:,}",
        )
    show_under(f"What fits, in conversations of {plan.conversation.tokens:,} tokens", rows)
    if asked.accelerator is None:
        tell("device", "name an accelerator (--accelerator) for what fits there, and for when loading pays")
        typer.echo()
    elif plan.weight_bytes is None:
        tell(
            "device",
            "give the size of the weights (--weights) for what fits there: their format is not known here",
        )
        typer.echo()
    else:
        less = f"{100 * MEMORY_SHARE:.0f} % of its memory less weights of {humanised(plan.weight_bytes)}"
        tell("device", f"at most: {less}; what a forward needs comes off that")
        typer.echo()


def _show_break_evens(plan: Plan, asked: Asked) -> None:
    assert asked.accelerator is not None
    rows = table(
        ["prefix"],
        [
            "computed\nin",
            "bytes",
            "even at\nGB/s",
            "on each\ndevice",
            "host\nmemory",
            "disk",
            "100\nGbit/s",
            "400\nGbit/s",
        ],
    )
    devices = plan.kv.ranks.count
    for one in plan.break_evens:
        rows.add_row(
            _tokens(one.tokens),
            seconds(one.compute_s),
            humanised(one.load_bytes),
            _pace(one.bytes_per_s),
            _pace(one.bytes_per_s / devices),
            *(seconds(one.load_s[name]) for name in ("host memory", *PATHS)),
        )
    show_under("Computing a prefix again, and bringing it back", rows)
    tell("pays", _verdict(plan.break_evens))
    label = f"{devices} x {asked.accelerator.label}" if devices > 1 else asked.accelerator.label
    shares = f"{100 * asked.utilisation:.0f} % of the arithmetic, {100 * LINK_SHARE:.0f} % of the link"
    tell("assumed", f"{label}; prompts reach {shares}")
    tell("source", asked.accelerator.source)
    longest = plan.kv.layers.longest_tokens
    beyond = [one for one in plan.break_evens if longest is not None and one.tokens > longest]
    if beyond:
        tell(
            "beyond",
            f"{', '.join(_tokens(one.tokens) for one in beyond)}: the model was made for {longest:,} tokens",
        )
    typer.echo()


def _verdict(evens: list[BreakEven]) -> str:
    """Say of each path at which lengths it is sooner."""
    said = []
    for path in evens[0].load_s:
        sooner = [one for one in evens if one.load_s[path] < one.compute_s]
        if len(sooner) == len(evens):
            least = min(one.compute_s / one.load_s[path] for one in evens)
            said.append(f"{path} always ({least:.1f} x at least)")
        elif sooner:
            said.append(f"{path} at {', '.join(_tokens(one.tokens) for one in sooner)}")
        else:
            said.append(f"{path} never")
    return "; ".join(said)


def _show_settings(plan: Plan, command: Command) -> None:
    if plan.advice:
        rows = table(["setting", "value", "because"], [])
        for one in plan.advice:
            rows.add_row(one.setting, one.value, one.reason)
        show_under("What to set, beside the budget", rows)
    else:
        show_under("What to set: the budget alone, the other defaults will do", table([], []))
    typer.echo(command.line)
    typer.echo()
    typer.echo(f"--kv-transfer-config {shlex.quote(command.transfer_config)}")


def _tokens(count: int) -> str:
    return f"{count >> 10}k" if count % 1024 == 0 else f"{count:,}"


def _pace(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f}" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e9:.2f}"


def _many(count: float) -> str:
    return f"{count:,.0f}" if count >= 10 else f"{count:.1f}"
