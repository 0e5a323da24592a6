"""The connector is found by its module path too, where the plugin is not loaded."""

import pytest

from engine import models
from engine.exchanges import POOL_BLOCKS, STORED_TOKENS, pushed_out
from engine.tiny_engine import tiny_engine

BY_PATH = {"kv_connector_module_path": "kvtide.vllm.connector"}


def test_by_module_path_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # once a process; after that, the name stays out
    monkeypatch.delitem(KVConnectorFactory._registry, "KVTideConnector")
    with tiny_engine(models.llama(), POOL_BLOCKS, {"host_memory": "24MiB"}, BY_PATH) as engine:
        prompt, before = pushed_out(engine, 90)
        after = engine.ask(prompt)
    assert after.loaded_tokens == STORED_TOKENS
    assert after.finish_reason == before.finish_reason == "length"
