"""Secrets of tiers: named in the settings, kept elsewhere.

vLLM writes its arguments to its log, and ``kv_connector_extra_config`` with them. So a password is never
written there: the settings name an environment variable or a file that has it.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from kvtide.errors import ConfigError


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
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{setting}_file", file, f"cannot be read: {type(error).__name__}") from None
        if not value:
            raise ConfigError(f"{setting}_file", file, "is empty")
        return SecretStr(value)
    return None


def refuse_secret_in_url(setting: str, url: str) -> str:
    """Hand back a URL that holds no secret.

    Raises:
        ConfigError: It has a password in it, which the message does not repeat.
    """
    parts = urlsplit(url)
    if parts.password or (parts.username and not parts.hostname):
        raise ConfigError(
            setting, f"{parts.scheme}://…", "holds a password, and vLLM logs its settings: give password_env"
        )
    return url
