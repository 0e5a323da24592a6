"""``kvtide demo``: the main job, shown.

Knows options. What is done with them is ``kvtide.demo.run``'s.
"""

from pathlib import Path
from typing import Annotated

import typer

from kvtide.demo.conversation import TOPICS


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for report.json, report.png, report.html and the servers' logs.")
    ] = Path("build/demo"),
    models: Annotated[Path, typer.Option(help="Folder in which the converted model is kept.")] = Path(
        "build/models"
    ),
    users: Annotated[int, typer.Option(min=1, max=len(TOPICS), help="Users, each with a conversation.")] = 8,
    turns: Annotated[
        int | None,
        typer.Option(
            min=2, help="Turns of each user, one request at a time; 7, with --restart 2.", show_default=False
        ),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart", help="Kill kvtide's server after the conversation, start it again, and ask again."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report's summary as JSON and no tables.")
    ] = False,
    kv_transfer_config: Annotated[
        str, typer.Option(hidden=True, help="JSON: another connector in kvtide's place.")
    ] = "",
) -> None:
    """Show the main job on real input: exact, bounded, faster.

    Starts three real vLLM servers with SmolLM2-135M: with kvtide and a small pool, without kvtide and the
    same pool, and with a pool in which everything always hits. Asks all three the same multi-user
    conversation and compares times, tokens and log-probabilities.

    With --restart, kvtide's server has a disk. After the conversation it is killed and started again with the
    same folder, and each user's last prompt is asked once more; files are report-restart.json and .png.

    Ends with 0 when every bar is met, 1 when one is missed, 2 when it could not run.
    """
    from kvtide.demo import restart as restarting
    from kvtide.demo import run as running

    connector = restarting.connector_of(out) if restart else running.KVTIDE_CONNECTOR
    options = running.Options(
        out=out,
        models=models,
        user_count=users,
        turn_count=turns or (restarting.TURNS if restart else running.TURNS),
        kv_transfer_config=kv_transfer_config or connector,
        as_json=as_json,
    )
    raise typer.Exit(running.main(options, restarting.run if restart else running.run))
