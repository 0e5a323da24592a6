"""Makes kvtide's names known to vLLM: the connector's, and those of its tiers for vLLM's own tiering.

Called by vLLM in every process it starts (entry point ``vllm.general_plugins``), also where kvtide is not
used: so it registers names and nothing else, and never raises.
"""

import contextlib
import logging

CONNECTOR_NAME = "KVTideConnector"
CONNECTOR_MODULE = "kvtide.vllm.connector"

SECONDARY_MODULE = "kvtide.vllm.secondary"
SECONDARY_TIERS = {
    "kvtide-disk": "KVTideDisk",
    "kvtide-directory": "KVTideDirectory",
    "kvtide-valkey": "KVTideValkey",
    "kvtide-objects": "KVTideObjects",
    "kvtide-mooncake": "KVTideMooncake",
    "kvtide-tier": "KVTideTier",
}
"""What ``secondary_tiers`` of vLLM's ``TieringOffloadingSpec`` calls them, and their classes."""


def register() -> None:
    """Register the names; a second call in the same process has no effect."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # Our lines appear where and as vLLM's do, however it is configured later; without this only warnings
    # would, and bare.
    logging.getLogger("kvtide").parent = logging.getLogger("vllm")
    # vLLM refuses a name it knows already.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
    # vLLM calls the tiers of others experimental: where it has none, the connector is there all the same.
    with contextlib.suppress(ImportError, AttributeError):
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        for name, class_name in SECONDARY_TIERS.items():
            with contextlib.suppress(ValueError):
                SecondaryTierFactory.register_tier(name, SECONDARY_MODULE, class_name)
