"""kvtide: KV cache blocks that ebb to cheaper media and flow back.

The parts, usable on their own and without vLLM; each is imported when it is first asked for, so that
``import kvtide`` needs neither vLLM nor torch::

    from kvtide import CPUOffloadingManager, LRUPolicy, ChunkRun
"""

from importlib import import_module
from importlib.metadata import version
from typing import Any

__version__ = version("kvtide")

_HOMES = {
    "ARCPolicy": "kvtide.policies",
    "ChunkRun": "kvtide.keys",
    "CPUCopier": "kvtide.transfer.devices",
    "CPULoadStoreSpec": "kvtide.jobs",
    "CPUOffloadingManager": "kvtide.manager.cpu",
    "ConfigError": "kvtide.errors",
    "DeviceCopier": "kvtide.transfer.devices",
    "Direction": "kvtide.jobs",
    "EvictionPolicy": "kvtide.policies",
    "GPULoadStoreSpec": "kvtide.jobs",
    "GroupGeometry": "kvtide.geometry",
    "GroupKind": "kvtide.geometry",
    "Hop": "kvtide.jobs",
    "HostPool": "kvtide.transfer.pool",
    "KVGeometry": "kvtide.geometry",
    "KVTideConfig": "kvtide.config",
    "KVTideError": "kvtide.errors",
    "LRUPolicy": "kvtide.policies",
    "LayoutError": "kvtide.errors",
    "LookupResult": "kvtide.manager.base",
    "OffloadKey": "kvtide.keys",
    "OffloadingConnectorScheduler": "kvtide.scheduler.scheduler",
    "OffloadingManager": "kvtide.manager.base",
    "OffloadingSpec": "kvtide.spec",
    "OffloadingWorker": "kvtide.transfer.engine",
    "PrepareStoreOutput": "kvtide.manager.base",
    "ReqContext": "kvtide.jobs",
    "SingleDirectionOffloadingHandler": "kvtide.transfer.handler",
    "group_regions": "kvtide.transfer.region",
    "layer_views": "kvtide.transfer.region",
    "load_config": "kvtide.config",
    "make_offload_key": "kvtide.keys",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - names, from one table


def __getattr__(name: str) -> Any:
    """Import a part when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvtide' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
