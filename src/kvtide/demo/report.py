"""The report: everything measured and everything needed to judge it again, as one JSON file.

Knows which field is called what; ``scripts/check_exact.py`` reads the same fields without this package.
Does not know how figures are shown.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtide.demo.bars import Bar
from kvtide.demo.exactness import MIN_LOADED_TOKENS
from kvtide.demo.figures import Figures
from kvtide.demo.phases import KVTIDE, RECOMPUTE, RECOMPUTE_TOKENS, REFERENCE, Exchange, Script
from kvtide.demo.servers import BLOCK_TOKENS, Plan

BULKY_FIELDS = ("requests", "conversation")
"""Fields that ``report.json`` has and a summary does not."""


@dataclass(frozen=True, slots=True)
class Said:
    """One turn of one conversation, for people."""

    question: str
    answer: str
    prompt_tokens: int
    ttft_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Report:
    """What the demo found.

    Attributes:
        plans: The three servers.
        connector: Name of the connector on kvtide's server.
        conversation: The first user's, in words.
        versions: By package.
        machine: Processor, cores, memory and load when the demo began.
        setup_s: Fetching and converting the model; next to nothing when it was there.
        wall_s: All the rest.
    """

    script: Script
    plans: Sequence[Plan]
    connector: str
    exchanges: Sequence[Exchange]
    conversation: Sequence[Said]
    figures: Figures
    bars: Sequence[Bar]
    versions: Mapping[str, str]
    machine: Mapping[str, str]
    setup_s: float
    wall_s: float

    @property
    def passed(self) -> bool:
        """Whether every bar is met."""
        return all(bar.met for bar in self.bars)

    def context_tokens(self) -> tuple[int, int]:
        """Shortest and longest prompt of the first phase."""
        lengths = [reply.prompt_tokens for exchange in self.exchanges for reply in exchange.replies.values()]
        return min(lengths), max(lengths)


def as_json(report: Report) -> dict[str, object]:
    """Make the report's fields: numbers, strings, lists and dicts only."""
    figures, verdict = report.figures, report.figures.verdict
    return {
        "passed": report.passed,
        "exact": verdict.exact,
        "compared_requests": verdict.compared_requests,
        "diverging_requests": verdict.diverging_requests,
        "first_divergence": None if verdict.first_divergence is None else str(verdict.first_divergence),
        "not_comparable": [asdict(odd) for odd in verdict.not_comparable],
        "prompt_tokens": verdict.prompt_tokens,
        "loaded_tokens": verdict.loaded_tokens,
        "ttft_ms": {name: asdict(spread) for name, spread in figures.ttft_ms.items()},
        "host_bytes_budget": figures.host_bytes_budget,
        "host_bytes_used": figures.host_bytes_used,
        "bytes_moved": {"store": figures.last.stored_bytes, "load": figures.last.loaded_bytes},
        "copy_s": {"store": figures.last.stored_s, "load": figures.last.loaded_s},
        "resident_bytes": dict(figures.resident_bytes),
        "token_sources": {name: asdict(sources) for name, sources in figures.sources.items()},
        "concurrent": {name: asdict(rush) for name, rush in figures.rushes.items()},
        "bars": [bar_json(bar) for bar in report.bars],
        "setup_s": report.setup_s,
        "wall_s": report.wall_s,
        "versions": dict(report.versions),
        "machine": dict(report.machine),
        "connector": report.connector,
        "asked": _asked_json(report),
        "meaning": MEANING,
        "conversation": [asdict(said) for said in report.conversation],
        "requests": [request_json(exchange) for exchange in report.exchanges],
    }


MEANING = {
    "compared_requests": f"requests that loaded at least {MIN_LOADED_TOKENS} prompt tokens from host memory"
    " and whose cached length is that of the reference",
    "prompt_tokens": "sum over compared requests",
    "loaded_tokens": "sum over compared requests, by kvtide's own counter read before and after each",
    "ttft_ms": "of one request at a time, the other two servers being paused (SIGSTOP); the same prompts on"
    " all three: those that were a host hit on kvtide's server",
    "token_sources": "over the requests that all three servers were asked, which are all but first turns",
    "host_bytes_used": "the most that any reading of the server's metrics showed in use",
    "resident_bytes": "the system's account of each server's processes at the end; with kvtide the whole pool"
    " is in it, in use or not",
    "copy_s": "time in which bytes_moved were copied",
    "bytes_moved": "as last published by the server, warm-up included",
    "wall_s": "everything after the model was there: starting and ending the servers included",
}


def summary(fields: Mapping[str, object]) -> dict[str, object]:
    """Keep what fits a screen."""
    return {name: value for name, value in fields.items() if name not in BULKY_FIELDS}


def write_json(fields: Mapping[str, object], path: Path) -> None:
    """Write the report; one line per request keeps it readable and a tenth of the size of indented lists."""
    others = {name: value for name, value in fields.items() if name != "requests"}
    rest = json.dumps(others, indent=1, ensure_ascii=False)
    requests = fields["requests"]
    assert isinstance(requests, list)
    lines = ",\n  ".join(json.dumps(request, ensure_ascii=False) for request in requests)
    path.write_text(
        f'{rest.removesuffix("}").rstrip()},\n "requests": [\n  {lines}\n ]\n}}\n', encoding="utf-8"
    )


def bar_json(bar: Bar) -> dict[str, object]:
    """Write down a bar."""
    return {
        "name": bar.name,
        "figure": bar.figure,
        "sense": bar.sense.value,
        "limit": bar.limit,
        "unit": bar.unit,
        "met": bar.met,
    }


def _asked_json(report: Report) -> dict[str, object]:
    shortest, longest = report.context_tokens()
    return {
        **asdict(report.script),
        "recompute_new_tokens": RECOMPUTE_TOKENS,
        "block_tokens": BLOCK_TOKENS,
        "engine_pool_tokens": {plan.name: plan.pool_tokens for plan in report.plans},
        "shortest_prompt_tokens": shortest,
        "longest_prompt_tokens": longest,
    }


def request_json(exchange: Exchange) -> dict[str, object]:
    """Write down what each server made of one prompt."""
    ours = exchange.replies[KVTIDE]
    fields: dict[str, object] = {
        "user": exchange.user,
        "turn": exchange.turn,
        "question": exchange.question,
        "prompt_tokens": ours.prompt_tokens,
    }
    for name in (KVTIDE, REFERENCE, RECOMPUTE):
        reply = exchange.replies.get(name)
        fields[name] = None if reply is None else {
            "prompt_tokens": reply.prompt_tokens,
            "cached_tokens": reply.cached_tokens,
            "loaded_tokens": exchange.loaded_tokens if name == KVTIDE else 0,
            "ttft_ms": round(reply.ttft_ms, 3),
            "total_ms": round(1e3 * reply.total_s, 3),
            "token_ids": list(reply.token_ids),
            "logprobs": list(reply.logprobs),
        }  # fmt: skip
    return fields
