"""Options of the directory tier: the folder, and when what is written there counts as written.

Knows names and what to say about a wrong one; looks at no folder.
"""

import os
from collections.abc import Mapping
from typing import ClassVar

from pydantic import ConfigDict, Field, field_validator

from kvtide.tiers.options import TierOptions


class DirectoryOptions(TierOptions):
    """``options`` of a tier of class ``directory``.

    Attributes:
        path: The folder; absolute. What is above it has to be there.
        fsync: Wait for the medium before a record can be found.
    """

    HINTS: ClassVar[Mapping[str, str]] = {
        "path": "give an absolute path, such as /mnt/kv/kvtide/records",
        "fsync": "give true or false",
    }
    SHOWN = frozenset({"path", "fsync"})

    model_config = ConfigDict(strict=True)

    path: str = Field(min_length=2, max_length=2048)
    fsync: bool = False

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str) -> str:
        if not path.startswith("/") or "\0" in path:
            raise ValueError("is not absolute")
        return os.path.normpath(path)
