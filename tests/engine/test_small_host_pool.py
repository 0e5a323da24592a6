"""A host pool smaller than one prompt: as much of the beginning as fits is kept, and serving goes on."""

from engine import models
from engine.exchanges import POOL_BLOCKS, pushed_out
from engine.tiny_engine import BLOCK_TOKENS, tiny_engine

CHUNK_BYTES = 64 << 10
"""Of this model in float32."""
HOST_CHUNKS = 8


def test_a_request_longer_than_the_host_pool() -> None:
    settings = {"host_memory": HOST_CHUNKS * CHUNK_BYTES}
    with tiny_engine(models.llama(), POOL_BLOCKS, settings, dtype="float32") as engine:
        prompt, before = pushed_out(engine, 50)
        assert engine.totals["skipped_store_chunks|pool_full"] > 0
        for seed in (51, 52):
            pushed_out(engine, seed)
            assert engine.ask(prompt).token_ids == before.token_ids
        assert engine.totals["evicted_chunks|"] > 0
        # Alone in the pool, as much of its beginning comes back as fits.
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        engine.ask(prompt)
        assert engine.llm.reset_prefix_cache()
        again = engine.ask(prompt)
        assert again.loaded_tokens == HOST_CHUNKS * BLOCK_TOKENS
        assert again.token_ids == before.token_ids
        assert engine.totals["pool_budget_bytes|"] == HOST_CHUNKS * CHUNK_BYTES
        assert engine.totals["pool_used_bytes|"] <= HOST_CHUNKS * CHUNK_BYTES
