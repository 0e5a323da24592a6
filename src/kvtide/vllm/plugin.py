"""Makes the name ``KVTideConnector`` known to vLLM.

Called by vLLM in every process it starts (entry point ``vllm.general_plugins``), also where kvtide is not
used: so it registers a name and nothing else, and never raises.
"""

import contextlib
import logging

CONNECTOR_NAME = "KVTideConnector"
CONNECTOR_MODULE = "kvtide.vllm.connector"


def register() -> None:
    """Register the connector; a second call in the same process has no effect."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # Our lines appear where and as vLLM's do, however it is configured later; without this only warnings
    # would, and bare.
    logging.getLogger("kvtide").parent = logging.getLogger("vllm")
    # vLLM refuses a name it knows already.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
