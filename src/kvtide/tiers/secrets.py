"""Secrets of tiers: named in the settings, kept elsewhere.

vLLM writes its arguments to its log, and ``kv_connector_extra_config`` with them. So a password is never
written there: the settings name an environment variable or a file that has it.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import SecretStr

from kvtide.errors import ConfigError

SECRET_NAMES = {"auth", "authorization", "key", "pass", "pw", "pwd", "sig"}
SECRET_PARTS = (
    "accesskey",
    "apikey",
    "credential",
    "passcode",
    "passphrase",
    "passwd",
    "password",
    "privatekey",
    "secret",
    "signature",
    "token",
)
"""What a parameter of a URL that is a secret is called, or has in its name, punctuation left aside."""


def secret_of(
    setting: str, variable: str | None, file: str | None, environment: Mapping[str, str] | None = None
) -> SecretStr | None:
    """Fetch a secret; None when neither a variable nor a file is named.

    Args:
        setting: Name of the option, for errors: ``password`` stands for ``password_env`` and
            ``password_file``.
        variable: Of the environment.
        file: Whose contents it is, a newline at the end left aside.
        environment: Of the process, if not its own.

    Raises:
        ConfigError: Both are named, or there is nothing where it should be.
    """
    if variable and file:
        raise ConfigError(f"{setting}_env", variable, f"give this or {setting}_file, not both")
    if variable:
        value = (os.environ if environment is None else environment).get(variable)
        if not value:
            raise ConfigError(f"{setting}_env", variable, "there is no such variable, or it is empty")
        return SecretStr(value)
    if file:
        try:
            value = Path(file).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, ValueError) as error:  # as of a name or of bytes that are no text
            raise ConfigError(f"{setting}_file", file, f"cannot be read: {type(error).__name__}") from None
        if not value:
            raise ConfigError(f"{setting}_file", file, "is empty")
        return SecretStr(value)
    return None


def refuse_secret_in_url(setting: str, url: str) -> str:
    """Hand back a URL that holds no secret.

    Raises:
        ConfigError: It has a password in it, which the message does not repeat, or is no URL.
    """
    # "name:password@host" has no scheme, and must not be taken for one.
    has_scheme = "://" in url or url.startswith("//")
    try:
        parts = urlsplit(url if has_scheme else f"//{url}")
    except ValueError as error:
        raise ConfigError(
            setting, "…", f"is no URL: {type(error).__name__}; give scheme://host:port"
        ) from None
    if parts.password or (parts.username and not parts.hostname) or _is_cut_short(parts):
        raise ConfigError(
            setting, f"{parts.scheme}://…", "holds a password, and vLLM logs its settings: give password_env"
        )
    if has_secret_parameter(url):
        raise ConfigError(
            setting,
            f"{parts.scheme}://…",
            "holds a password behind its host, and vLLM logs its settings: give password_env",
        )
    return url


def has_secret_parameter(url: str) -> bool:
    """Whether behind the ``?`` of a URL, or its ``#``, something is given that is a secret by its name."""
    for parameter in re.split("[?#&;]", url)[1:]:
        name, _, value = parameter.partition("=")
        letters = re.sub("[^a-z]", "", unquote(name).lower())
        if value and (letters in SECRET_NAMES or any(part in letters for part in SECRET_PARTS)):
            return True
    return False


def _is_cut_short(parts: SplitResult) -> bool:
    """Whether a password with a "/", "?" or "#" was taken for the end of a host: ``name:pass/word@host``."""
    rest = f"{parts.path}{parts.query}{parts.fragment}"
    port = parts.netloc.rpartition(":")[2]
    return ":" in parts.netloc and "@" in rest and not port.isdecimal() and not port.endswith("]")
