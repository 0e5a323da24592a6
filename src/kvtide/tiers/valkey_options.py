"""What settings say of a Valkey or Redis server: where it is, how one gets in, what is kept there how long.

Knows options and their bounds. Opens nothing but a file with a password in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import unquote, urlsplit

from pydantic import Field, SecretStr

from kvtide.errors import ConfigError
from kvtide.tiers.options import HIDDEN, SETTING, TierOptions, option_error
from kvtide.tiers.secrets import refuse_secret_in_url, secret_of

DEFAULT_PORT = 6379
YEAR_S = 366 * 86400
URL_HINT = "give redis://host:6379, rediss://host:6379 (TLS) or unix:///path/of/socket"


class ValkeyOptions(TierOptions):
    """``options`` of the tier as the user writes them; ``docs/valkey.md`` describes them."""

    HINTS: ClassVar[Mapping[str, str]] = {
        "url": URL_HINT,
        "cluster": "give true or false",
        "username": "give the name of an ACL user",
        "password_env": "give the name of an environment variable",
        "password_file": "give the path of a file",
        "ttl_s": f"give whole seconds from 0 (records do not expire) to {YEAR_S}",
        "prefix": "give up to 64 of the characters a-z A-Z 0-9 . _ : / -",
        "password": "vLLM logs its settings: give password_env or password_file",
    }
    SHOWN = frozenset({"cluster", "ttl_s", "prefix"})

    url: str = Field(min_length=1)
    cluster: bool = False
    username: str = Field(default="", max_length=256)
    password_env: str | None = None
    password_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    ttl_s: int = Field(default=0, ge=0, le=YEAR_S)
    # No braces: they would put all records into one slot of a cluster.
    prefix: str = Field(default="kvtide/", pattern=r"^[A-Za-z0-9._:/-]{0,64}$")


@dataclass(frozen=True, slots=True)
class Address:
    """Of one server: a host and a port, or the path of a socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Access:
    """How one gets in, the same for all nodes of a cluster.

    Attributes:
        tls: Encrypted, and the server's certificate is checked.
        database: Number of it.
        username: Of an ACL user; empty for the default one.
        password: If there is one.
        ca_file: Certificates that are trusted beside the system's.
        cert_file: The client's own certificate.
        key_file: And its key, if it is not in ``cert_file``.
    """

    tls: bool = False
    database: int = 0
    username: str = ""
    password: SecretStr | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


@dataclass(frozen=True, slots=True)
class ValkeySettings:
    """Options that have been checked.

    Attributes:
        address: Of the server, or of one node of the cluster.
        access: How one gets in.
        cluster: Whether it is a cluster.
        ttl_s: After which a record expires; 0: never.
        prefix: Of all names.
    """

    address: Address
    access: Access = field(default_factory=Access)
    cluster: bool = False
    ttl_s: int = 0
    prefix: str = "kvtide/"

    @classmethod
    def of(cls, options: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Self:
        """Check what the user wrote.

        Args:
            options: Of the tier.
            environment: Of the process, if not its own.

        Raises:
            ConfigError: Names the option; never shows a password.
        """
        read = ValkeyOptions.read_from(options)
        address, database, tls = _place_of(read.url)
        if read.cluster and (database or address.path):
            raise option_error(
                "cluster", True, "a cluster has database 0 only, and is reached by host and port"
            )
        files = {"ca_file": read.ca_file, "cert_file": read.cert_file, "key_file": read.key_file}
        for name, path in files.items():
            if path is not None and not tls:
                raise option_error(
                    name, path, "certificates are for TLS: give a url that begins with rediss://"
                )
            if path is not None and not Path(path).is_file():
                raise option_error(name, path, "there is no such file")
        if read.key_file and not read.cert_file:
            raise option_error("key_file", read.key_file, "give cert_file too, the certificate of this key")
        secret = secret_of(f"{SETTING}.password", read.password_env, read.password_file, environment)
        access = Access(tls, database, read.username, secret, read.ca_file, read.cert_file, read.key_file)
        return cls(address, access, read.cluster, read.ttl_s, read.prefix)


def _place_of(url: str) -> tuple[Address, int, bool]:
    """Take a URL apart: address, database, whether it is TLS."""
    try:
        parts = urlsplit(url)
        port = parts.port
        refuse_secret_in_url(f"{SETTING}.url", url)
    except ConfigError:
        raise
    except ValueError:
        raise option_error("url", HIDDEN, f"is not a URL: {URL_HINT}") from None
    shown = f"{parts.scheme}://…"
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise option_error("url", shown, URL_HINT)
    if parts.query or parts.fragment:
        raise option_error(
            "url", shown, "nothing may stand behind a ? or #: all else has an option of its own"
        )
    if parts.username is not None:
        raise option_error("url", shown, "holds a user: give username, and password_env or password_file")
    if parts.scheme == "unix":
        if parts.netloc or len(parts.path) < 2:
            raise option_error(
                "url", shown, "give three slashes and the path of the socket: unix:///run/valkey.sock"
            )
        return Address(path=unquote(parts.path)), 0, False
    if not parts.hostname:
        raise option_error("url", shown, f"names no host: {URL_HINT}")
    database = parts.path.strip("/")
    if database and not (database.isascii() and database.isdigit() and len(database) <= 5):
        raise option_error(
            "url", shown, "behind the host stands the number of a database: redis://host:6379/0"
        )
    address = Address(parts.hostname, DEFAULT_PORT if port is None else port)
    return address, int(database or 0), parts.scheme == "rediss"
