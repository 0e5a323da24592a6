"""What one request allows: how much may be brought back for it, and how much of it may be kept.

Read from ``kv_transfer_params`` as the client sent them. A value that is wrong narrows: who meant to keep a
prompt out of a cache and misspelt the number must not find it there. Unknown names belong to others.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtide.jobs import OffloadPolicy

logger = logging.getLogger(__name__)

NO_LIMIT = 1 << 62
"""More tokens than any request has."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Tokens, counted from the beginning of the request.

    Attributes:
        max_load_tokens: Tokens that may be brought back beyond the engine's own hit.
        max_offload_tokens: Tokens from the beginning that may be stored.
        policy: What of those is stored.
    """

    max_load_tokens: int = NO_LIMIT
    max_offload_tokens: int = NO_LIMIT
    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL


UNLIMITED = RequestLimits()


def limits_of(request_id: str, params: Mapping[str, Any] | None) -> RequestLimits:
    """Read the limits of a request.

    Args:
        request_id: For the log.
        params: ``max_load_tokens`` and ``max_offload_tokens``, whole numbers from 0 up, None for no limit;
            ``no_read`` and ``no_write``, true or false; ``offload_policy``, "chunk" or "request". Anything
            else there is somebody else's.
    """
    if not params:
        return UNLIMITED
    load, offload = (_tokens(request_id, params, name) for name in ("max_load_tokens", "max_offload_tokens"))
    if _flag(request_id, params, "no_read"):
        load = 0
    if _flag(request_id, params, "no_write"):
        offload = 0
    return RequestLimits(load, offload, _policy(request_id, params))


def _tokens(request_id: str, params: Mapping[str, Any], name: str) -> int:
    value = params.get(name)
    if value is None:
        return NO_LIMIT
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    logger.warning("request %s: %s = %r: give a whole number from 0 up; taken as 0", request_id, name, value)
    return 0


def _flag(request_id: str, params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    logger.warning("request %s: %s = %r: give true or false; taken as true", request_id, name, value)
    return True


def _policy(request_id: str, params: Mapping[str, Any]) -> OffloadPolicy:
    value = params.get("offload_policy")
    for policy in OffloadPolicy:
        if value == policy.value:
            return policy
    if value is not None:
        logger.warning(
            'request %s: offload_policy = %r: give "chunk" or "request"; taken as chunk', request_id, value
        )
    return OffloadPolicy.CHUNK_LEVEL
