"""Fetching a server's page of metrics: once, within a time and a size, and telling nobody a password.

Knows URLs and HTTP. Does not know what is on the page.
"""

import base64
import time
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from queue import Empty, Queue
from threading import Thread
from urllib.error import HTTPError
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
    came: Queue[bytes | ConfigError] = Queue()
    # Sockets have a limit for each call, and a server that sends a byte a second keeps within it for ever.
    Thread(target=lambda: came.put(_answer(address, limit_s)), daemon=True).start()
    try:
        answer = came.get(timeout=limit_s)
    except Empty:
        answer = _late(address, limit_s)
    if isinstance(answer, ConfigError):
        raise answer
    return answer.decode("utf-8", "replace")


def _answer(address: Address, limit_s: float) -> bytes | ConfigError:
    """Fetch the page, or say why it cannot be."""
    request = Request(address.url, headers={"Accept": "text/plain"})
    if address.credentials:
        # Whoever is redirected to is told nothing.
        request.add_unredirected_header("Authorization", f"Basic {address.credentials}")
    try:
        with _opener(address).open(request, timeout=limit_s) as response:
            return _read(response, time.monotonic() + limit_s)
    except HTTPError as error:
        with error:
            reason = f"answers {error.code} {printable(error.reason, 60)}"
    except TimeoutError:
        return _late(address, limit_s)
    except (OSError, HTTPException, ValueError) as error:
        cause = getattr(error, "reason", None) or error
        if isinstance(cause, TimeoutError):
            return _late(address, limit_s)
        reason = f"cannot be reached: {printable(str(cause), 120) or type(error).__name__}"
    return ConfigError(SETTING, address.shown, reason)


def _read(response: HTTPResponse, until_s: float) -> bytes:
    read = bytearray()
    while piece := response.read1(PIECE_BYTES):
        read += piece
        if len(read) > MOST_BYTES:
            raise ValueError(f"it sends more than {MOST_BYTES >> 20} MiB, which is no page of metrics")
        if time.monotonic() > until_s:
            raise TimeoutError
    return bytes(read)


def _late(address: Address, limit_s: float) -> ConfigError:
    return ConfigError(SETTING, address.shown, f"no whole answer within {limit_s:g} s: see --timeout")


def _opener(address: Address) -> OpenerDirector:
    """Go by the environment's proxies, but not to this machine itself."""
    if (urlsplit(address.url).hostname or "") in LOOPBACK:
        return build_opener(ProxyHandler({}))
    return build_opener()
