"""Asks an engine of two ranks, in a process of its own, and prints what it answered as JSON.

    python tests/engine/two_ranks.py MODEL POOL_BLOCKS [SETTINGS [OPTIONS]]

SETTINGS are kvtide's, OPTIONS vLLM's, as JSON. With a disk requests wait for it, however fast they would
compute. Each prompt is asked twice in a row (the second answer comes out of the engine's own cache) and once
more when the others have pushed it out.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine.exchanges import prompts_of


def main(model: str, pool_blocks: int, settings: dict[str, Any], options: dict[str, Any]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from kvtide.scheduler.pace import RecomputePace

    if "disk" in settings:
        RecomputePace.seconds_for = lambda self, token_count: None  # type: ignore[method-assign]
    llm = LLM(
        model,
        tensor_parallel_size=2,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        block_size=options.get("block_size", 32),
        max_model_len=700,
        max_num_seqs=4,
        num_gpu_blocks_override=pool_blocks,
        kv_cache_memory_bytes=64 << 20,
        gpu_memory_utilization=0.1,
        seed=0,
        disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "KVTideConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host_memory": "128MiB", "flush_limit_s": 30.0, **settings},
        },
    )
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=5, detokenize=False, ignore_eos=True)

    def ask(prompt: list[int]) -> dict[str, Any]:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        (answer,) = output.outputs
        logprobs = [
            sorted((token, one.logprob.hex()) for token, one in step.items()) for step in answer.logprobs
        ]
        return {"tokens": list(answer.token_ids), "logprobs": logprobs, "cached": output.num_cached_tokens}

    def counted(name: str) -> float:
        return sum(one.value for one in llm.get_metrics() if one.name == f"vllm:kvtide_{name}")

    prompts = prompts_of(40, 4)
    hits = []
    for prompt in prompts:
        ask(prompt)
        hits.append(ask(prompt))
    before = counted("hit_tokens")
    loads = [ask(prompt) for prompt in prompts]
    told = {"hits": hits, "loads": loads, "loaded_before": before, "loaded": counted("hit_tokens") - before}
    told["from_disk"] = counted("tier_hit_chunks")
    print(json.dumps(told))


if __name__ == "__main__":
    given = [json.loads(argument) for argument in sys.argv[3:]]
    main(sys.argv[1], int(sys.argv[2]), *given, *[{}] * (2 - len(given)))
