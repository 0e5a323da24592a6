#!/usr/bin/env python3
"""Recompute from a report of `kvtide demo` whether it is exact: check_exact.py [build/demo/report.json].

Reads the per-request records and nothing else of the report, and does not use kvtide: whoever doubts the
demo's verdict can read these lines instead. A request is compared when it loaded at least 512 prompt tokens
and had the same cached length as the reference. Exact: at least one request is compared, and in each one
every token and every bit of every log-probability is equal.

Ends with 0 when exact, 1 when not, 2 when the report cannot be read or nothing in it can be compared.
"""

import json
import sys

MIN_LOADED_TOKENS = 512


def parting(ours, theirs):
    """Describe the first place where two answers differ; None when they are equal and not empty."""
    longest = max(len(ours["token_ids"]), len(theirs["token_ids"]), len(ours["logprobs"]), 1)
    for position in range(max(longest, len(theirs["logprobs"]))):
        for field in ("token_ids", "logprobs"):
            pair = [
                side[field][position] if position < len(side[field]) else "nothing" for side in (ours, theirs)
            ]
            if pair[0] != pair[1] or "nothing" in pair:
                return (
                    f"generated token {position}, {field}: {pair[0]} with kvtide, {pair[1]} in the reference"
                )
    return None


def check(requests):
    """Count over the records; return counts and the first divergence."""
    counts = {"compared": 0, "differ": 0, "not comparable": 0, "prompt_tokens": 0, "loaded_tokens": 0}
    first = None
    for request in requests:
        where = f"user {request['user']}, turn {request['turn']}: "
        ours, theirs = request.get("kvtide"), request.get("reference")
        if ours is None or theirs is None:
            counts["differ"] += 1
            first = first or where + "an answer is missing"
            continue
        if ours["loaded_tokens"] < MIN_LOADED_TOKENS:
            continue
        if any(ours[field] != theirs[field] for field in ("prompt_tokens", "cached_tokens")):
            counts["not comparable"] += 1
            continue
        counts["compared"] += 1
        counts["prompt_tokens"] += ours["prompt_tokens"]
        counts["loaded_tokens"] += ours["loaded_tokens"]
        if (difference := parting(ours, theirs)) is not None:
            counts["differ"] += 1
            first = first or where + difference
    return counts, first


def main(arguments):
    """Print the verdict and return the exit code."""
    path = arguments[0] if arguments else "build/demo/report.json"
    try:
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        counts, first = check(report["requests"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"{path} cannot be read as a report: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{name}: {count}" for name, count in counts.items()))
    exact = first is None and counts["compared"] > 0
    if report.get("exact") is not exact:
        print(f"the report itself says otherwise: exact is {report.get('exact')} there")
    if first is not None:
        print(f"first divergence: {first}")
        print("exact: false")
        return 1
    if counts["compared"] == 0:
        print("nothing can be compared")
        return 2
    print(f"loaded share: {counts['loaded_tokens'] / counts['prompt_tokens']:.3f}")
    print("exact: true")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
