"""``kvtide replay``: what a cache would do for a recorded trace.

Knows the options and what they may be; what is replayed and shown is in ``replay_fractions``.
"""

from decimal import Decimal, InvalidOperation
from typing import Annotated

import typer

from kvtide.cli.folders import JsonOption, refusing
from kvtide.cli.replay_fractions import replay_fractions
from kvtide.cli.replay_page import HtmlOption, refuse_page
from kvtide.cli.replay_reading import (
    BlockOption,
    ContinuedOption,
    FormatOption,
    SeedOption,
    SkipOption,
    SpanOption,
    TokenizerOption,
    TracesArgument,
    reading_of,
)
from kvtide.cli.replay_serving import (
    DiskOption,
    DiskQueueOption,
    EngineBlocksOption,
    HostMemoryOption,
    ModelOption,
    RatesOption,
    ServingAsked,
    SlowerOption,
    replay_serving,
    serving_policies,
)
from kvtide.errors import ConfigError
from kvtide.sim.fractions import known
from kvtide.sim.model_bytes import bytes_per_token

ALL = "all"
MOST_JOBS = 256
FRACTIONS = "0.005,0.01,0.02,0.05,0.1,0.2,0.4"

EPILOG = """Examples:

* `kvtide replay conversation.jsonl.gz` says how often each policy hits, from 0.5 to 40 % of the blocks
* `kvtide replay week/*.jsonl.gz --policies lru,adaptive,optimum --fractions 0.01,0.1` asks less
* `kvtide replay conversation.jsonl.gz --model 131072 --host-memory 64GiB,256GiB --disk 1TiB@6GB/s` serves it
* `kvtide replay conversation.jsonl.gz --json > found.json` is for programs

`unbounded` is a cache that keeps everything, `optimum` the best that any policy could do with so many blocks,
knowing the future: if it is not far above the others, only more memory helps.
"""


def replay(
    traces: TracesArgument,
    fractions: Annotated[
        str | None,
        typer.Option(
            "--fractions",
            metavar="SHARE,...",
            help="Sizes of the cache, as shares of the different full blocks of the trace: 0.01 is 1 %."
            f" Default: {FRACTIONS}.",
            show_default=False,
        ),
    ] = None,
    policies: Annotated[
        str,
        typer.Option(
            "--policies",
            "--policy",
            metavar="NAME,...",
            help=f"Who decides what is kept: {', '.join(known())}; or all.",
        ),
    ] = ALL,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", metavar="N", help="Processes at once. Default: one for each core.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
    model: ModelOption = None,
    host_memory: HostMemoryOption = None,
    disk: DiskOption = None,
    disk_queue: DiskQueueOption = None,
    engine_blocks: EngineBlocksOption = None,
    rates: RatesOption = None,
    slower: SlowerOption = None,
    format_name: FormatOption = None,
    skip_bad_records: SkipOption = False,
    continued: ContinuedOption = False,
    block_tokens: BlockOption = None,
    session_span: SpanOption = None,
    seed: SeedOption = 0,
    tokenizer: TokenizerOption = None,
) -> None:
    """Replay a recorded trace, and say how often a cache of which size would have hit.

    Every prompt is looked up and stored by the code that decides in production, one request after another.
    What hits is a full block that is there with all before it.

    With --model alone sizes are told in bytes, too. With --model and --host-memory a whole server is replayed
    instead, with times: an engine with a pool of its own, queueing, prompts computed in pieces, copies and
    disks, around production's scheduler half.

    Exit code 0: it was replayed. 2: it could not be.
    """
    with refusing(as_json):
        if html is not None:
            refuse_page(html)
        reading = reading_of(
            traces, format_name, skip_bad_records, continued, block_tokens, session_span, seed, tokenizer
        )
        disks = tuple(disk or ())
        served = ServingAsked(model, host_memory, disks, disk_queue, engine_blocks, rates, slower)
        # A model without a server around it says what shares are in bytes.
        if served.is_any and not served.is_model_alone:
            if fractions is not None:
                raise ConfigError(
                    "--fractions", fractions, "leave it out: a server's sizes are --host-memory"
                )
            names = serving_policies(policies_of(policies), were_given=ALL not in policies.split(","))
            replay_serving(reading, served, names, jobs_of(jobs), as_json, html)
            return
        shares = fractions_of(FRACTIONS if fractions is None else fractions)
        token_bytes = None if model is None else bytes_per_token(model)
        replay_fractions(reading, policies_of(policies), shares, jobs_of(jobs), as_json, html, token_bytes)


def fractions_of(text: str) -> list[str]:
    """Read shares, each as it was written.

    Raises:
        ConfigError: One of them is none.
    """
    hint = "give shares of the trace's different full blocks, above 0 and up to 1: 0.005,0.01,0.1"
    found = [part.strip() for part in text.split(",") if part.strip()]
    for part in found:
        try:
            share = Decimal(part)
        except InvalidOperation:
            raise ConfigError("--fractions", part, hint) from None
        if not (share.is_finite() and 0 < share <= 1):
            raise ConfigError("--fractions", part, hint)
    if not found:
        raise ConfigError("--fractions", text, hint)
    return list(dict.fromkeys(found))


def policies_of(text: str) -> list[str]:
    """Read names of policies, once each.

    Raises:
        ConfigError: Nobody is called that.
    """
    hint = f"give names of {', '.join(known())}, or {ALL}"
    found = [part.strip() for part in text.split(",") if part.strip()]
    for part in found:
        if part not in (*known(), ALL):
            raise ConfigError("--policies", part, hint)
    if not found:
        raise ConfigError("--policies", text, hint)
    return list(known()) if ALL in found else list(dict.fromkeys(found))


def jobs_of(count: int | None) -> int | None:
    """Judge a number of processes.

    Raises:
        ConfigError: None can do that.
    """
    if count is not None and not 1 <= count <= MOST_JOBS:
        raise ConfigError("--jobs", count, f"give a whole number from 1 to {MOST_JOBS}")
    return count
