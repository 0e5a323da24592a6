"""Settings: one frozen, typed object, whatever way they came in.

Three ways, the first winning over the second over the third: the command line (``kvtide serve``),
``kv_connector_extra_config`` of vLLM, and the environment (``KVTIDE_HOST_MEMORY`` for ``host_memory``).
Where two differ, the loser is logged. Knows names, types and limits of settings; does not know the
machine: whether a budget fits is asked in ``kvtide.transfer.memory``.
"""

import difflib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from kvtide.errors import ConfigError

logger = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "KVTIDE_"

# Kubernetes puts these into every container beside a service that is called kvtide.
_OF_A_SERVICE = re.compile(r"KVTIDE_(.+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)\w*)?)")

COMMAND_LINE = "command line"
EXTRA_CONFIG = "kv_connector_extra_config"
ENVIRONMENT = "environment"
DEFAULT = "default"

CONFIDENTIAL = {"tiers"}
"""Settings whose values are not shown: they may hold passwords."""

SIZE_HINT = "give a size such as 8GiB, 512MiB or a number of bytes"


DEMOTIONS = Literal["at_once", "second_sight", "on_eviction"]
POLICY_NAMES = Literal["lru", "arc", "s3fifo", "sieve", "lfu", "gdsf", "adaptive"]
POLICY_HINT = f"known policies: {', '.join(get_args(POLICY_NAMES))}"


class TierSettings(BaseModel):
    """One entry of ``tiers``: a tier below host memory whose class is named by its path."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    # A short name, or the path of a class.
    path: str = Field(alias="class", min_length=3)
    name: str = Field(default="", pattern="^[a-z0-9_]*$")
    limit: ByteSize = Field(default=ByteSize(0), ge=0)
    threads: int = Field(default=4, ge=1, le=32)
    queue: ByteSize = Field(default=ByteSize(256 << 20), gt=0)
    deadline_s: float = Field(default=2.0, gt=0, le=600)
    demotion: DEMOTIONS = "at_once"
    eviction_policy: POLICY_NAMES = "adaptive"
    # May hold a password: never shown.
    options: dict[str, Any] = Field(default_factory=dict, repr=False, exclude=True)

    def __str__(self) -> str:
        return self.label

    @property
    def label(self) -> str:
        """Its name in metrics and logs."""
        return self.name or self.path.rpartition(".")[2].lower()


def _as_list(value: object) -> object:
    """Take JSON where only text can be written: on the command line and in the environment."""
    return json.loads(value) if isinstance(value, str) else value


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
    eviction_policy: POLICY_NAMES = Field(
        default="adaptive",
        description="Which chunk leaves when the pool is full: the least recently used (lru), recency and"
        " frequency in balance (arc), what brings the fewest hits for its place, as learnt, and then is not"
        " stored at all (adaptive), or another policy, see policies.md. A chunk never leaves before what"
        " extends it.",
        json_schema_extra={"hint": POLICY_HINT},
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
    copy_threads: int = Field(
        default=0,
        ge=0,
        le=64,
        description="CPU backend: threads of one rank that copy each way. 0: as many as the model leaves"
        " cores for, 1 to 4.",
        json_schema_extra={"hint": "give a whole number from 0 to 64"},
    )
    disk: str = Field(
        default="",
        description="Folder of a private disk tier below host memory: this instance's alone, made when it is"
        " not there. Empty: none.",
        json_schema_extra={"hint": "give a folder on a local disk"},
    )
    disk_limit: ByteSize = Field(
        default=ByteSize(0),
        ge=0,
        description="Bytes that the disk tier may take, all ranks together; never exceeded.",
        json_schema_extra={"hint": SIZE_HINT},
    )
    disk_reserve: ByteSize = Field(
        default=ByteSize(1 << 30),
        ge=0,
        description="Free space of the file system that the disk tier never uses.",
        json_schema_extra={"hint": SIZE_HINT},
    )
    disk_threads: int = Field(
        default=4,
        ge=1,
        le=32,
        description="Reads and writes that one rank has under way at once.",
        json_schema_extra={"hint": "give a whole number from 1 to 32"},
    )
    disk_queue: ByteSize = Field(
        default=ByteSize(256 << 20),
        gt=0,
        description="Bytes of one rank's writes to disk that may be open; beyond it they are skipped. If not"
        " given, more for a model whose steps store more: four steps, up to a quarter of host memory.",
        json_schema_extra={"hint": SIZE_HINT},
    )
    disk_deadline_s: float = Field(
        default=2.0,
        gt=0,
        le=600,
        description="A read or write that has not returned after this long is late: nobody waits for it.",
        json_schema_extra={"hint": "give seconds above 0, up to 600"},
    )
    disk_direct: bool = Field(
        default=True,
        description="Go past the page cache where the file system allows it.",
        json_schema_extra={"hint": "give true or false"},
    )
    disk_demotion: DEMOTIONS = Field(
        default="at_once",
        description="When a chunk is written to disk: as soon as it is in host memory (at_once), when it is"
        " asked for again (second_sight), or when it is about to leave host memory (on_eviction).",
        json_schema_extra={"hint": "known policies: at_once, second_sight, on_eviction"},
    )
    disk_eviction_policy: POLICY_NAMES = Field(
        default="adaptive",
        description="Which chunk leaves when the disk's limit is reached; see eviction_policy.",
        json_schema_extra={"hint": POLICY_HINT},
    )
    promotion_share: float = Field(
        default=0.25,
        gt=0,
        le=0.9,
        description="Of host memory, what may hold chunks on their way up for requests that still wait.",
        json_schema_extra={"hint": "give a share above 0, up to 0.9"},
    )
    probe_wait_s: float = Field(
        default=0.05,
        ge=0,
        le=10,
        description="How long a request may be held back while shared stores are asked what they have of it;"
        " not at all where they have been slower than that.",
        json_schema_extra={"hint": "give seconds from 0 to 10"},
    )
    reset_keeps_tiers: bool = Field(
        default=False,
        description="A reset of the cache (reset_prefix_cache with reset_connector, sleep) empties host"
        " memory alone. Only where the weights stay the same.",
        json_schema_extra={"hint": "give true or false"},
    )
    tiers: Annotated[tuple[TierSettings, ...], BeforeValidator(_as_list)] = Field(
        default=(),
        description="JSON: more tiers below the disk, each an object with class (directory, valkey, objects,"
        " mooncake, or the path of a class) and, if wanted, name, limit, threads, queue, deadline_s,"
        " demotion, eviction_policy, options.",
        json_schema_extra={
            "hint": 'give a JSON list such as [{"class": "directory", "options": {"path": "/mnt/kv"}}]'
        },
    )
    record_trace: str = Field(
        default="",
        description="File to write down what is asked: when, how many tokens, and salted hashes of blocks, no"
        " text; for kvtide replay. Where it is there, a number is added to the name. Empty: none.",
        json_schema_extra={"hint": "give a file in a folder that is there"},
    )
    record_trace_limit: ByteSize = Field(
        default=ByteSize(1 << 30),
        gt=0,
        description="Bytes that the file of record_trace may take; then recording ends.",
        json_schema_extra={"hint": SIZE_HINT},
    )
    adviser: bool = Field(
        default=True,
        description="Keep ghost caches, which hold nothing, of other sizes in a process beside the server,"
        " and export what they would have hit; see metrics.md.",
        json_schema_extra={"hint": "give true or false"},
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

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Names of the tiers below host memory, the nearest first."""
        return (*(("disk",) if self.disk else ()), *(tier.label for tier in self.tiers))


QUEUED_STEPS = 4
"""A replay of 1,500 conversations (docs/replay-serving.md, 64 GiB) hits 23 tokens of 100 with so many or with
sixteen, 18 with two, 10 with one and 6 with a quarter of one."""

QUEUED_SHARE = 4
"""Of host memory a quarter at most: what waits in a queue cannot leave."""


def queue_for(least: int, step_bytes: int, host_bytes: int) -> int:
    """Say how many bytes of writes may wait for a tier whose queue nobody has set.

    Args:
        least: The setting's default.
        step_bytes: What one rank stores of one step of the engine at most.
        host_bytes: Host memory of one rank.
    """
    return max(least, min(QUEUED_STEPS * step_bytes, host_bytes // QUEUED_SHARE))


def sized_for(config: KVTideConfig, step_bytes: int, rank_count: int) -> KVTideConfig:
    """Give queues of tiers that nobody has set the size that a model needs.

    A step of a large model stores more than their default holds: with 128 KiB of KV cache per token one of
    8,192 tokens stores 1 GiB. What a tier skips is offered to it again when somebody asks for it, and a hole
    in a prompt hides all behind it; what ``store_queue`` skips is offered again as soon as a store has ended,
    so that it only paces what tiers are offered. Made larger, too, it cost a sixth of the hits in a replay.

    Args:
        config: Checked settings.
        step_bytes: See ``queue_for``.
        rank_count: Who share host memory.
    """
    host_bytes = config.host_memory // rank_count

    def sized(given: BaseModel, name: str) -> dict[str, ByteSize]:
        if name in given.model_fields_set:
            return {}
        return {name: ByteSize(queue_for(getattr(given, name), step_bytes, host_bytes))}

    tiers = tuple(tier.model_copy(update=sized(tier, "queue")) for tier in config.tiers)
    return config.model_copy(update={**sized(config, "disk_queue"), "tiers": tiers})


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
            elif name in CONFIDENTIAL:
                logger.warning("%s: %s wins over %s", name, origins[name], source)
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
        value = merged.get(name) if name not in CONFIDENTIAL else "/".join(map(str, first["loc"][1:]))
        raise ConfigError(name, value, f"{hint_of(name)} ({first['msg']})") from None
    # A bool is an int to Python; "blocks_per_chunk": true is a mistake, not a 1.
    for name, value in merged.items():
        if isinstance(value, bool) and KVTideConfig.model_fields[name].annotation is not bool:
            raise ConfigError(name, value, hint_of(name))
    _refuse_contradictions(config, merged)
    return config


def _refuse_contradictions(config: KVTideConfig, merged: Mapping[str, Any]) -> None:
    limit = merged.get("disk_limit")
    if config.disk and not config.disk_limit:
        raise ConfigError("disk_limit", limit, f"{SIZE_HINT}: how much of {config.disk} may be used")
    if config.disk_limit and not config.disk:
        raise ConfigError("disk_limit", limit, f"{SIZE_HINT}; but there is no disk: give its folder, too")
    if "host" in config.tier_names:
        raise ConfigError("tiers", "host", "host memory is called that; give the tier another name")
    for label in config.tier_names:
        if config.tier_names.count(label) > 1:
            raise ConfigError("tiers", label, "two tiers have this name; give each a name of its own")
