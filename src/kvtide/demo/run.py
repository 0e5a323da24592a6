"""The demo from beginning to end.

Knows the three servers and the order of things: model, servers, questions, figures, files. Each of these is
done elsewhere. Importing it is light; vLLM itself runs in the servers only.
"""

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from rich.console import Console

from kvtide.demo import page, phases, picture, report, surroundings, table
from kvtide.demo.bars import bars_of
from kvtide.demo.conversation import MAX_CONTEXT_TOKENS, Encode, longest_context_tokens
from kvtide.demo.display import Display
from kvtide.demo.errors import DemoError
from kvtide.demo.figures import figures_of
from kvtide.demo.model import ensure_model
from kvtide.demo.phases import KVTIDE, RECOMPUTE, REFERENCE, Script
from kvtide.demo.servers import BLOCK_TOKENS, MAX_MODEL_TOKENS, Plan, Servers

MET, MISSED, COULD_NOT_RUN = 0, 1, 2
"""Exit codes."""

HOST_MEMORY = "1GiB"
SMALL_POOL_BLOCKS = 128
TURNS = 7
CONCURRENT_TURNS = 2
NEW_TOKENS = 40
KVTIDE_CONNECTOR = json.dumps(
    {
        "kv_connector": "KVTideConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_memory": HOST_MEMORY},
    }
)

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Options:
    """What the user may choose.

    Attributes:
        out: Folder for the report, the picture, the page and the servers' logs.
        models: Folder for the model.
        kv_transfer_config: JSON for kvtide's server; another connector in its place makes a comparison.
        as_json: Print the report's summary as JSON, and nothing else, to standard output.
    """

    out: Path = Path("build/demo")
    models: Path = Path("build/models")
    user_count: int = 8
    turn_count: int = TURNS
    kv_transfer_config: str = KVTIDE_CONNECTOR
    as_json: bool = False


def main(options: Options, job: Callable[[Options], bool]) -> int:
    """Do ``job`` and return the exit code; what went wrong is said on standard error.

    Args:
        options: Handed on.
        job: Says whether every bar was met.
    """
    console = Console(stderr=True)
    try:
        with _ended_by_sigterm():
            passed = job(options)
    except (DemoError, OSError) as error:
        console.print("demo: could not run", style="bold red")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return COULD_NOT_RUN
    except KeyboardInterrupt:
        console.print("demo: interrupted; the servers have been ended")
        return COULD_NOT_RUN
    return MET if passed else MISSED


def run(options: Options) -> bool:
    """Do everything, leave the files under ``options.out``, and say whether every bar was met.

    Raises:
        DemoError: It could not be done.
    """
    connector = connector_name(options.kv_transfer_config)
    machine = surroundings.machine()
    with Display() as display:
        started_s = time.monotonic()
        display.stage("model", 1)
        model = ensure_model(options.models, display.now)
        ready_s = time.monotonic()
        encode, decode = tokenizer(model)
        script = _script(options, encode)
        plans = plans_of(script, options.kv_transfer_config)
        asked = _ask(options, script, plans, model, encode, display)
        display.stage("report", 1)
        figures = figures_of(asked)
        found = report.Report(
            script=script,
            plans=plans,
            connector=connector,
            exchanges=asked.exchanges,
            conversation=_conversation(asked, decode),
            figures=figures,
            bars=(),
            versions=surroundings.versions(),
            machine=machine,
            setup_s=ready_s - started_s,
            wall_s=0.0,
        )
        picture.write_picture(found, options.out / "report.png")
        # Drawing takes a second or two and belongs to the time that is stated.
        wall_s = time.monotonic() - ready_s
        found = replace(found, wall_s=wall_s, bars=bars_of(figures, wall_s))
        page.write_page(found, options.out / "report.png", options.out / "report.html")
        report.write_json(report.as_json(found), options.out / "report.json")
    _print(found, options)
    return found.passed


def _ask(
    options: Options, script: Script, plans: Sequence[Plan], model: Path, encode: Encode, display: Display
) -> phases.Asked:
    options.out.mkdir(parents=True, exist_ok=True)
    display.stage("starting three servers", len(plans))

    def on_ready(name: str) -> None:
        display.now(f"{name} is ready")
        display.step()

    with Servers(plans, model, options.out, on_ready) as servers:
        asked = asyncio.run(phases.ask_all(servers, script, encode, display))
        display.stage("ending the servers", 1)
    return asked


def fitting(script: Script, encode: Encode) -> Script:
    """Give back ``script`` if its longest context fits.

    Raises:
        DemoError: It does not.
    """
    turn_count = script.turn_count + script.concurrent_turn_count
    longest_tokens = longest_context_tokens(encode, script.user_count, turn_count, script.new_tokens)
    if longest_tokens > MAX_CONTEXT_TOKENS:
        raise DemoError(
            f"{script.user_count} users with {script.turn_count} turns each reach contexts of"
            f" {longest_tokens:,} tokens; the demo is made for up to {MAX_CONTEXT_TOKENS:,}: take fewer turns"
        )
    return script


def _script(options: Options, encode: Encode) -> Script:
    return fitting(Script(options.user_count, options.turn_count, CONCURRENT_TURNS, NEW_TOKENS), encode)


def plans_of(script: Script, kv_transfer_config: str) -> list[Plan]:
    """Plan the three servers."""
    # One place for every user and two for the warm-up: nothing has ever to leave.
    large = (script.user_count + 4) * MAX_MODEL_TOKENS // BLOCK_TOKENS
    return [
        Plan(KVTIDE, SMALL_POOL_BLOCKS, kv_transfer_config),
        Plan(RECOMPUTE, SMALL_POOL_BLOCKS),
        Plan(REFERENCE, large),
    ]


def _print(found: report.Report, options: Options) -> None:
    if options.as_json:
        print(json.dumps(report.summary(report.as_json(found)), indent=1, ensure_ascii=False))
        return
    console = result_console()
    table.show(found, console)
    names = ", ".join(f"{options.out}/report.{kind}" for kind in ("json", "png", "html"))
    console.print(f"\n{names}", highlight=False)


def result_console() -> Console:
    """Make the console that results are printed on."""
    console = Console()
    # Nobody reads a table that wraps; a wide terminal does not make it better either.
    console.width = table.COLUMNS if not console.is_terminal else min(console.width, table.COLUMNS)
    return console


def _conversation(asked: phases.Asked, decode: Decode) -> list[report.Said]:
    return [
        report.Said(
            question=exchange.question,
            answer=decode(exchange.replies[KVTIDE].token_ids),
            prompt_tokens=exchange.replies[KVTIDE].prompt_tokens,
            ttft_ms={name: reply.ttft_ms for name, reply in exchange.replies.items()},
        )
        for exchange in asked.exchanges
        if exchange.user == 0
    ]


def tokenizer(model: Path) -> tuple[Encode, Decode]:
    """Text to token ids and back, with the model's own tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids)))

    return encode, decode


def connector_name(kv_transfer_config: str) -> str:
    """Name the connector of a setting, "none" without one.

    Raises:
        DemoError: It is no such setting.
    """
    if not kv_transfer_config:
        return "none"
    try:
        return str(json.loads(kv_transfer_config)["kv_connector"])
    except (ValueError, KeyError, TypeError):
        raise DemoError(f"not a --kv-transfer-config with a kv_connector: {kv_transfer_config}") from None


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Within it SIGTERM ends the demo as Ctrl-C does: with its servers."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
