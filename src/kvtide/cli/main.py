"""The command ``kvtide``: which verbs there are.

Knows the verbs, one file each. Does not know what any of them does.
"""

import importlib
import importlib.util
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvtide.cli import advise, clear, inspect, plan, replay, verify
from kvtide.cli.check import check
from kvtide.cli.options import NO_METAVAR
from kvtide.cli.output import own_version, quiet_when_unread, warnings_as_notes
from kvtide.cli.serve import EPILOG, PassthroughCommand, serve


class Verbs(TyperGroup):
    """Verbs that end quietly when nobody reads what they say."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        with quiet_when_unread():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        with quiet_when_unread():
            return super().invoke(ctx)


app = typer.Typer(
    name="kvtide",
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="KV cache of a vLLM server, down to host memory and back.",
    epilog="Begin with: kvtide serve MODEL --host-memory 8GiB",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvtide {own_version()}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar=NO_METAVAR, callback=_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    warnings_as_notes()


app.command(cls=PassthroughCommand, options_metavar="MODEL [OPTIONS OF VLLM SERVE] [OPTIONS]", epilog=EPILOG)(
    serve
)
app.command(epilog="Example: kvtide check --host-memory 8GiB --config settings.json")(check)
app.command(epilog=inspect.EPILOG)(inspect.inspect)
app.command(epilog=verify.EPILOG)(verify.verify)
app.command(epilog=clear.EPILOG)(clear.clear)
app.command(epilog=replay.EPILOG)(replay.replay)
app.command(epilog=plan.EPILOG)(plan.plan)
app.command(epilog=advise.EPILOG)(advise.advise)

# An ImportError inside it would be a fault and is not hidden.
if importlib.util.find_spec("kvtide.cli.demo") is not None:
    app.command()(importlib.import_module("kvtide.cli.demo").demo)
