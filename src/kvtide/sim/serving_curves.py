"""What ``kvtide replay --host-memory A,B,... --json`` prints, as figures for the page.

Knows the names in that JSON. Does not judge figures: ``kvtide.sim.curves`` does.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ByteSize, TypeAdapter

PERCENTILES = ("p50", "p95")


def figures_of_serving(found: Mapping[str, Any]) -> dict[str, object]:
    """Turn results around: there, policies stand below sizes of host memory; here, sizes below policies.

    Args:
        found: With ``results``: size as it was given, policy, what was found.

    Returns:
        What ``curves_of`` takes.
    """
    results: Mapping[str, Mapping[str, Mapping[str, Any]]] = found["results"]
    policies = list(dict.fromkeys(policy for row in results.values() for policy in row))
    first = next((one for row in results.values() for one in row.values()), {})

    def turned(name: str) -> dict[str, dict[str, Any]]:
        return {
            policy: {size: row[policy][name] for size, row in results.items() if policy in row}
            for policy in policies
        }

    times = {
        policy: {size: {key: at[key] for key in PERCENTILES} for size, at in row.items()}
        for policy, row in turned("ttft_s").items()
    }
    return {
        "traces": found.get("traces", ()),
        "requests": first.get("request_count"),
        "accesses": first.get("prompt_blocks"),
        "memory_bytes": {size: int(TypeAdapter(ByteSize).validate_python(size)) for size in results},
        "hit_ratio": turned("block_hit_ratio"),
        "ttft_s": times,
        "written_per_day": turned("written_bytes_per_day"),
    }
