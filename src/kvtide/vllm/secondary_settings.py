"""Settings of one entry of ``secondary_tiers``, as vLLM hands it over.

Knows names, types and limits; what is not named here is the tier's own option. Values of those are not shown.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError

from kvtide.config import SIZE_HINT
from kvtide.errors import ConfigError

HINTS = {
    "class": "give the path of a class of tiers: package.module.Class",
    "limit": SIZE_HINT,
    "threads": "give a whole number from 1 to 32",
    "queue": SIZE_HINT,
    "deadline_s": "give seconds above 0, up to 600",
    "wait_limit_s": "give seconds above 0, up to 600",
    "identity": "give a text",
    "reset_keeps_tiers": "give true or false",
    "locality": "give LOCAL or REMOTE",
}


class SecondarySettings(BaseModel):
    """One entry of ``secondary_tiers``.

    Attributes:
        class_path: Of the tier's class, or its short name.
        limit: Bytes that the tier may take, all replicas of this server together; 0 where none is named.
        threads: Calls at once.
        queue: Bytes of writes that may wait or be under way; vLLM keeps their rows as long.
        deadline_s: For each call, and for an answer to a lookup.
        wait_limit_s: For how long a chunk may wait for its turn to be read; vLLM's request waits as long.
        identity: A text that is part of every record's identity.
        reset_keeps_tiers: A reset of the cache leaves what the tier holds.
        locality: As vLLM calls it, for its filters and events.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    class_path: str = Field(alias="class", min_length=3)
    limit: ByteSize = Field(default=ByteSize(0), ge=0)
    threads: int = Field(default=4, ge=1, le=32)
    queue: ByteSize = Field(default=ByteSize(256 << 20), gt=0)
    deadline_s: float = Field(default=2.0, gt=0, le=600)
    wait_limit_s: float = Field(default=5.0, gt=0, le=600)
    identity: str = ""
    reset_keeps_tiers: bool = False
    locality: Literal["LOCAL", "REMOTE"]

    @property
    def options(self) -> dict[str, Any]:
        """The tier's own."""
        return dict(self.model_extra or {})


def settings_of(
    tier_type: str, class_path: str, locality: str, given: Mapping[str, Any]
) -> SecondarySettings:
    """Check what stands in an entry.

    Args:
        tier_type: As the entry names it, for errors.
        class_path: Of the tier's class, where the type says it; else the entry has to.
        locality: Where the entry says none.
        given: The rest of the entry.

    Raises:
        ConfigError: A setting is wrong; names it.
    """
    if class_path and "class" in given:
        raise ConfigError(f"secondary_tiers.{tier_type}.class", given["class"], "is for the type kvtide-tier")
    entry = {"locality": locality, **({"class": class_path} if class_path else {}), **given}
    try:
        return SecondarySettings(**entry)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise ConfigError(
            f"secondary_tiers.{tier_type}.{name}",
            entry.get(name),
            f"{HINTS.get(name, 'will not do')} ({first['msg']})",
        ) from None
