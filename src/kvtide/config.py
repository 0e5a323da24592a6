"""Settings: one frozen, typed object, whatever way they came in.

Three ways, the first winning over the second over the third: the command line (``kvtide serve``),
``kv_connector_extra_config`` of vLLM, and the environment (``KVTIDE_HOST_MEMORY`` for ``host_memory``).
Where two differ, the loser is logged. Knows names, types and limits of settings; does not know the
machine: whether a budget fits is asked in ``kvtide.transfer.memory``.
"""

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from kvtide.errors import ConfigError

logger = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "KVTIDE_"

# Kubernetes puts these into every container beside a service that is called kvtide.
_OF_A_SERVICE = re.compile(r"KVTIDE_(.+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)\w*)?)")

COMMAND_LINE = "command line"
EXTRA_CONFIG = "kv_connector_extra_config"
ENVIRONMENT = "environment"
DEFAULT = "default"

SIZE_HINT = "give a size such as 8GiB, 512MiB or a number of bytes"


class KVTideConfig(BaseModel):
    """Every setting of kvtide. ``docs/settings.md`` is checked against this class."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    host_memory: ByteSize = Field(
        gt=0,
        description="Host memory for KV cache, all ranks together: resident bytes, never exceeded.",
        json_schema_extra={"hint": SIZE_HINT},
    )
    blocks_per_chunk: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Engine blocks that are offloaded as one. More: fewer, larger copies, coarser hits.",
        json_schema_extra={"hint": "give a whole number from 1 to 1024"},
    )
    offload_prompt_only: bool = Field(
        default=False,
        description="Store only chunks of prompts; what was generated is not kept.",
        json_schema_extra={"hint": "give true or false"},
    )
    store_threshold: int = Field(
        default=1,
        ge=1,
        le=64,
        description="A chunk is stored once this many requests have offered it. 1 stores at first sight.",
        json_schema_extra={"hint": "give a whole number from 1 to 64"},
    )
    store_filter_entries: int = Field(
        default=65536,
        ge=1,
        le=1 << 24,
        description="Chunks whose offers are counted for store_threshold; the longest unseen is forgotten.",
        json_schema_extra={"hint": "give a whole number from 1 to 16777216"},
    )
    restore_interval: int = Field(
        default=0,
        ge=0,
        le=1 << 20,
        description="Models with sliding windows: tokens between the points from which a kept prompt can be"
        " continued, beside its end. More: fewer chunks are written. 0: from every chunk.",
        json_schema_extra={"hint": "give a whole number of tokens from 0 to 1048576"},
    )
    eviction_policy: Literal["lru", "arc"] = Field(
        default="lru",
        description="Which chunk leaves when the pool is full: the least recently used (lru), or recency and"
        " frequency in balance (arc). A chunk never leaves before what extends it.",
        json_schema_extra={"hint": "known policies: lru, arc"},
    )
    store_policy: Literal["eager", "lazy"] = Field(
        default="eager",
        description="When a chunk is stored: when it is complete (eager), or when the engine is about to hand"
        " out its blocks (lazy), which writes little while the device's own cache suffices.",
        json_schema_extra={"hint": "known policies: eager, lazy"},
    )
    store_queue: ByteSize = Field(
        default=ByteSize(1 << 30),
        gt=0,
        description="Bytes of stores that may be under way; beyond it stores are skipped and counted.",
        json_schema_extra={"hint": SIZE_HINT},
    )
    defer_limit_s: float = Field(
        default=2.0,
        ge=0,
        le=600,
        description="How long a request may wait for a prefix another one is bringing; then it computes.",
        json_schema_extra={"hint": "give seconds from 0 to 600"},
    )
    transfer_deadline_s: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="A copy that has not begun after this many seconds is given up.",
        json_schema_extra={"hint": "give seconds above 0, up to 3600"},
    )
    flush_limit_s: float = Field(
        default=0.25,
        gt=0,
        le=60,
        description="How long a step may wait for a store whose blocks are needed; then it is cancelled.",
        json_schema_extra={"hint": "give seconds above 0, up to 60"},
    )
    prefault: bool = Field(
        default=True,
        description="Touch the pool's pages in the background after start, so that no copy pays for them.",
        json_schema_extra={"hint": "give true or false"},
    )
    self_test: bool = Field(
        default=True,
        description="One round trip of random bytes through the real copy path at start.",
        json_schema_extra={"hint": "give true or false"},
    )


def hint_of(setting: str) -> str:
    """Say what would do for ``setting``."""
    extra = KVTideConfig.model_fields[setting].json_schema_extra
    return str(extra["hint"]) if isinstance(extra, dict) else ""


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings, and where each of them came from.

    Attributes:
        config: The checked settings.
        origins: For every setting COMMAND_LINE, EXTRA_CONFIG, ENVIRONMENT or DEFAULT.
        given: What was written there, unchanged, for every setting that is not a default.
    """

    config: KVTideConfig
    origins: Mapping[str, str]
    given: Mapping[str, Any]


def load_config(
    command_line: Mapping[str, Any] | None = None,
    extra_config: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> KVTideConfig:
    """Merge the three sources and check the result.

    Raises:
        ConfigError: Unknown setting, wrong value, or none where one is needed; names it.
    """
    return resolve(command_line, extra_config, environment).config


def resolve(
    command_line: Mapping[str, Any] | None = None,
    extra_config: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Resolved:
    """Do what ``load_config`` does, and remember where each value came from.

    Raises:
        ConfigError: As ``load_config``.
    """
    from_environment = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in (environment or {}).items()
        if name.startswith(ENVIRONMENT_PREFIX) and not _OF_A_SERVICE.fullmatch(name)
    }
    merged: dict[str, Any] = {}
    origins = dict.fromkeys(KVTideConfig.model_fields, DEFAULT)
    for source, settings in (
        (COMMAND_LINE, command_line or {}),
        (EXTRA_CONFIG, extra_config or {}),
        (ENVIRONMENT, from_environment),
    ):
        for name, value in settings.items():
            if name not in KVTideConfig.model_fields:
                raise _unknown(name, value, source)
            if name not in merged:
                merged[name], origins[name] = value, source
            elif not _same(name, merged[name], value):
                logger.warning(
                    "%s: %r (%s) wins over %r (%s)", name, merged[name], origins[name], value, source
                )
    return Resolved(_checked(merged), origins, merged)


def _same(name: str, one: object, other: object) -> bool:
    # "8GiB" and 8589934592 are no conflict.
    kind: Any = KVTideConfig.model_fields[name].annotation
    adapter = TypeAdapter(kind)
    try:
        return bool(adapter.validate_python(one) == adapter.validate_python(other))
    except ValidationError:
        return False


def _unknown(name: str, value: object, source: str) -> ConfigError:
    close = difflib.get_close_matches(name, KVTideConfig.model_fields, n=1)
    known = (
        f"did you mean {close[0]}?" if close else f"known settings: {', '.join(KVTideConfig.model_fields)}"
    )
    shown = f"{ENVIRONMENT_PREFIX}{name.upper()}" if source == ENVIRONMENT else name
    return ConfigError(shown, value, f"no such setting (from the {source}); {known}")


def _checked(merged: dict[str, Any]) -> KVTideConfig:
    if "host_memory" not in merged:
        raise ConfigError("host_memory", None, f"say how much host memory kvtide may use: {SIZE_HINT}")
    try:
        config = KVTideConfig(**merged)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise ConfigError(name, merged.get(name), f"{hint_of(name)} ({first['msg']})") from None
    # A bool is an int to Python; "blocks_per_chunk": true is a mistake, not a 1.
    for name, value in merged.items():
        if isinstance(value, bool) and KVTideConfig.model_fields[name].annotation is not bool:
            raise ConfigError(name, value, hint_of(name))
    return config
