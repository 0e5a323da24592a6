"""A small report of the demo, as three servers might have given it."""

from collections.abc import Callable

import pytest

from kvtide.demo.ask import Reply
from kvtide.demo.bars import bars_of
from kvtide.demo.figures import figures_of
from kvtide.demo.phases import KVTIDE, RECOMPUTE, REFERENCE, Asked, Exchange, Rush, Script
from kvtide.demo.report import Report, Said
from kvtide.demo.scrape import Scrape
from kvtide.demo.servers import Plan

MakeReport = Callable[..., Report]


def reply(ttft_ms: float, cached_tokens: int, token_ids: tuple[int, ...] = (5, 6, 7)) -> Reply:
    logprobs = tuple((-token_id / 8).hex() for token_id in token_ids)
    return Reply(ttft_ms, ttft_ms / 1e3 + 0.5, 1300, cached_tokens, token_ids, logprobs)


def exchange(user: int, turn: int) -> Exchange:
    if turn == 0:
        return Exchange(user, 0, "What?", {KVTIDE: reply(600.0, 0), REFERENCE: reply(590.0, 0)}, 0)
    replies = {
        KVTIDE: reply(60.0 + user, 1280),
        REFERENCE: reply(58.0 + user, 1280),
        RECOMPUTE: reply(640.0 + user, 32),
    }
    return Exchange(user, turn, "Why <so>?", replies, 1280)


def make_report(exchanges: list[Exchange] | None = None, last: Scrape | None = None) -> Report:
    exchanges = exchanges or [exchange(user, turn) for turn in range(6) for user in range(9)]
    last = last or Scrape(45 * 1280, 3_000_000, 2_000_000, 0.3, 0.2, 400, 1000)
    rush = Rush((reply(100.0, 1280), reply(200.0, 1280)), 2.0)
    rushes = {KVTIDE: rush, RECOMPUTE: rush, REFERENCE: rush}
    figures = figures_of(Asked(tuple(exchanges), rushes, last, last.pool_used_bytes, {KVTIDE: 3 << 30}))
    return Report(
        script=Script(9, 6, 2, 3),
        plans=[Plan(KVTIDE, 128), Plan(RECOMPUTE, 128), Plan(REFERENCE, 864)],
        connector="KVTideConnector",
        exchanges=exchanges,
        conversation=[Said("Why <so>?", "Because 1 < 2 & 3.", 1300, {KVTIDE: 60.0})],
        figures=figures,
        bars=bars_of(figures, 200.0),
        versions={"python": "3", "vllm": "0.32.0"},
        machine={"cores": "2"},
        setup_s=0.0,
        wall_s=200.0,
    )


@pytest.fixture
def report() -> Report:
    return make_report()


@pytest.fixture
def report_of() -> MakeReport:
    return make_report
