"""The format of records: its bytes, what it refuses, and that no flipped bit is served."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import CorruptRecordError
from kvtide.keys import make_offload_key
from kvtide.tiers.records import (
    HEADER_BYTES,
    ChunkName,
    RecordHeader,
    RecordIdentity,
    Shard,
    digest_of,
    pack,
    unpack,
)

PAYLOAD = bytes(range(256)) * 3
HEADER = RecordHeader(
    fingerprint=bytes(range(32)),
    generation=3,
    name=ChunkName(make_offload_key(b"\xaa" * 32, 5), b"\xbb" * 32, 7),
    shard=Shard(1, 2),
    payload_bytes=len(PAYLOAD),
    payload_digest=digest_of(memoryview(PAYLOAD)),
    written_at_s=1_700_000_000,
)
PINNED = (
    "4b56544944450d0a010020000500000000010203040506070809"
    + "".join(f"{at:02x}" for at in range(10, 32))
    + "0300000000000000"
    + "aa" * 32
    + "bb" * 32
    + "07000000"
    + "01000200"
    + "0003000000000000"
)


def test_the_bytes_of_version_1_are_pinned() -> None:
    packed = pack(HEADER)
    assert len(packed) == HEADER_BYTES
    assert packed.hex().startswith(PINNED)
    assert packed[136:248].hex() == "a9ee10cbf43517e44066a57f4496584a" + "00f1536500000000" + "00" * 88
    assert packed[248:].hex() == "6b6a7edaf92f1a9d"


names = st.builds(
    lambda hash_bytes, group, parent, index: ChunkName(
        make_offload_key(b"\x01" + bytes(hash_bytes - 1), group),
        b"\x02" * hash_bytes if parent else None,
        index,
    ),
    st.integers(1, 32),
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)


@given(
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**64 - 1),
    names,
    st.integers(0, 65535),
    st.integers(0, 2**64 - 1),
)
def test_a_header_comes_back_as_it_was(
    fingerprint: bytes, generation: int, name: ChunkName, shard: int, length: int
) -> None:
    header = RecordHeader(fingerprint, generation, name, Shard(shard, 65535), length, bytes(16), 9)
    assert unpack(pack(header)) == header


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_no_flipped_bit_of_a_header_is_accepted(bit: int) -> None:
    packed = bytearray(pack(HEADER))
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptRecordError):
        unpack(packed)


@given(st.integers(0, len(PAYLOAD) * 8 - 1))
def test_no_flipped_bit_of_a_payload_is_accepted(bit: int) -> None:
    payload = bytearray(PAYLOAD)
    payload[bit // 8] ^= 1 << bit % 8
    identity = RecordIdentity(HEADER.fingerprint, (HEADER.shard,))
    identity.check(HEADER, HEADER.name.key, memoryview(PAYLOAD), 3)
    with pytest.raises(CorruptRecordError, match="payload is damaged"):
        identity.check(HEADER, HEADER.name.key, memoryview(payload), 3)


@pytest.mark.parametrize(
    ("identity", "key", "generation", "said"),
    [
        (RecordIdentity(bytes(32), (HEADER.shard,)), HEADER.name.key, 3, "another fingerprint"),
        (RecordIdentity(HEADER.fingerprint, (Shard(0, 2),)), HEADER.name.key, 3, "another shard"),
        (
            RecordIdentity(HEADER.fingerprint, (HEADER.shard,)),
            make_offload_key(b"\xaa" * 32, 6),
            3,
            "another key",
        ),
        (RecordIdentity(HEADER.fingerprint, (HEADER.shard,)), HEADER.name.key, 4, "another generation"),
    ],
)
def test_a_record_of_something_else_is_refused_by_what_differs(
    identity: RecordIdentity, key: bytes, generation: int, said: str
) -> None:
    with pytest.raises(CorruptRecordError, match=said):
        identity.check(HEADER, key, memoryview(PAYLOAD), generation)  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [b"", pack(HEADER)[:-1], bytes(HEADER_BYTES), b"\xff" * HEADER_BYTES])
def test_what_is_no_header_is_refused(packed: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        unpack(packed)


def test_a_later_format_is_refused_by_its_number() -> None:
    packed = bytearray(pack(HEADER))
    packed[8] = 2
    with pytest.raises(CorruptRecordError, match="format version 2; this kvtide reads 1"):
        unpack(packed)


@pytest.mark.parametrize(
    "header",
    [
        RecordHeader(bytes(31), 0, HEADER.name, Shard(), 0, bytes(16)),
        RecordHeader(bytes(32), 0, ChunkName(make_offload_key(bytes(33), 0), None, 0), Shard(), 0, bytes(16)),
        RecordHeader(bytes(32), 0, ChunkName(HEADER.name.key, b"short", 0), Shard(), 0, bytes(16)),
        RecordHeader(bytes(32), -1, HEADER.name, Shard(), 0, bytes(16)),
    ],
)
def test_what_the_format_has_no_place_for_is_refused_when_written(header: RecordHeader) -> None:
    with pytest.raises(ValueError, match=r"bytes|argument|format"):
        pack(header)
