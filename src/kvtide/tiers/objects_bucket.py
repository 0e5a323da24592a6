"""A bucket as the tier uses it: a few requests, each with an end, and errors that say what would do.

Messages of obstore hold addresses, headers and what the server said; none of that goes further than here but
a status, a code of letters, and a sentence of ours. Knows paths and bytes; does not know records.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kvtide.errors import CorruptRecordError, TierError, TierFullError, TierUnavailableError

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult
    from obstore.store import ObjectStore

LISTED_AT_ONCE = 1000
"""What S3 tells in one answer."""

HEADS_AT_ONCE = 32
READS_AT_ONCE = 8

STREAMED_BYTES = 1 << 20
"""Of a part of an object, at once."""

RIGHTS = "s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject or what corresponds to them"

T = TypeVar("T")

_STATUS = re.compile(r"status code: ([0-9]{3})\b")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,48})</Code>")
_OUT_OF_RANGE = ("status code: 416", "StartTooLarge")
_FULL = ("QuotaExceeded", "StorageFull", "status code: 507", "No space left on device", "Disk quota exceeded")


@dataclass(frozen=True, slots=True)
class Body:
    """Bytes of an object.

    Attributes:
        view: ``uint8[n]``, owned by obstore.
        e_tag: Of the object's version.
    """

    view: memoryview
    e_tag: str | None


class Bucket:
    """Requests to a store.

    Args:
        store: Of obstore; its own time-outs bound each request.
        label: Names it in messages.
        timeout_s: As its requests are bounded.
    """

    def __init__(self, store: "ObjectStore", label: str, timeout_s: float) -> None:
        import obstore

        self._obstore, self._store = obstore, store
        self._label, self._timeout_s = label, timeout_s
        self._creates = True  # until it has said that it cannot
        self._is_near = isinstance(store, obstore.store.LocalStore | obstore.store.MemoryStore)

    def __repr__(self) -> str:
        return f"Bucket({self._label})"

    # -- requests -------------------------------------------------------------------------------------

    def read(
        self,
        path: str,
        object_bytes: int,
        end_s: float,
        span: tuple[int, int] | None = None,
        e_tag: str | None = None,
    ) -> Body | None:
        """Fetch an object, or a part of it; None when it is not there, or no longer in that version.

        Args:
            path: Of the object.
            object_bytes: What it has to have in all; of a longer one nothing is fetched.
            end_s: By the monotonic clock.
            span: First byte, and one past the last.
            e_tag: Of the version that is meant.

        Raises:
            CorruptRecordError: It has another length.
            TierUnavailableError: Refused, unreachable or out of time.
        """
        first, stop = span or (0, object_bytes)
        with self._asked("read", end_s):
            try:
                result = self._obstore.get(self._store, path, options=_options(span, e_tag))
            except (FileNotFoundError, self._obstore.exceptions.PreconditionError) as error:
                self._refuse_missing_bucket(error)
                return None
            found_bytes, found = result.meta["size"], tuple(result.range)
            if found_bytes != object_bytes or found != (first, stop):
                raise _wrong_length(found_bytes, object_bytes)
            # A whole object cannot be longer than it says; what follows on a part of one is up to the server.
            whole = span is None or self._is_near
            body = memoryview(result.bytes()) if whole else self._streamed(result, stop - first, end_s)
        if body.nbytes != stop - first:
            raise CorruptRecordError(f"{body.nbytes} bytes came, where {stop - first} are due")
        return Body(body, result.meta["e_tag"])

    def _streamed(self, result: "GetResult", byte_count: int, end_s: float) -> memoryview:
        """Take a body bit by bit, no more than is due, as long as there is time."""
        body = memoryview(bytearray(byte_count))
        at = 0
        for part in result.stream(min_chunk_size=STREAMED_BYTES):
            if len(part) > byte_count - at:
                raise CorruptRecordError(f"more bytes come than the {byte_count} that are due")
            body[at : at + len(part)] = part
            at += len(part)
            if time.monotonic() >= end_s:
                raise TierUnavailableError(f"{self._label}: out of time in a read")
        return body[:at]

    def create(self, path: str, parts: Sequence[memoryview | bytes], end_s: float) -> bool:
        """Write an object unless it is there; False when it is.

        Raises:
            TierFullError: No room.
            TierUnavailableError: Refused, unreachable or out of time.
        """
        with self._asked("write", end_s):
            if self._creates:
                try:
                    self._obstore.put(self._store, path, list(parts), mode="create")
                    return True
                except self._obstore.exceptions.AlreadyExistsError:
                    return False
                except (self._obstore.exceptions.NotSupportedError, NotImplementedError):
                    self._creates = False
                except self._obstore.exceptions.GenericError as error:
                    if _status_of(str(error)) != "501":
                        raise
                    self._creates = False
        if self.length(path, end_s) is not None:
            return False
        self.replace(path, parts, end_s)
        return True

    def replace(self, path: str, parts: Sequence[memoryview | bytes], end_s: float) -> None:
        """Write an object, whether it is there or not.

        Raises:
            TierFullError: No room.
            TierUnavailableError: Refused, unreachable or out of time.
        """
        with self._asked("write", end_s):
            self._obstore.put(self._store, path, list(parts), use_multipart=False)

    def length(self, path: str, end_s: float) -> int | None:
        """Say how long an object is, in bytes; None when it is not there.

        Raises:
            TierUnavailableError: Refused, unreachable or out of time.
        """
        with self._asked("look", end_s):
            try:
                return int(self._obstore.head(self._store, path)["size"])
            except FileNotFoundError as error:
                self._refuse_missing_bucket(error)
                return None

    def lengths(self, paths: Sequence[str], end_s: float) -> list[int | None]:
        """Say how long objects are, in bytes; None for those that are not there.

        Raises:
            TierUnavailableError: Refused, unreachable or out of time.
        """
        if len(paths) <= 1:
            return [self.length(path, end_s) for path in paths]

        async def one(path: str) -> int | None:
            try:
                return int((await self._obstore.head_async(self._store, path))["size"])
            except FileNotFoundError as error:
                self._refuse_missing_bucket(error)
                return None

        with self._asked("look", end_s):
            return asyncio.run(_together(one, paths, HEADS_AT_ONCE, end_s))

    def read_whole(
        self, paths: Sequence[str], object_bytes: int, end_s: float
    ) -> list[Body | CorruptRecordError | None]:
        """Fetch objects of one length; for each what ``read`` would return, or would raise.

        Raises:
            TierUnavailableError: Refused, unreachable or out of time.
        """

        async def one(path: str) -> Body | CorruptRecordError | None:
            try:
                result = await self._obstore.get_async(self._store, path)
            except FileNotFoundError as error:
                self._refuse_missing_bucket(error)
                return None
            if (found_bytes := result.meta["size"]) != object_bytes:
                return _wrong_length(found_bytes, object_bytes)
            return Body(memoryview(await result.bytes_async()), result.meta["e_tag"])

        with self._asked("read", end_s):
            return asyncio.run(_together(one, paths, READS_AT_ONCE, end_s))

    def listed(self, folder: str, end_s: float) -> tuple[list[tuple[str, int]], bool]:
        """List a folder, ``LISTED_AT_ONCE`` objects of it at most.

        Returns:
            Path and bytes of each, and whether that is all.

        Raises:
            TierUnavailableError: Refused, unreachable or out of time.
        """
        with self._asked("list", end_s):
            stream = self._obstore.list(self._store, folder, chunk_size=LISTED_AT_ONCE)
            found = next(iter(stream), ())
            return [(one["path"], one["size"]) for one in found], len(found) < LISTED_AT_ONCE

    def delete(self, paths: Sequence[str], end_s: float) -> None:
        """Delete objects; those that are not there are left aside.

        Raises:
            TierUnavailableError: Refused, unreachable or out of time.
        """
        if not paths:
            return
        with self._asked("delete", end_s):
            try:
                self._obstore.delete(self._store, list(paths))
                return
            except (FileNotFoundError, self._obstore.exceptions.BaseError) as error:
                if len(paths) == 1 and not isinstance(error, FileNotFoundError):
                    raise
                # One that is not there ends the whole on some stores; and not all know DeleteObjects.
        for path in paths if len(paths) > 1 else ():
            self.delete([path], end_s)

    # -- trouble --------------------------------------------------------------------------------------

    @contextmanager
    def _asked(self, what: str, end_s: float) -> Iterator[None]:
        """Hold the deadline before a request, and put its errors into our words."""
        if time.monotonic() >= end_s:
            raise TierUnavailableError(f"{self._label}: out of time before it could {what}")
        try:
            yield
        except TimeoutError:
            raise TierUnavailableError(f"{self._label}: out of time in a {what}") from None
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise self._trouble(what, error) from None
        except BaseException as error:
            # A panic of the library is none of Exception, so that nobody catches it unawares; for us it is
            # a store that does not answer.
            if type(error).__name__ != "PanicException":
                raise
            raise TierUnavailableError(f"{self._label}: obstore failed in a {what}") from None

    def _refuse_missing_bucket(self, error: Exception) -> None:
        """A bucket that is not there looks like an object that is not; tell them apart."""
        if _code_of(str(error)) == "NoSuchBucket":
            raise error

    def _trouble(self, what: str, error: Exception) -> TierError:
        text = str(error)
        kind = type(error).__name__
        if any(mark in text for mark in _OUT_OF_RANGE):
            return CorruptRecordError("an object that is shorter than it should be")
        if any(mark in text for mark in _FULL):
            return TierFullError(f"{self._label}: no room ({_code_of(text) or kind})")
        said = " ".join(one for one in (_status_of(text), _code_of(text)) if one) or kind
        return TierUnavailableError(f"{self._label}: {what}: {said}: {self._advice(kind, text)}")

    def _advice(self, kind: str, text: str) -> str:
        status, code = _status_of(text), _code_of(text)
        if "169.254." in text or "metadata.google" in text or "/latest/api/token" in text:
            return (
                "no credentials: give access_key_id_env and secret_access_key_env, or a role to the machine"
            )
        if code == "NoSuchBucket" or (kind == "FileNotFoundError" and status == "404"):
            return "there is no such bucket: make it, or correct url"
        if status in ("301", "307") or code == "AuthorizationHeaderMalformed":
            return "the bucket is elsewhere: correct region or endpoint"
        if kind in ("PermissionDeniedError", "UnauthenticatedError", "PermissionError") or status in (
            "401",
            "403",
        ):
            return f"refused: check the credentials, and that they have {RIGHTS}"
        if status in ("429", "503") or code == "SlowDown":
            return "throttled or overloaded: it is left alone for a while"
        if "kind: Timeout" in text or "TimedOut" in text:
            return f"no answer within {self._timeout_s:g} s (timeout_s)"
        if "kind: Connect" in text or "ConnectError" in text:
            return "cannot be reached: check endpoint, and that the server runs"
        return "not answered as an object store would"


async def _together(
    one: Callable[[str], Awaitable[T]], paths: Sequence[str], at_once: int, end_s: float
) -> list[T]:
    """Ask for several paths, so many at once, until it is too late."""
    turns = asyncio.Semaphore(at_once)

    async def in_turn(path: str) -> T:
        async with turns:
            return await one(path)

    async with asyncio.timeout(max(0.0, end_s - time.monotonic())):
        return list(await asyncio.gather(*map(in_turn, paths)))


def _wrong_length(found_bytes: int, due_bytes: int) -> CorruptRecordError:
    return CorruptRecordError(f"an object of {found_bytes} bytes, where {due_bytes} are due")


def _options(span: tuple[int, int] | None, e_tag: str | None) -> "GetOptions | None":
    if span is None:
        return None
    return {"range": span} if e_tag is None else {"range": span, "if_match": e_tag}


def _status_of(text: str) -> str:
    found = _STATUS.search(text)
    return found[1] if found else ""


def _code_of(text: str) -> str:
    found = _CODE.search(text)
    return found[1] if found else ""
