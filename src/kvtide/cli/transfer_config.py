"""``--kv-transfer-config`` in every form that vLLM takes, read and written.

Knows how vLLM spells and joins it: JSON (with numbers such as ``8G``), ``--kv-transfer-config.key value``,
underscores for dashes, shortened names, a YAML file. Knows what kvtide needs in it. Does not know settings:
what stands under ``kv_connector_extra_config`` is handed on for ``kvtide.config`` to judge.
"""

import copy
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvtide.errors import ConfigError

OPTION = "--kv-transfer-config"
SHORTEST = "--kv-t"  # argparse takes any beginning that means one option only; this is the shortest
EXTRA = "kv_connector_extra_config"

# What kvtide is started with, and why nothing else will do.
NEEDED = {
    "kv_connector": (
        "KVTideConnector",
        "kvtide serve starts KVTideConnector; for another one run vllm serve",
    ),
    "kv_role": ("kv_both", "kvtide stores and loads: give kv_both, or leave it out"),
    "kv_load_failure_policy": (
        "recompute",
        "a load that fails must end as a recomputation: give recompute, or leave it out",
    ),
}

_POWERS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SHORT_NUMBER = r"(\d+(?:\.\d+)?)([kmgtKMGT])"
_STRING_OR_SHORT_NUMBER = re.compile(rf'"(?:[^"\\]|\\.)*"|\b{_SHORT_NUMBER}\b')


def take_from(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split arguments of ``vllm serve`` into the others, in order, and the transfer configuration.

    Several occurrences are merged, the later winning; the dotted form wins over JSON, as in vLLM.

    Raises:
        ConfigError: No JSON object, or no value where one is needed.
    """
    others: list[str] = []
    whole: dict[str, Any] = {}
    dotted: dict[str, Any] = {}
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            others += [argument, *rest]
            break
        name, equals, value = argument.partition("=")
        option, dot, path = name.partition(".")
        if not _means_us(option):
            others.append(argument)
            continue
        if not equals:
            following = next(rest, None)
            if following is None:
                raise ConfigError(name, None, "a value is missing after it")
            value = following
        if dot:
            _merge(dotted, _nested(path, value))
        else:
            _merge(whole, object_of(value, OPTION))
    _merge(whole, dotted)
    return others, whole


def from_vllm_config_file(path: str) -> dict[str, Any]:
    """Read the transfer configuration from a YAML file as ``vllm serve --config`` takes it.

    Returns:
        {} when the file has none, or cannot be read as a mapping: vLLM says so itself, and better.

    Raises:
        ConfigError: It is there in a form that could not be merged.
    """
    try:
        yaml = importlib.import_module("yaml")  # comes with vLLM
        content = yaml.safe_load(Path(path).read_text())
    except (ImportError, OSError, ValueError):
        return {}
    except yaml.YAMLError:
        return {}
    found: dict[str, Any] = {}
    for key, value in content.items() if isinstance(content, dict) else ():
        option = f"--{key}"
        if _means_us(option.partition(".")[0]):
            if "." in option:
                raise ConfigError(key, value, f"in {path}, write kv-transfer-config as one mapping")
            _merge(found, value if isinstance(value, dict) else object_of(str(value), key))
        elif option.replace("_", "-") == "--kv-offloading-size":
            refuse_vllm_offloading(value)
    return found


def from_file_or_json(text: str) -> dict[str, Any]:
    """Read settings from JSON, from a file of JSON, or from a YAML file for ``vllm serve --config``.

    Returns:
        A transfer configuration. Bare settings are put under ``kv_connector_extra_config``.

    Raises:
        ConfigError: Neither JSON nor a file that can be read.
    """
    if text.lstrip().startswith("{"):
        found = object_of(text, "--config")
    elif Path(text).suffix in (".yaml", ".yml"):
        found = from_vllm_config_file(text)
        if not found:
            raise ConfigError("--config", text, "no kv-transfer-config can be read from this file")
    else:
        try:
            found = object_of(Path(text).read_text(), f"--config {text}")
        except OSError as error:
            hint = f"give JSON or a file that can be read ({error.strerror})"
            raise ConfigError("--config", text, hint) from None
    is_whole = any(key in found for key in (*NEEDED, EXTRA))
    return found if is_whole else {EXTRA: found}


def extra_config_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check a transfer configuration against what kvtide needs, and hand out the settings in it.

    Raises:
        ConfigError: Another connector, role or failure policy; or settings that are no mapping.
    """
    for key, (needed, hint) in NEEDED.items():
        if given.get(key, needed) != needed:
            raise ConfigError(f"{OPTION}: {key}", given[key], hint)
    extra = given.get(EXTRA, {})
    if not isinstance(extra, dict):
        raise ConfigError(f"{OPTION}: {EXTRA}", extra, "give an object of settings by name")
    return extra


def composed(given: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Write the transfer configuration: what is needed, what else was given, and ``settings``."""
    needed = {key: value for key, (value, _) in NEEDED.items()}
    others = {key: value for key, value in given.items() if key not in needed and key != EXTRA}
    return json.dumps(needed | others | {EXTRA: dict(settings)}, separators=(",", ":"), ensure_ascii=False)


def merged(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Join two configurations, key by key and however deep; where both speak, the later wins."""
    joined = copy.deepcopy(dict(earlier))
    _merge(joined, later)
    return joined


def refuse_vllm_offloading(value: object) -> None:
    """Refuse vLLM's own offloading: it would put its connector into kvtide's place without a word.

    Raises:
        ConfigError: Always.
    """
    hint = "this starts vLLM's own offloading connector instead; give --host-memory to kvtide"
    raise ConfigError("--kv-offloading-size", value, hint)


def object_of(text: str, shown: str) -> dict[str, Any]:
    """Read a JSON object as vLLM does, bare ``8G`` being 8 * 2**30 and ``8g`` 8 * 10**9.

    Raises:
        ConfigError: It is none; ``shown`` names where it stood.
    """
    try:
        found = json.loads(_STRING_OR_SHORT_NUMBER.sub(_in_full, text))
    except ValueError as error:
        raise ConfigError(
            shown, text, f"not JSON ({error}); in a shell put it between single quotes"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(shown, text, 'give a JSON object: {"kv_connector_extra_config": {...}}')
    return found


def _means_us(option: str) -> bool:
    spelt = option.replace("_", "-")
    return spelt.startswith(SHORTEST) and OPTION.startswith(spelt)


def _nested(path: str, text: str) -> dict[str, Any]:
    *outer, last = path.split(".")
    value: Any
    if last.endswith("+"):
        last, value = last[:-1], text.split(",")
    else:
        value = _dotted_value(text)
    found = {last: value}
    for key in reversed(outer):
        found = {key: found}
    return found


def _dotted_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        short = re.fullmatch(_SHORT_NUMBER, text)
        return int(_in_full(short)) if short else text


def _in_full(match: re.Match[str]) -> str:
    number, suffix = match[1], match[2]
    return match[0] if number is None else str(int(Fraction(number) * _POWERS[suffix]))


def _merge(into: dict[str, Any], later: Mapping[str, Any]) -> None:
    for key, value in later.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
