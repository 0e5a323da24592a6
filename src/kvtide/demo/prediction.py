"""The demo's first phase replayed: what its records say should have been loaded, and how soon answered.

Knows ``report.json``: lengths, cached and loaded tokens, times. Needs neither a model nor a server, nor what
was said: one user's prompts go on from one another, so that a block is known by its user and its place, and
what first prompts found cached is what all of them begin with.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvtide.demo.conversation import FIRST_PROMPT_TOKENS
from kvtide.demo.errors import DemoError
from kvtide.demo.model import KV_BYTES_PER_TOKEN
from kvtide.demo.phases import KVTIDE, RECOMPUTE, REFERENCE, WARM_UP_PROMPTS, WARM_UP_TOKENS
from kvtide.demo.servers import MAX_BATCHED_TOKENS
from kvtide.errors import ConfigError
from kvtide.sim.serving import ServingSetup, serve
from kvtide.sim.serving_calibration import Observed, calibrated
from kvtide.sim.serving_queue import EngineLimits
from kvtide.sim.serving_rates import EngineRates
from kvtide.sim.traces.request import TraceRequest

APART_S = 60.0
"""Nobody asks while another is answered: so far apart, nobody does in the replay."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a replay of a run says, beside what the run has shown.

    Attributes:
        hit_tokens: Per request of the first phase, cached and of these loaded: predicted, and real.
        ttft_p50_s: Of requests that loaded: predicted, and real.
        rates: Calibrated from requests of the run that were computed.
    """

    hit_tokens: Sequence[tuple[tuple[int, int], tuple[int, int]]]
    ttft_p50_s: tuple[float, float]
    rates: EngineRates

    @property
    def is_exact(self) -> bool:
        """Whether every request hit what was predicted."""
        return all(predicted == real for predicted, real in self.hit_tokens)

    @property
    def ttft_error(self) -> float:
        """Predicted beyond real, as a share of real; below 0 where it was predicted too soon."""
        predicted_s, real_s = self.ttft_p50_s
        return predicted_s / real_s - 1


def predict(report: Mapping[str, Any]) -> Prediction:
    """Replay what a demo asked kvtide's server, one request at a time.

    Args:
        report: As read from ``report.json``.

    Raises:
        DemoError: It is of something else, or says too little.
    """
    try:
        records, asked = report["requests"], report["asked"]
        block_tokens = asked["block_tokens"]
        pool_blocks = asked["engine_pool_tokens"][KVTIDE] // block_tokens
        trace = _trace_of(records, block_tokens, asked["new_tokens"])
        setup = ServingSetup(
            KV_BYTES_PER_TOKEN,
            report["host_bytes_budget"],
            EngineLimits(pool_blocks, step_tokens=MAX_BATCHED_TOKENS),
            rates_of(report),
        )
        result = serve(trace, setup)
        first = len(trace) - len(records)
        hits = [
            ((own + loaded, loaded), (record[KVTIDE]["cached_tokens"], record[KVTIDE]["loaded_tokens"]))
            for (own, loaded), record in zip(result.hit_tokens_by_request[first:], records, strict=True)
        ]
        loaded_at = [at for at, (_, (_, loaded)) in enumerate(hits) if loaded]
        if not loaded_at:
            raise DemoError("nothing was loaded in this run: there is nothing to predict")
        predicted_s = median(result.ttft_by_request_s[first + at] for at in loaded_at)
        real_s = median(records[at][KVTIDE]["ttft_ms"] for at in loaded_at) / 1e3
    except (KeyError, TypeError, IndexError) as error:
        raise DemoError(f"this is no report of the demo, or one of an earlier version: {error!r}") from None
    except ConfigError as error:
        raise DemoError(f"the report cannot be replayed: {error}") from None
    return Prediction(hits, (predicted_s, real_s), setup.rates)


def rates_of(report: Mapping[str, Any]) -> EngineRates:
    """Calibrate with what loaded nothing: first turns, what was recomputed, hits of an engine itself."""
    computed = []
    for record in report["requests"]:
        for name in (RECOMPUTE, REFERENCE, KVTIDE):
            reply = record[name]
            if reply is None or reply["loaded_tokens"]:
                continue
            cached = reply["cached_tokens"]
            computed.append(
                Observed(
                    cached,
                    reply["prompt_tokens"] - cached,
                    len(reply["token_ids"]),
                    reply["ttft_ms"] / 1e3,
                    reply["total_ms"] / 1e3,
                )
            )
    moved, took = report["bytes_moved"], report["copy_s"]
    return calibrated(computed, *(moved[way] / took[way] for way in ("store", "load")))


def _trace_of(records: Sequence[Mapping[str, Any]], block_tokens: int, new_tokens: int) -> list[TraceRequest]:
    """Write down the warm-up and the first phase, as a recording would have it."""
    shared = max((record[KVTIDE]["cached_tokens"] for record in records if not record["turn"]), default=0)
    asked = [(f"warm-up {number}", FIRST_PROMPT_TOKENS, WARM_UP_TOKENS) for number in range(WARM_UP_PROMPTS)]
    asked.append(asked[0])
    trace: list[TraceRequest] = []
    for who, prompt_tokens, output_tokens in asked:
        names = _names(who, (prompt_tokens + output_tokens) // block_tokens, 0)
        trace.append(_request(len(trace), names, block_tokens, prompt_tokens, output_tokens))
    for record in records:
        prompt_tokens = record[KVTIDE]["prompt_tokens"]
        names = _names(
            f"user {record['user']}", (prompt_tokens + new_tokens) // block_tokens, shared // block_tokens
        )
        trace.append(_request(len(trace), names, block_tokens, prompt_tokens, new_tokens))
    return trace


def _request(
    number: int, names: Sequence[bytes], block_tokens: int, prompt_tokens: int, output_tokens: int
) -> TraceRequest:
    whole = prompt_tokens // block_tokens
    return TraceRequest(
        APART_S * number,
        names[:whole],
        block_tokens,
        prompt_tokens,
        output_tokens,
        generated_hashes=names[whole:],
    )


def _names(who: str, count: int, shared_count: int) -> list[bytes]:
    """Name the blocks of one user, the first of which all have."""
    return [
        hashlib.sha256(f"{'everybody' if at < shared_count else who}/{at}".encode()).digest()[:16]
        for at in range(count)
    ]
