"""How fast the modelled engine computes and copies: a few numbers, and where they come from.

A step takes ``step_s``, what its prompt tokens take, each of them and each pair of one of them with a token
before it, and what its decoding requests take. Knows no tiers below host memory: those have their own.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvtide.errors import ConfigError
from kvtide.sim.serving_metrics import is_metrics_page, rates_on_page

TABLE = "serving_rates.json"
MUST_BE_ABOVE_ZERO = ("prompt_tokens_per_s", "store_bytes_per_s", "load_bytes_per_s", "idle_s")


@dataclass(frozen=True, slots=True)
class EngineRates:
    """Of one engine, all its devices together.

    Attributes:
        prompt_tokens_per_s: Prompt tokens computed, attention left aside.
        pair_s: Attention: seconds for a prompt token to look at one token before it.
        step_s: What every step takes that computes anything.
        decode_s: What each token takes that is generated, beside others of the same step.
        decode_pair_s: Seconds for such a token to look at one token before it.
        idle_s: Between two steps that compute nothing, while a copy is waited for.
        front_s: From a request's being sent to its being queued, and from its first token back.
        store_bytes_per_s: From the device to host memory.
        load_bytes_per_s: From host memory to the device.
        copy_s: What each such copy takes beside its bytes.
        source: Who has measured or published it.
    """

    prompt_tokens_per_s: float
    pair_s: float = 0.0
    step_s: float = 0.0
    decode_s: float = 0.0
    decode_pair_s: float = 0.0
    idle_s: float = 0.001
    front_s: float = 0.0
    store_bytes_per_s: float = 20e9
    load_bytes_per_s: float = 20e9
    copy_s: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "source":
                continue
            above = one.name in MUST_BE_ABOVE_ZERO
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"rates.{one.name}", value, "give a number")
            if not math.isfinite(value) or value < 0 or (above and value == 0):
                raise ConfigError(
                    f"rates.{one.name}", value, f"give a number {'above' if above else 'from'} 0"
                )

    def prompt_s(self, computed_tokens: int, token_count: int) -> float:
        """Seconds for ``token_count`` tokens of a prompt behind ``computed_tokens`` that are there."""
        pairs = token_count * computed_tokens + token_count * (token_count + 1) / 2
        return token_count / self.prompt_tokens_per_s + pairs * self.pair_s

    def decode_step_s(self, request_count: int, context_tokens: float) -> float:
        """Seconds for a token of each of so many requests, with so many tokens before them in all."""
        return request_count * self.decode_s + context_tokens * self.decode_pair_s


def known_rates() -> dict[str, EngineRates]:
    """Read the table of this package."""
    table = json.loads(files("kvtide.sim").joinpath(TABLE).read_text("utf-8"))
    return {name: EngineRates(**numbers) for name, numbers in table.items()}


def rates_named(name: str) -> EngineRates:
    """Find rates.

    Args:
        name: Of the table; or a file, either JSON with the fields of ``EngineRates`` or a page of metrics of
            a vLLM server that ran with kvtide (``curl .../metrics > FILE``).

    Raises:
        ConfigError: Neither, or it cannot be read.
    """
    table = known_rates()
    if name in table:
        return table[name]
    known = f"give one of {', '.join(table)}, or a file: JSON, or the /metrics page of a vLLM server"
    path = Path(name)
    if not name or not path.is_file():
        raise ConfigError("rates", name, known)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("rates", name, f"cannot be read ({error}); {known}") from None
    if is_metrics_page(text):
        return _rates_of(rates_on_page(text, name), f"metrics in {path.name}")
    try:
        numbers = json.loads(text)
    except ValueError as error:
        raise ConfigError("rates", name, f"is neither JSON ({error}) nor a page of metrics") from None
    if not isinstance(numbers, dict):
        raise ConfigError("rates", name, "is JSON, but no object with names of rates")
    return _rates_of(numbers, path.name)


def _rates_of(numbers: Mapping[str, Any], source: str) -> EngineRates:
    known = [one.name for one in fields(EngineRates)]
    for name in numbers:
        if name not in known:
            raise ConfigError("rates", name, f"no such rate; there are {', '.join(known)}")
    if "prompt_tokens_per_s" not in numbers:
        raise ConfigError("rates", source, "prompt_tokens_per_s is missing, without which there is no engine")
    return EngineRates(**{"source": source, **numbers})
