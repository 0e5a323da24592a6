"""``kvtide serve``: vLLM's own server, with kvtide in it.

Knows which arguments are kvtide's and which are vLLM's. Does not know what vLLM's options mean: they are
passed on as they are, in their order.
"""

import difflib
import logging
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer
from pydantic import ByteSize
from typer.core import TyperCommand

from kvtide.cli import transfer_config
from kvtide.cli.check import require_vllm
from kvtide.cli.launch import become, model_of, server_command
from kvtide.cli.options import NO_METAVAR, option_of, with_settings
from kvtide.cli.output import note, own_version, refuse
from kvtide.config import KVTideConfig, Resolved, resolve
from kvtide.errors import ConfigError
from kvtide.transfer.memory import available_host_bytes, check_budget, humanised
from kvtide.vllm.compat import installed_vllm

logger = logging.getLogger(__name__)

EPILOG = """Examples:

* `kvtide serve MODEL --host-memory 8GiB`
* `kvtide serve MODEL --port 8001 --max-model-len 4096 --host-memory 50GiB --blocks-per-chunk 4`
* `kvtide serve MODEL --host-memory 8GiB --print` shows the vllm command instead of running it
* `kvtide serve --help=all` shows vLLM's own options
"""


class PassthroughCommand(TyperCommand):
    """A command that keeps what it does not know in ``ctx.args``: unchanged and in order.

    The parser's own way of ignoring options takes ``-tp`` apart, swallows ``--`` and moves values.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {"--help"}
        valued: set[str] = set()
        for parameter in self.params:
            names = {*parameter.opts, *parameter.secondary_opts}
            (flags if getattr(parameter, "is_flag", False) else valued).update(names)
        ours, theirs = split(args, flags, valued)
        super().parse_args(ctx, ours)
        ctx.args = theirs
        return theirs


def split(arguments: Sequence[str], flags: set[str], valued: set[str]) -> tuple[list[str], list[str]]:
    """Part a command line into the options named, with their values, and all the rest, in order.

    Underscores are taken for dashes in our names, as vLLM does in its own. After ``--`` all is the rest.
    """
    ours: list[str] = []
    theirs: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            theirs += [argument, *rest]
            break
        spelt, equals, value = argument.partition("=")
        name = spelt.replace("_", "-")
        if name in valued:
            ours += [name + equals + value] if equals else [name, *_next_of(rest)]
        elif name in flags and not equals:
            ours.append(name)
        else:
            theirs.append(argument)
    return ours, theirs


def _next_of(rest: Iterable[str]) -> list[str]:
    value = next(iter(rest), None)
    return [] if value is None else [value]


@with_settings
def serve(
    ctx: typer.Context,
    settings: dict[str, object],
    print_only: Annotated[
        bool, typer.Option("--print", metavar=NO_METAVAR, help="Show the exact vllm command and run nothing.")
    ] = False,
) -> None:
    """Start vLLM's server with kvtide as its KV connector.

    Every option that is not kvtide's goes to vLLM unchanged. Settings also come from
    --kv-transfer-config and from the environment (KVTIDE_HOST_MEMORY=8GiB); the command line wins over
    both, and what it overrides is reported. To try settings without starting anything: kvtide check.
    """
    try:
        if any(argument.startswith("--help=") for argument in ctx.args):
            become(server_command(require_vllm(), ctx.args))
        arguments, resolved = serve_arguments(ctx.args, settings, os.environ)
        command = server_command(installed_vllm(), arguments)
        if print_only:
            typer.echo(shlex.join(command))
            return
        installed = require_vllm()
        # Now, rather than after minutes of loading weights. What the model takes is unknown here.
        check_budget(resolved.config.host_memory, 0, available_host_bytes())
    except ConfigError as error:
        refuse(error)
    model = model_of(ctx.args) or "the model that its arguments name"
    budget = humanised(resolved.config.host_memory)
    note(
        f"starting vLLM {installed.version} with kvtide {own_version()}, serving {model}, "
        f"KV cache ebbs to {budget} of host memory"
    )
    become(command)


def serve_arguments(
    given: Sequence[str], settings: Mapping[str, object], environment: Mapping[str, str]
) -> tuple[list[str], Resolved]:
    """Turn what the user wrote into the arguments of ``vllm serve``.

    Args:
        given: vLLM's arguments as the user wrote them.
        settings: kvtide's from the command line, as written.
        environment: The environment; settings found there are written into the result as well, so that a
            printed command does the same in another shell.

    Raises:
        ConfigError: A setting is wrong, no model, or another connector is asked for.
    """
    if not given:
        raise ConfigError("MODEL", None, "say which model to serve: kvtide serve MODEL --host-memory 8GiB")
    _hint_at_misspelt(given)
    others, transfer = transfer_config.take_from(given)
    _refuse_vllm_offloading(others)
    if "--config" in others[:-1]:
        from_file = transfer_config.from_vllm_config_file(others[others.index("--config") + 1])
        transfer = transfer_config.merged(from_file, transfer)
    resolved = resolve(settings, transfer_config.extra_config_of(transfer), environment)
    ours = [transfer_config.OPTION, transfer_config.composed(transfer, _explicit(resolved))]
    # Behind "--" vLLM would take it for a model.
    end = others.index("--") if "--" in others else len(others)
    return [*others[:end], *ours, *others[end:]], resolved


def _explicit(resolved: Resolved) -> dict[str, object]:
    """Settings that are not defaults: sizes and lists as they were written, all else as it was understood."""
    values = {
        name: getattr(resolved.config, name) for name in KVTideConfig.model_fields if name in resolved.given
    }
    as_written = (ByteSize, tuple)
    return {name: resolved.given[name] if isinstance(v, as_written) else v for name, v in values.items()}


def _hint_at_misspelt(given: Sequence[str]) -> None:
    ours = [option_of(name) for name in KVTideConfig.model_fields]
    for argument in given:
        name = argument.partition("=")[0].replace("_", "-")
        close = difflib.get_close_matches(name, ours, n=1, cutoff=0.85) if name.startswith("--") else []
        if close:
            logger.warning("%s is no setting of kvtide and goes to vLLM; did you mean %s?", name, close[0])


def _refuse_vllm_offloading(arguments: Sequence[str]) -> None:
    for position, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name.replace("_", "-") == "--kv-offloading-size":
            transfer_config.refuse_vllm_offloading(value or "".join(arguments[position + 1 : position + 2]))
