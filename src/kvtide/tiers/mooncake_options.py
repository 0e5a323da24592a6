"""Options of the Mooncake tier, as they stand in the settings.

Knows names, bounds and what to say about a wrong one; opens nothing.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import ByteSize, Field, field_validator

from kvtide.tiers.options import SETTING, TierOptions
from kvtide.tiers.secrets import refuse_secret_in_url


class MooncakeOptions(TierOptions):
    """What ``tiers.options`` may say.

    Attributes:
        master: ``host:port`` of the master.
        metadata: Where clients find each other; the default needs no server.
        local_hostname: Of this machine as the others see it; empty: the address that leads to the master.
        segment: Bytes of memory that this rank's client lends to the store.
        buffer: Bytes of registered memory through which records pass.
        protocol: Of the data.
        device: For RDMA.
    """

    HINTS: ClassVar[Mapping[str, str]] = {
        "master": "give host:port of mooncake_master, such as 127.0.0.1:50051",
        "metadata": 'leave it out ("P2PHANDSHAKE"), or give the URL of a metadata server',
        "local_hostname": "give the host name or address of this machine that the storage processes reach",
        "segment": "give a size such as 4GiB, or 0: storage processes of their own hold the memory",
        "buffer": "give a size from 1MiB to 64GiB, such as 256MiB: several times the bytes of a chunk",
        "protocol": "give tcp or rdma",
        "device": "give names of RDMA devices, such as mlx5_0, or leave it out: all are tried",
    }
    SHOWN = frozenset({"master", "local_hostname", "segment", "buffer", "protocol", "device"})

    master: str = Field(pattern=r"^(\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\]|[A-Za-z0-9._-]+):[0-9]{1,5}$")
    metadata: str = Field(default="P2PHANDSHAKE", pattern=r"^(P2PHANDSHAKE|[a-z]+://\S+)$")
    local_hostname: str = Field(default="", pattern=r"^[A-Za-z0-9._:\[\]-]*$")
    segment: ByteSize = Field(default=ByteSize(0), ge=0, le=1 << 44)
    buffer: ByteSize = Field(default=ByteSize(256 << 20), ge=1 << 20, le=64 << 30)
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = Field(default="", pattern=r"^[A-Za-z0-9_,.-]*$")

    @field_validator("master")
    @classmethod
    def _port_exists(cls, master: str) -> str:
        if not 0 < int(master.rpartition(":")[2]) < 1 << 16:
            raise ValueError("there is no such port")
        return master

    @classmethod
    def read_from(cls, options: Mapping[str, Any]) -> Self:
        metadata = options.get("metadata")
        if isinstance(metadata, str) and "://" in metadata:
            refuse_secret_in_url(f"{SETTING}.metadata", metadata)
        return super().read_from(options)
