"""Another connector beside ours in vLLM's ``MultiConnector``: it brings what a request says it holds.

A request names the tokens in ``kv_transfer_params["sibling_tokens"]``. Late, in any order, and sometimes it
fails after having scribbled over the blocks. It stores nothing.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

CONNECTOR_NAME = "SiblingConnector"

HELD = "sibling_tokens"
"""Key of ``kv_transfer_params``: leading tokens of the prompt that the sibling holds."""


def register() -> None:
    """Make it known to vLLM; again has no effect."""
    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, __name__, "SiblingConnector")


@dataclass(frozen=True, slots=True)
class SiblingLoad:
    """What one request is to be brought.

    Attributes:
        request_id: Of the request.
        block_ids: Its table, per group.
        begin: First token.
        end: One past the last.
    """

    request_id: str
    block_ids: tuple[list[int], ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class SiblingMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Loads that begin in this step."""

    loads: tuple[SiblingLoad, ...]


class SiblingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Both roles.

    Attributes:
        bring: Writes a load's bytes, the right ones or others; set on a worker before its first step.
        chance: Decides how long a load takes and whether it fails; set with it.
        fail_share: How often it does.
        failed_count: How often it did.
    """

    bring: Callable[[SiblingLoad, bool], None]
    chance: random.Random
    fail_share: float = 0.1
    failed_count: int = 0

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._local: dict[str, int] = {}
        self._failed: set[str] = set()
        self._unsettled: set[str] = set()  # those among them that have not run since
        self._finished: set[str] = set()
        self._parked: set[str] = set()  # requests that were given blocks and have not run since
        self._careful = len(kv_cache_config.kv_cache_groups) > 1
        self._planned: list[SiblingLoad] = []
        self._open: dict[str, tuple[SiblingLoad, int]] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache too."""
        return False

    # -- the scheduler's side -------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        held = (request.kv_transfer_params or {}).get(HELD, 0)
        if held <= num_computed_tokens or request.request_id in self._failed or self._unsettled:
            # vLLM 0.32 reserves the blocks of a request whose load failed until it runs: a load that does
            # not fit beside them, of a request ahead of it, would stop the engine for good.
            return 0, False
        if self._careful and self._parked:
            # Where a group sees a window, vLLM 0.32 counts too little of what loaded requests still need.
            return 0, False
        self._local[request.request_id] = num_computed_tokens
        return held - num_computed_tokens, True

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        self._parked.add(request.request_id)
        if num_external_tokens:
            begin = self._local[request.request_id]
            table = tuple(list(ids) for ids in blocks.get_block_ids())
            self._planned.append(SiblingLoad(request.request_id, table, begin, begin + num_external_tokens))

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> SiblingMetadata:
        self._unsettled.difference_update(scheduler_output.num_scheduled_tokens)
        self._parked.difference_update(scheduler_output.num_scheduled_tokens)
        planned, self._planned = self._planned, []
        return SiblingMetadata(tuple(planned))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self._failed |= connector_output.failed_recving
        self._unsettled |= connector_output.failed_recving - self._finished

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        self._finished.add(request.request_id)
        self._unsettled.discard(request.request_id)
        self._parked.discard(request.request_id)
        return False, None

    # -- a worker's side ------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.has_connector_metadata():
            for load in self._get_connector_metadata().loads:
                self._open[load.request_id] = load, self.chance.randrange(8)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for request_id, (load, steps) in list(self._open.items()):
            if steps:
                self._open[request_id] = load, steps - 1
                continue
            del self._open[request_id]
            fails = self.chance.random() < self.fail_share
            self.failed_count += fails
            self.bring(load, not fails)
            results.finished_recving.add(request_id)
            if fails:
                results.failed_recving.add(request_id)
        return results

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are asynchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: it stores nothing."""

    def wait_for_save(self) -> None:
        """Do nothing: it stores nothing."""
