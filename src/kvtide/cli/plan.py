"""``kvtide plan``: what a model keeps, what fits, from which pace on loading pays, and what to set.

Knows the options and what they may be; what is worked out is in ``kvtide.plan``, what is shown in
``plan_tables``.
"""

from typing import Annotated

import typer

from kvtide.cli.folders import JsonOption, print_json, refusing
from kvtide.cli.plan_tables import command_of, plain, show_plan
from kvtide.cli.replay_serving import size_of
from kvtide.errors import ConfigError
from kvtide.plan.accelerators import accelerator_named, known_accelerators
from kvtide.plan.advice import Budget
from kvtide.plan.breakeven import PATHS, UTILISATION
from kvtide.plan.groups import Ranks
from kvtide.plan.models import configuration_of, known_models
from kvtide.plan.planning import Asked, plan_for

KV_DTYPES = {
    "auto": None,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
"""Values of vLLM's --kv-cache-dtype, and bytes of a number."""

MOST_BLOCK_TOKENS = 1 << 16

EPILOG = f"""Examples:

* `kvtide plan llama-3.1-8b --host-memory 64GiB` needs no trace, no model's weights and no accelerator
* `kvtide plan llama-3.1-70b --tp 4 --accelerator h100 --host-memory 512GiB --disk 4TB@12GB/s`
* `kvtide plan ./my-model/config.json --host-memory 64GiB --conversation 32k --kv-dtype fp8`
* `kvtide plan gemma-3-27b --host-memory 64GiB --json > plan.json` is for programs

Models known by name: {", ".join(known_models())}. Of any other give its config.json.
"""


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model's name, or its config.json or folder.", show_default=False
        ),
    ],
    host_memory: Annotated[
        str | None,
        typer.Option("--host-memory", metavar="SIZE", help="For KV cache, all ranks together: 64GiB."),
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(
            "--disk",
            metavar="SIZE[@PACE]",
            help=f"A disk below host memory: 1TB, or 1TB@12GB/s where its pace is known. Taken without one:"
            f" {PATHS['disk'] / 1e9:g} GB/s.",
        ),
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            "--accelerator",
            metavar="NAME",
            help=f"For what is left on it, and when loading pays: {', '.join(known_accelerators())}.",
        ),
    ] = None,
    tensor: Annotated[
        int, typer.Option("--tp", metavar="N", help="Ranks that share each layer (--tensor-parallel-size).")
    ] = 1,
    pipeline: Annotated[
        int, typer.Option("--pp", metavar="N", help="Stages of layers (--pipeline-parallel-size).")
    ] = 1,
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", metavar="NAME", help=f"Of KV cache: {', '.join(KV_DTYPES)}.")
    ] = "auto",
    block_size: Annotated[
        int, typer.Option("--block-size", metavar="TOKENS", help="Of the engine's blocks.")
    ] = 16,
    conversation: Annotated[
        str, typer.Option("--conversation", metavar="TOKENS", help="How long conversations are: 8k is 8,192.")
    ] = "8k",
    step: Annotated[
        int | None,
        typer.Option(
            "--max-num-batched-tokens",
            metavar="N",
            help="Tokens that the engine computes in a step. Default: what vLLM takes on the accelerator.",
        ),
    ] = None,
    blocks_per_chunk: Annotated[
        int | None,
        typer.Option("--blocks-per-chunk", metavar="N", help="As the setting. Default: chosen."),
    ] = None,
    restore_interval: Annotated[
        int | None,
        typer.Option("--restore-interval", metavar="TOKENS", help="As the setting. Default: chosen."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights", metavar="SIZE", help="Of all weights on devices. Default: counted, where known."
        ),
    ] = None,
    active_parameters: Annotated[
        float | None,
        typer.Option(
            "--active-parameters",
            metavar="N",
            help="Parameters that each token meets: 3.3e9. Default: counted, where known.",
        ),
    ] = None,
    utilisation: Annotated[
        float,
        typer.Option(
            "--utilisation", metavar="SHARE", help="Of the arithmetic, what computing prompts reaches."
        ),
    ] = UTILISATION,
    as_json: JsonOption = False,
) -> None:
    """Say what a budget of memory buys for a model, before anything is bought. No trace is needed.

    How many bytes a token takes, group by group; how many tokens and conversations fit on the device, in host
    memory and on disk; from which pace on bringing a prefix back beats computing it again; and what to set.

    Exit code 0: it was worked out. 2: it could not be.
    """
    with refusing(as_json):
        if host_memory is None:
            raise ConfigError("--host-memory", None, "give a size such as 64GiB")
        known = configuration_of(model)
        if kv_dtype not in KV_DTYPES:
            raise ConfigError("--kv-dtype", kv_dtype, f"give one of {', '.join(KV_DTYPES)}")
        asked = Asked(
            Budget(size_of("--host-memory", host_memory), *_disk(disk)),
            Ranks(tensor, pipeline),
            KV_DTYPES[kv_dtype],
            _within("--block-size", block_size, MOST_BLOCK_TOKENS),
            tokens_of("--conversation", conversation),
            None if accelerator is None else accelerator_named(accelerator),
            step,
            None if blocks_per_chunk is None else _within("--blocks-per-chunk", blocks_per_chunk, 1024),
            None
            if restore_interval is None
            else _within("--restore-interval", restore_interval, 1 << 20, least=0),
            None if weights is None else size_of("--weights", weights),
            None if active_parameters is None else _parameters(active_parameters),
            utilisation,
        )
        made = plan_for(known, asked)
        command = command_of(made, asked, host_memory, disk, None if kv_dtype == "auto" else kv_dtype, step)
        if as_json:
            print_json(plain(made, asked, command))
        else:
            show_plan(made, asked, command)


def tokens_of(option: str, text: str) -> int:
    """Read a number of tokens: ``8192``, ``8k``.

    Raises:
        ConfigError: It is none.
    """
    written = text.strip().lower().replace("_", "").replace(",", "")
    factor = {"k": 1 << 10, "m": 1 << 20}.get(written[-1:], 1)
    digits = written if factor == 1 else written[:-1]
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 12):
        raise ConfigError(option, text, "give a number of tokens such as 8192 or 8k")
    return int(digits) * factor


def _disk(text: str | None) -> tuple[int, float]:
    if text is None:
        return 0, 0.0
    size, at, pace = text.partition("@")
    hint = "give a size such as 1TB, and if known its pace: 1TB@12GB/s"
    bytes_per_s = size_of("--disk", pace.strip().removesuffix("/s"), hint) if at else PATHS["disk"]
    return size_of("--disk", size, hint), float(bytes_per_s)


def _within(option: str, value: int, most: int, least: int = 1) -> int:
    if not least <= value <= most:
        raise ConfigError(option, value, f"give a whole number from {least} to {most}")
    return value


def _parameters(value: float) -> int:
    if not 1 <= value <= 1e15:
        raise ConfigError("--active-parameters", value, "give a number of parameters such as 8e9")
    return int(value)
