"""Options of a tier: what the user wrote, read into a model or refused by name.

vLLM writes its settings to its log, and whoever is refused has often put a password where it does not belong.
So a refusal shows a value only of an option whose tier says that it is no place for a secret, and never one
that looks as if it had one in it. Knows pydantic and what is said; does not know any tier.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from kvtide.errors import ConfigError
from kvtide.tiers.secrets import has_secret_parameter

SETTING = "tiers.options"
HIDDEN = "…"
"""Shown in the place of a value that may be a secret."""

NAME_CHARACTERS, VALUE_CHARACTERS = 40, 80
"""So much of a name that is no option, and of a value, is repeated at most."""


class TierOptions(BaseModel):
    """``tiers.options`` of one class of tiers: a field for each option, named as the user writes it.

    A subclass says beside its fields:

    Attributes:
        HINTS: By option, what would do. May have names that are no option, but are taken for one.
        SHOWN: Options whose value is no secret whatever it is; those of all others are not shown.
    """

    HINTS: ClassVar[Mapping[str, str]] = {}
    SHOWN: ClassVar[frozenset[str]] = frozenset()

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @classmethod
    def read_from(cls, options: Mapping[str, Any]) -> Self:
        """Read what the user wrote.

        Raises:
            ConfigError: Names the first option that will not do, says what would, and has no secret.
        """
        try:
            return cls.model_validate(dict(options))
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
        # A name that is mistyped first: without it the one that was meant seems to be missing.
        first = min(found, key=lambda one: one["type"] not in ("extra_forbidden", "invalid_key"))
        name = str(first["loc"][0]) if first["loc"] else ""
        raise cls._refusal(name, options.get(name), first["type"], first["msg"])

    @classmethod
    def _refusal(cls, name: str, value: object, kind: str, said: str) -> ConfigError:
        hint = cls.HINTS.get(name)
        if name not in cls.model_fields:
            known = hint or f"there are {', '.join(cls.model_fields) or 'none'}"
            return option_error(name[:NAME_CHARACTERS], HIDDEN, f"there is no such option: {known}")
        if kind == "missing":
            return option_error(name, None, f"is needed: {hint}" if hint else "is needed")
        if not cls._may_show(name, value):
            return option_error(name, HIDDEN, hint or "will not do")  # what pydantic says may quote it
        said = said.removeprefix("Value error, ")
        return option_error(name, value, f"{hint} ({said})" if hint else said)

    @classmethod
    def _may_show(cls, name: str, value: object) -> bool:
        if value is None:
            return True
        if name not in cls.SHOWN or not isinstance(value, str | int | float):
            return False
        text = str(value)
        return "@" not in text and not has_secret_parameter(text) and len(text) <= VALUE_CHARACTERS


def option_error(option: str, value: object, hint: str) -> ConfigError:
    """Make the error of an option; ``value`` is shown."""
    return ConfigError(f"{SETTING}.{option}", value, hint)


def need_client(tier: str, module: str, client: str) -> None:
    """See that what a tier needs is installed, without loading it.

    Args:
        tier: Its short name, and of the extra that brings what it needs.
        module: That is needed.
        client: The same in words.

    Raises:
        ConfigError: It is not there; says how it is installed.
    """
    try:
        found, reason = importlib.util.find_spec(module) is not None, "which is not here"
    except (ImportError, ValueError) as error:  # of the packages around it
        found, reason = False, f"which cannot be had ({error})"
    if not found:
        raise ConfigError("tiers", tier, f"needs {client}, {reason}: pip install 'kvtide[{tier}]'")
