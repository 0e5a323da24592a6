"""A real engine's run, replayed: what it loaded is predicted exactly, when its first tokens came closely.

The demo's first phase in small: users in turn, one request at a time, each going on from what was really
said, in a pool that is too small for all. Rates come from the requests of this run that were computed.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import pytest

from engine import models
from engine.exchanges import POOL_BLOCKS
from engine.tiny_engine import BLOCK_TOKENS, IDLE_PAUSE_S, Reply, TinyEngine, prompt_of, tiny_engine
from kvtide.sim.serving import ServingSetup, serve
from kvtide.sim.serving_calibration import Observed, calibrated
from kvtide.sim.serving_queue import EngineLimits
from kvtide.sim.serving_rates import EngineRates
from kvtide.sim.serving_result import ServingResult
from kvtide.sim.traces.request import TraceRequest

FIRST_PROMPT_TOKENS = (120, 350, 480, 230)
TURNS = 3
QUESTION_TOKENS = 70
NEW_TOKENS = 7
FOLLOW_UP_TOKENS = (60, 150, 220)
HOST_BYTES = 64 << 20
KV_BYTES_PER_TOKEN = 8 * 2 * 64 * 2 * 2
"""Eight layers, two heads of 64 numbers, key and value, two bytes each."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request and what became of it.

    Attributes:
        first_token_s: Of this thread's processor time, as others use the machine, too; with the rests of
            an engine that waits for a copy, as vLLM's own loop takes them.
        whole_s: The same to the last token.
    """

    reply: Reply
    first_token_s: float
    whole_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """A conversation with a real engine, and how fast it copied."""

    asked: Sequence[Asked]
    store_bytes_per_s: float
    load_bytes_per_s: float


def ask_timed(engine: TinyEngine, prompt: list[int]) -> Asked:
    began_s, rests = time.thread_time(), 0
    name = engine.submit(prompt, NEW_TOKENS)
    engine.step()
    # A prompt fits a step: what has given no token has computed nothing.
    while not engine.reply(name).token_ids:
        time.sleep(IDLE_PAUSE_S)
        rests += 1
        engine.step()
    first_s = time.thread_time()
    (reply,) = engine.finish([name])
    ended_s = time.thread_time()
    engine.drain()
    rested_s = rests * IDLE_PAUSE_S
    return Asked(reply, first_s - began_s + rested_s, ended_s - began_s + rested_s)


@pytest.fixture(scope="module")
def run() -> Run:
    with tiny_engine(models.llama_wide(), POOL_BLOCKS, {"host_memory": HOST_BYTES}) as engine:
        # The first request of a process, the first hit and the first load pay for what is done once.
        for seed in (800, 801, 800, 801):
            engine.ask(prompt_of(seed, 600))
        asked = []
        said = [prompt_of(900 + user, count) for user, count in enumerate(FIRST_PROMPT_TOKENS)]
        for turn in range(TURNS):
            for user, history in enumerate(said):
                question = prompt_of(1000 + 10 * turn + user, QUESTION_TOKENS) if turn else []
                asked.append(ask_timed(engine, history + question))
                said[user] = [*asked[-1].reply.prompt, *asked[-1].reply.token_ids]
        # And what the engine still has, with more and less to compute behind it.
        for number, count in enumerate(FOLLOW_UP_TOKENS):
            asked.append(ask_timed(engine, said[-1] + prompt_of(1100 + number, count)))
        totals = engine.totals
    store, load = (
        totals[f"transfer_bytes|{way}"] / totals[f"transfer_seconds|{way}"] for way in ("store", "load")
    )
    return Run(asked, store, load)


def trace_of(run: Run) -> list[TraceRequest]:
    """Write down what a recording would: names of blocks, and when nobody else is there."""
    trace = []
    for number, asked in enumerate(run.asked):
        prompt = asked.reply.prompt
        names = names_of([*prompt, *asked.reply.token_ids])
        whole = len(prompt) // BLOCK_TOKENS
        trace.append(
            TraceRequest(
                10.0 * number,
                names[:whole],
                BLOCK_TOKENS,
                len(prompt),
                NEW_TOKENS,
                generated_hashes=names[whole:],
            )
        )
    return trace


def names_of(tokens: Sequence[int]) -> list[bytes]:
    names, name = [], b""
    for at in range(0, len(tokens) - len(tokens) % BLOCK_TOKENS, BLOCK_TOKENS):
        name = hashlib.sha256(name + repr(list(tokens[at : at + BLOCK_TOKENS])).encode()).digest()[:16]
        names.append(name)
    return names


def rates_of(run: Run) -> EngineRates:
    """Calibrate with what was computed, and loaded nothing."""
    computed = [
        Observed(
            one.reply.local_tokens,
            len(one.reply.prompt) - one.reply.local_tokens,
            NEW_TOKENS,
            one.first_token_s,
            one.whole_s,
        )
        for one in run.asked
        if not one.reply.loaded_tokens
    ]
    assert len(computed) == len(FIRST_PROMPT_TOKENS) + len(FOLLOW_UP_TOKENS)
    return calibrated(computed, run.store_bytes_per_s, run.load_bytes_per_s)


@pytest.fixture(scope="module")
def predicted(run: Run) -> ServingResult:
    setup = ServingSetup(KV_BYTES_PER_TOKEN, HOST_BYTES, EngineLimits(POOL_BLOCKS, running=8), rates_of(run))
    return serve(trace_of(run), setup)


def test_hits_are_predicted_exactly_request_by_request(run: Run, predicted: ServingResult) -> None:
    real = [(one.reply.local_tokens, one.reply.loaded_tokens) for one in run.asked]
    assert list(predicted.hit_tokens_by_request) == real
    # There is something to predict: loads, hits of the engine's own, and both for one request.
    assert sum(loaded > 0 for _, loaded in real) == (TURNS - 1) * len(FIRST_PROMPT_TOKENS)
    assert any(own and loaded for own, loaded in real)


def test_times_to_first_token_are_predicted_within_a_quarter(run: Run, predicted: ServingResult) -> None:
    hits = [at for at, one in enumerate(run.asked) if one.reply.loaded_tokens]
    real_s = median(run.asked[at].first_token_s for at in hits)
    predicted_s = median(predicted.ttft_by_request_s[at] for at in hits)
    assert predicted_s == pytest.approx(real_s, rel=0.25)
