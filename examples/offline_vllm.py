"""vLLM offline, with kvtide: one long prompt is computed, pushed out of the engine's pool, and brought back.

    python examples/offline_vllm.py MODEL [--host-memory 2GiB]

The prompt is made of random tokens, so any model will do and no tokenizer is needed.
"""

import argparse
import random
import time

from vllm import LLM, SamplingParams

BLOCK_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="name of a model, or the folder it lies in")
    parser.add_argument("--host-memory", default="512MiB", help="what kvtide may use")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    options = parser.parse_args()

    # A pool with room for one prompt and a half: the third prompt pushes out what is left of the first.
    prompt_blocks = -(-options.prompt_tokens // BLOCK_TOKENS)
    llm = LLM(
        options.model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=(prompt_blocks + 1) * BLOCK_TOKENS,
        num_gpu_blocks_override=prompt_blocks * 3 // 2 + 2,
        # On the CPU backend vLLM otherwise wants most of the machine's memory to be free.
        kv_cache_memory_bytes=1 << 30,
        # All that kvtide needs. The name is known to vLLM because the package is installed.
        kv_transfer_config={
            "kv_connector": "KVTideConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host_memory": options.host_memory},
        },
    )
    vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def prompt_of(seed: int) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(vocabulary) for _ in range(options.prompt_tokens)]

    def ask(prompt: list[int]) -> tuple[int, float]:
        """Generate one token: the time that takes is the time to the first token, in seconds."""
        one_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        began_s = time.perf_counter()
        (output,) = llm.generate({"prompt_token_ids": prompt}, one_token, use_tqdm=False)
        return output.num_cached_tokens or 0, time.perf_counter() - began_s

    ask(prompt_of(0))  # the first request of a process pays for much that is not its own
    prompt = prompt_of(1)
    for label, asked in (
        ("cold", prompt),
        ("other", prompt_of(2)),
        ("other", prompt_of(3)),
        ("loaded", prompt),
    ):
        cached_tokens, first_token_s = ask(asked)
        print(f"{label:>6}: {cached_tokens:5} of {len(asked)} tokens cached, {first_token_s * 1000:7.1f} ms")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
