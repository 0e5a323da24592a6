"""``kvtide advise``: what more memory would bring, and what less would cost, in words.

Knows options and how the answer is shown. Where estimates come from is in ``advise_page`` and
``kvtide.adviser.reading`` for a server, in ``advise_replay`` for a trace; what is said is
``kvtide.adviser.words``.
"""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.colors import GREEN

from kvtide.adviser import window
from kvtide.adviser.reading import EngineEstimates, TierEstimates, engines_on, is_ours, together
from kvtide.adviser.words import WORTH_POINTS, advice_on, bar_of, now_in_words, sentence_of, verdict_of
from kvtide.cli.advise_page import HINT, SETTING, address_of, page_at
from kvtide.cli.advise_replay import (
    DEFAULT_POLICY,
    HostMemoryOption,
    ModelOption,
    PolicyOption,
    RatesOption,
    ReplayAsked,
    ReplayOption,
    SlowerOption,
    replayed,
)
from kvtide.cli.folders import JsonOption, counted, print_json, printable, refusing, tell
from kvtide.cli.output import MAX_WIDTH
from kvtide.cli.replay_reading import (
    BlockOption,
    ContinuedOption,
    FormatOption,
    SeedOption,
    SkipOption,
    SpanOption,
    TokenizerOption,
    reading_of,
)
from kvtide.errors import ConfigError

TOO_EARLY = 1
TIMEOUT_S = 10.0
LONGEST_S = 3600.0
DROPPED_SHARE = 0.01
"""So many requests that the ghosts did not see are worth a word."""

EPILOG = """Examples:

* `kvtide advise http://localhost:8000` asks a server that runs with kvtide, and says what it has found
* `kvtide advise http://localhost:8000 --worth 3` advises more memory where a doubling brings 3 points
* `kvtide advise --replay asked.jsonl --model config.json --host-memory 64GiB` asks a trace instead
* `kvtide advise http://localhost:8000 --json | jq '.models[].tiers[].advice'` is for programs

A point is one of 100 prompt tokens that need not be computed. What stands behind ± is two standard errors:
where a gain is smaller than that, nothing is claimed. docs/adviser.md says what the estimates cannot know.
"""


def advise(
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="URL",
            help="The server, or its page of metrics: http://localhost:8000/metrics.",
            show_default=False,
        ),
    ] = None,
    worth: Annotated[
        float,
        typer.Option(
            "--worth",
            metavar="POINTS",
            help="So many more of 100 prompt tokens have to be hits for memory to be doubled.",
        ),
    ] = WORTH_POINTS,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="For the whole page to come.")
    ] = TIMEOUT_S,
    as_json: JsonOption = False,
    replay: ReplayOption = None,
    model: ModelOption = None,
    host_memory: HostMemoryOption = None,
    policy: PolicyOption = DEFAULT_POLICY,
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
    """Say what more host memory or disk would bring, and what less would cost.

    A server with kvtide watches what caches of half, twice and four times the size would hit of its own
    requests. This asks it once, and says it in words. With --replay a recorded trace is asked instead.

    Exit code 0: something is said. 1: too early, or the server has no adviser. 2: nobody could be asked.
    """
    with refusing(as_json):
        if not 0 < worth <= 100:
            raise ConfigError("--worth", worth, "give points above 0 and up to 100: 1 is one of 100 tokens")
        if not 0 < timeout <= LONGEST_S:
            raise ConfigError("--timeout", timeout, f"give seconds above 0 and up to {LONGEST_S:g}")
        asked = ReplayAsked(model, host_memory, policy, rates, slower)
        if not replay:
            asked.refuse()
            source, engines = asked_of_server(url, timeout)
        elif url is not None:
            raise ConfigError("--replay", replay[0], "give this or a URL, not both")
        else:
            paths = list(map(Path, replay))
            reading = reading_of(
                paths, format_name, skip_bad_records, continued, block_tokens, session_span, seed, tokenizer
            )
            source, engines = ", ".join(map(str, paths)), [replayed(reading, asked)]
        show(engines, source, worth, as_json)


def asked_of_server(url: str | None, timeout_s: float) -> tuple[str, list[EngineEstimates]]:
    """Ask a server.

    Returns:
        Where its page is, for people, and what its engines say.

    Raises:
        ConfigError: It cannot be asked, or is not one of ours.
    """
    if url is None:
        raise ConfigError(SETTING, None, HINT)
    address = address_of(url)
    page = page_at(address, timeout_s)
    if not is_ours(page):
        hint = "has no metrics of kvtide: is this a vLLM server, and with kvtide?"
        raise ConfigError(SETTING, address.shown, hint)
    return address.shown, engines_on(page)


def show(engines: Sequence[EngineEstimates], source: str, worth: float, as_json: bool) -> None:
    """Print what is known.

    Raises:
        typer.Exit: With 1, when that is nothing.
    """
    models = together(engines)
    if as_json:
        print_json(as_plain(models, engines, source, worth))
    else:
        _print(models, source, worth)
    if not any(one.is_ready for one in models):
        raise typer.Exit(TOO_EARLY)


def as_plain(
    models: Sequence[EngineEstimates], engines: Sequence[EngineEstimates], source: str, worth: float
) -> dict[str, Any]:
    """Put what is known into plain types for JSON."""
    return {
        "ok": any(one.is_ready for one in models),
        "source": source,
        "needed_requests": window.LEAST_REQUESTS,
        "worth_points": worth,
        "models": [_plain(one, worth) for one in models],
        "engines": [_plain(one, worth) for one in engines],
    }


def _plain(found: EngineEstimates, worth: float) -> dict[str, Any]:
    return {
        "model": found.model,
        "engines": list(found.engines),
        "requests": found.requests,
        "judged_requests": found.judged_requests,
        "dropped_requests": found.dropped_requests,
        "sampled_share": found.sampled_share,
        "tiers": [_plain_tier(tier, worth) for tier in found.tiers],
    }


def _plain_tier(tier: TierEstimates, worth: float) -> dict[str, Any]:
    advice = advice_on(tier, worth)
    return {
        "tier": tier.tier,
        "size_bytes": tier.size_bytes,
        "sizes": [
            {
                "times": one.times,
                "size_bytes": None if tier.size_bytes is None else int(one.times * tier.size_bytes),
                "hit_points": round(one.hit_points, 3),
                "gain_points": round(one.gain_points, 3),
                "error_points": round(one.error_points, 3),
                "bar_points": round(bar_of(one), 3),
                "first_token_s": one.first_token_s,
                "verdict": "now" if one.times == 1 else verdict_of(one).value,
                "sentence": now_in_words(tier) if one.times == 1 else sentence_of(tier, one),
            }
            for one in tier.estimates
        ],
        "advice": advice and {"times": advice.times, "sentence": advice.sentence},
    }


def _print(models: Sequence[EngineEstimates], source: str, worth: float) -> None:
    tell("asked", source)
    if not models:
        tell(
            "early", "kvtide is there, and its adviser is not: see the setting adviser; older ones have none"
        )
    for found in models:
        name = printable(found.model, 64) or "a model not named"
        many = f", {counted(len(found.engines), 'engine')} taken together" if found.engines[1:] else ""
        tell("model", name + many)
        tell("seen", _seen(found))
        if found.requests and found.dropped_requests > DROPPED_SHARE * found.requests:
            share = 100 * found.dropped_requests / found.requests
            tell("", f"{share:.0f} % of the requests came too fast for the adviser and were not looked at")
        for tier in found.tiers if found.is_ready else ():
            typer.echo()
            _print_tier(tier, worth)


def _seen(found: EngineEstimates) -> str:
    if not found.is_ready:
        seen = found.judged_requests or found.requests
        if seen < window.LEAST_REQUESTS:
            return f"{seen:,} of the {window.LEAST_REQUESTS:,} requests an estimate needs"
        return f"{counted(seen, 'request')}, and no estimate of any tier yet"
    share, judged = found.sampled_share, found.judged_requests
    text = counted(found.requests, "request")
    if share is not None and share < 1:
        return (
            f"{text}; {100 * share:.2g} % of the sessions are followed, their last {judged:,} requests judged"
        )
    return f"{text}, all judged" if judged >= found.requests else f"{text}, the last {judged:,} judged"


def _print_tier(tier: TierEstimates, worth: float) -> None:
    others = [one for one in tier.estimates if one.times != 1]
    said = [now_in_words(tier), *(sentence_of(tier, one) for one in others)]
    width = min(Console().width, MAX_WIDTH)
    for sentence in said:
        typer.echo(fill(sentence, width, subsequent_indent="    ", break_long_words=False))
    if (advice := advice_on(tier, worth)) is not None:
        typer.secho(fill(advice.sentence, width, subsequent_indent="    ", break_long_words=False), fg=GREEN)
