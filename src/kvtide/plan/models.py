"""Which model is meant: one of those this package knows by name, or somebody's ``config.json``.

Knows files and names. Does not know what the fields in them mean.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvtide.errors import ConfigError

LARGEST_FILE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Configuration:
    """Of a model, as it was published.

    Attributes:
        name: What the user said.
        served_as: What a server would be told.
        fields: As in ``config.json``; of a model for text and more, the part for text over the rest.
        source: Where they come from.
    """

    name: str
    served_as: str
    fields: Mapping[str, Any]
    source: str


@cache
def known_models() -> dict[str, Configuration]:
    """Read the configurations that come with this package, by short name."""
    found = {}
    for file in sorted(files("kvtide.plan").joinpath("configurations").iterdir(), key=lambda one: one.name):
        if file.name.endswith(".json"):
            fields = json.loads(file.read_text("utf-8"))
            name = file.name.removesuffix(".json")
            found[name] = Configuration(name, fields["_model"], fields, fields["_source"])
    return found


def configuration_of(model: str, others: str = "") -> Configuration:
    """Find a model's configuration.

    Args:
        model: A name of ``known_models``, with or without its owner and in any case; or the path of a
            ``config.json`` or of the folder it lies in.
        others: What else would do where it is asked for, for errors.

    Raises:
        ConfigError: Neither, or it cannot be read.
    """
    known = ", ".join(known_models())
    hint = f"give {others}a model's config.json or its folder, or one of {known}"
    path = Path(model)
    try:
        if path.is_dir():
            path /= "config.json"
        is_file = bool(model) and path.is_file()
    except (OSError, ValueError):  # a name no file can have
        is_file = False
    if is_file:
        return Configuration(model, str(path.parent), _fields_of(path, model), str(path))
    short = model.strip().lower()
    for name, configuration in known_models().items():
        whole = configuration.served_as.lower()
        if short in (name, whole, whole.rpartition("/")[2]):
            return configuration
    raise ConfigError("model", model, hint)


def _fields_of(path: Path, name: str) -> Mapping[str, Any]:
    if path.stat().st_size > LARGEST_FILE_BYTES:
        raise ConfigError("model", name, "is too large for a configuration; give a model's config.json")
    try:
        fields = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("model", name, f"cannot be read as JSON ({error}); give a config.json") from None
    if not isinstance(fields, dict):
        raise ConfigError("model", name, "is JSON, but no configuration; give a model's config.json")
    text = fields.get("text_config")
    return {**fields, **text} if isinstance(text, dict) else fields
