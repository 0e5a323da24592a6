"""Fetching a server's page of metrics: once, within a time and a size, and telling nobody a password.

Knows URLs and HTTP. Does not know what is on the page.
"""

import base64
import time
from dataclasses import dataclass
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

from kvtide.cli.folders import printable
from kvtide.errors import ConfigError

METRICS = "/metrics"
MOST_BYTES = 64 << 20
PIECE_BYTES = 64 << 10
SETTING = "URL"
HINT = "give a server such as http://localhost:8000, or its page http://localhost:8000/metrics"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a page is.

    Attributes:
        url: Without a name or password.
        shown: The same for people: without what stands behind the path, which may be a token.
        credentials: Of a name and a password in the URL, base64; empty without.
    """

    url: str
    shown: str
    credentials: str = ""


def address_of(text: str) -> Address:
    """Read a URL, of a server or of its page.

    Raises:
        ConfigError: It is none, or not of HTTP; what it shows of the URL holds no password.
    """
    text = text.strip()
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        # The error's own words may have a password in them.
        raise ConfigError(SETTING, "…", f"is no URL ({type(error).__name__}); {HINT}") from None
    # A password with a "/", "?" or "#" in it is taken for the end of the host.
    if (
        parts.scheme not in ("http", "https")
        or not host
        or "@" in f"{parts.path}{parts.query}{parts.fragment}"
    ):
        shown = "…" if "@" in text else printable(text, 60)
        raise ConfigError(SETTING, shown, f"is no address of HTTP; {HINT}")
    if not text.isprintable() or " " in text or not text.isascii():
        raise ConfigError(SETTING, "…", f"has letters that no URL has; {HINT}")
    place = f"[{host}]" if ":" in host else host
    if port is not None:
        place += f":{port}"
    path = parts.path.rstrip("/")
    if not path.endswith(METRICS):
        path += METRICS
    return Address(
        urlunsplit((parts.scheme, place, path, parts.query, "")),
        urlunsplit((parts.scheme, place, path, "", "")),
        _credentials(parts),
    )


def _credentials(parts: SplitResult) -> str:
    if parts.username is None and parts.password is None:
        return ""
    pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    return base64.b64encode(pair.encode()).decode("ascii")


def page_at(address: Address, limit_s: float) -> str:
    """Fetch it.

    Args:
        address: Of the page.
        limit_s: Seconds for all of it.

    Returns:
        Its text; what is no UTF-8 is replaced.

    Raises:
        ConfigError: No answer in time, not a good one, or an endless one.
    """
    request = Request(address.url, headers={"Accept": "text/plain"})
    if address.credentials:
        # Whoever is redirected to is told nothing.
        request.add_unredirected_header("Authorization", f"Basic {address.credentials}")
    until_s = time.monotonic() + limit_s
    late = f"no whole answer within {limit_s:g} s: see --timeout"
    try:
        with _opener(address).open(request, timeout=limit_s) as response:
            read, size = [], 0
            while piece := response.read1(PIECE_BYTES):
                read.append(piece)
                size += len(piece)
                if size > MOST_BYTES:
                    raise ConfigError(
                        SETTING, address.shown, f"sends more than {MOST_BYTES >> 20} MiB: no page of metrics"
                    )
                if time.monotonic() > until_s:
                    raise ConfigError(SETTING, address.shown, late)
    except HTTPError as error:
        error.close()
        raise ConfigError(
            SETTING, address.shown, f"answers {error.code} {printable(error.reason, 60)}"
        ) from None
    except TimeoutError:
        raise ConfigError(SETTING, address.shown, late) from None
    except (URLError, OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, TimeoutError):
            raise ConfigError(SETTING, address.shown, late) from None
        said = printable(str(reason), 120) or type(error).__name__
        raise ConfigError(SETTING, address.shown, f"cannot be reached: {said}") from None
    return b"".join(read).decode("utf-8", "replace")


def _opener(address: Address) -> OpenerDirector:
    """Go by the environment's proxies, but not to this machine itself."""
    if (urlsplit(address.url).hostname or "") in LOOPBACK:
        return build_opener(ProxyHandler({}))
    return build_opener()
