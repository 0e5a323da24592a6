#!/usr/bin/env python3
"""Replay a run of `kvtide demo` and hold that against it: check_prediction.py [build/demo/report.json].

Hits have to be predicted exactly, request by request; the median time to first token of those that loaded
within a quarter, with rates from requests of the same run that were computed.

Ends with 0 when both are so, 1 when not, 2 when the report cannot be read or replayed.
"""

import json
import sys
from pathlib import Path

from kvtide.demo.errors import DemoError
from kvtide.demo.prediction import predict

WITHIN = 0.25


def main(path: str) -> int:
    """Check one report."""
    try:
        found = predict(json.loads(Path(path).read_text("utf-8")))
    except (OSError, ValueError, DemoError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    wrong = [at for at, (predicted, real) in enumerate(found.hit_tokens) if predicted != real]
    predicted_ms, real_ms = (1e3 * seconds for seconds in found.ttft_p50_s)
    hits = sum(loaded for _, (_, loaded) in found.hit_tokens)
    print(f"loaded tokens: {hits:,} in {len(found.hit_tokens)} requests, {len(wrong)} of which hit otherwise")
    for at in wrong[:5]:
        predicted, real = found.hit_tokens[at]
        print(f"  request {at}: cached and loaded {real}, predicted {predicted}")
    print(
        f"first token after a load, p50: {real_ms:.1f} ms, predicted {predicted_ms:.1f} ms"
        f" ({100 * found.ttft_error:+.1f} %)"
    )
    return 1 if wrong or abs(found.ttft_error) > WITHIN else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "build/demo/report.json"))
