"""What goes over the pipes between a server and its ghosts: bytes of values, and back.

A frame is four bytes of length and so many bytes; the first of them says what it is. Numbers are
little-endian. Both ends are the same version of this file: nothing is kept, and nothing is executed of what
comes. Knows bytes; does not know pipes.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping

from kvtide.advising import FINGERPRINT_BYTES, Arrival, GhostPlan, GhostTier, Growth, Paces
from kvtide.errors import KVTideError
from kvtide.metrics import BY_NAME, Kind

LONGEST = 64 << 20
"""Bytes of a frame: a prompt of a hundred million tokens."""

_LENGTH = struct.Struct("<I")
_ARRIVAL = struct.Struct("<cqdqddB")  # then read paces and fingerprints
_GROWTH = struct.Struct("<cq")  # then fingerprints
_PLAN_KIND, _ARRIVAL_KIND, _GROWTH_KIND, _FORGET_KIND = b"P", b"A", b"G", b"F"

READ_PACES = 255
"""Tiers whose pace fits into a frame."""


class FrameError(KVTideError):
    """Bytes that are no frame of ours."""


class Forget:
    """Every tier was emptied."""


Message = GhostPlan | Arrival | Growth | Forget


class FrameReader:
    """Cuts a stream into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def frames(self, more: bytes) -> Iterator[bytes]:
        """Take what has come and give the frames that are complete.

        Raises:
            FrameError: A frame that is longer than any.
        """
        self._bytes += more
        at = 0
        while len(self._bytes) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, at)
            if length > LONGEST:
                raise FrameError(f"a frame of {length} bytes: at most {LONGEST} are sent")
            begin = at + _LENGTH.size
            if len(self._bytes) < begin + length:
                break
            yield bytes(self._bytes[begin : begin + length])
            at = begin + length
        del self._bytes[:at]


def framed(message: Message) -> bytes:
    """Write a message as a frame."""
    if isinstance(message, Arrival):
        paces = message.paces
        read_s = paces.read_s[:READ_PACES]
        body = _ARRIVAL.pack(
            _ARRIVAL_KIND,
            message.visit,
            message.now_s,
            message.token_count,
            paces.compute_s,
            paces.load_s,
            len(read_s),
        )
        body += struct.pack(f"<{len(read_s)}d", *read_s) + message.chunks
    elif isinstance(message, Growth):
        body = _GROWTH.pack(_GROWTH_KIND, message.visit) + message.chunks
    elif isinstance(message, GhostPlan):
        body = _PLAN_KIND + json.dumps(_fields(message)).encode()
    else:
        body = _FORGET_KIND
    return _LENGTH.pack(len(body)) + body


def message_of(frame: bytes) -> Message:
    """Read a frame.

    Raises:
        FrameError: It is none of ours.
    """
    try:
        kind = frame[:1]
        if kind == _ARRIVAL_KIND:
            _, visit, now_s, tokens, compute_s, load_s, count = _ARRIVAL.unpack_from(frame)
            read_s = struct.unpack_from(f"<{count}d", frame, _ARRIVAL.size)
            chunks = _whole(frame[_ARRIVAL.size + 8 * count :])
            return Arrival(visit, now_s, tokens, chunks, Paces(compute_s, load_s, read_s))
        if kind == _GROWTH_KIND:
            return Growth(_GROWTH.unpack_from(frame)[1], _whole(frame[_GROWTH.size :]))
        if kind == _PLAN_KIND:
            given = json.loads(frame[1:])
            tiers = tuple(GhostTier(**tier) for tier in given.pop("tiers"))
            return GhostPlan(**given, tiers=tiers)
        if kind == _FORGET_KIND:
            return Forget()
    except (struct.error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FrameError(f"a frame that begins with {frame[:8]!r}: {error}") from None
    raise FrameError(f"a frame that begins with {frame[:8]!r} is of no kind")


def answer_frame(answer: Mapping[str, float]) -> bytes:
    """Write an answer as a frame."""
    body = json.dumps(dict(answer)).encode()
    return _LENGTH.pack(len(body)) + body


def answer_of(frame: bytes) -> dict[str, float]:
    """Read an answer: a delta of ``MetricsDelta``.

    Raises:
        FrameError: It is no such thing.
    """
    try:
        found = json.loads(frame)
        answer = {str(key): float(value) for key, value in found.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise FrameError(f"an answer that cannot be read: {error}") from None
    for key, value in answer.items():
        known = BY_NAME.get(key.partition("|")[0])
        # A gauge that is NaN is taken back.
        fits = known is not None and (value >= 0.0 or known.kind is Kind.GAUGE) and not math.isinf(value)
        if not fits:
            raise FrameError(f"an answer that says {key} is {value}")
    return answer


def _whole(chunks: bytes) -> bytes:
    if len(chunks) % FINGERPRINT_BYTES:
        raise ValueError(f"{len(chunks)} bytes are no whole fingerprints")
    return chunks


def _fields(plan: GhostPlan) -> dict[str, object]:
    return {
        "tokens_per_chunk": plan.tokens_per_chunk,
        "most_chunks": plan.most_chunks,
        "tiers": [{name: getattr(tier, name) for name in tier.__slots__} for tier in plan.tiers],
    }
