"""What a vLLM server's own ``/metrics`` page says of its speed.

Means over all it was asked since it started: of a server that was asked many things at once they take waiting
for others for slowness. Knows the names of the series; does not know what is made of the numbers.
"""

import re

from kvtide.errors import ConfigError

_SAMPLE = re.compile(
    r'^(?P<name>vllm:[\w:]+)(?:\{(?P<labels>[^\n]*)\})? (?P<value>[-+\w.]+)(?: \d+)?$', re.MULTILINE
)  # fmt: skip

PREFILL = "vllm:request_prefill_time_seconds"
COMPUTED = "vllm:request_prefill_kv_computed_tokens"
BETWEEN = "vllm:inter_token_latency_seconds"
FIRST = "vllm:time_to_first_token_seconds"
QUEUED = "vllm:request_queue_time_seconds"
COPIED = "vllm:kvtide_transfer_"


def is_metrics_page(text: str) -> bool:
    """Whether a text is a page of metrics of vLLM."""
    return _SAMPLE.search(text) is not None


def rates_on_page(text: str, name: str) -> dict[str, float]:
    """Work out rates.

    A generated token's time is taken for that of a step, as prompts are computed in steps, too; attention is
    within the pace of prompts, which were as long as they were.

    Args:
        text: The page.
        name: Of the file, for whoever has to look for what is wrong.

    Returns:
        Fields of ``EngineRates``, those the page says something of.

    Raises:
        ConfigError: It says nothing of prompts.
    """
    prompts = _total(text, f"{PREFILL}_count")
    prefill_s, computed = _total(text, f"{PREFILL}_sum"), _total(text, f"{COMPUTED}_sum")
    if not (prompts and prefill_s > 0 and computed > 0):
        raise ConfigError("rates", name, f"{PREFILL} and {COMPUTED} count nothing: ask the server first")
    rates: dict[str, float] = {}
    step_s = 0.0
    if between := _total(text, f"{BETWEEN}_count"):
        step_s = _total(text, f"{BETWEEN}_sum") / between
    # What a step takes of itself is no part of what its tokens take.
    computing_s = prefill_s - prompts * step_s
    if computing_s < prefill_s / 2:
        step_s, computing_s = 0.0, prefill_s
    rates["step_s"] = step_s
    rates["prompt_tokens_per_s"] = computed / computing_s
    if first := _total(text, f"{FIRST}_count"):
        queued_s = _total(text, f"{QUEUED}_sum") / max(1.0, _total(text, f"{QUEUED}_count"))
        rates["front_s"] = max(0.0, _total(text, f"{FIRST}_sum") / first - queued_s - prefill_s / prompts)
    for direction in ("store", "load"):
        copied = _total(text, f"{COPIED}bytes_total", f'direction="{direction}"')
        copied_s = _total(text, f"{COPIED}seconds_total", f'direction="{direction}"')
        if copied > 0 and copied_s > 0:
            rates[f"{direction}_bytes_per_s"] = copied / copied_s
    return rates


def _total(text: str, name: str, label: str = "") -> float:
    """Sum the samples of a name that carry a label; 0 without any."""
    return sum(
        float(sample["value"])
        for sample in _SAMPLE.finditer(text)
        if sample["name"] == name and label in (sample["labels"] or "")
    )
