"""The bit trial: a bit flips somewhere on the disk, and nothing wrong is served; at most less is."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtide.errors import CorruptRecordError, TierError
from kvtide.testing.tiers import DEADLINE_S, IDENTITY, name_of, payload_of
from kvtide.tiers.disk import DiskTier
from kvtide.tiers.records import HEADER_BYTES, RecordIdentity
from kvtide.tiers.slabs import ALIGNMENT, slot_bytes_of

PAYLOAD_BYTES = 1000  # leaves padding behind it
SLOT_BYTES = slot_bytes_of(PAYLOAD_BYTES)
COUNT = 5
OTHER = RecordIdentity(bytes(32))


def opened(folder: Path, identity: RecordIdentity = IDENTITY) -> DiskTier:
    tier = DiskTier(folder, identity, 1 << 20)
    tier.open()
    return tier


def write(tier: DiskTier, number: int) -> None:
    tier.write(name_of(number), memoryview(payload_of(number, PAYLOAD_BYTES)), DEADLINE_S)


def read(tier: DiskTier, number: int) -> bool:
    payload = bytearray(PAYLOAD_BYTES)
    if not tier.read_into(name_of(number).key, memoryview(payload), DEADLINE_S):
        return False
    assert payload == payload_of(number, PAYLOAD_BYTES), f"{number} came back wrong"
    return True


@pytest.fixture(scope="module")
def before() -> Iterator[Path]:
    """A disk as a run has left it: records of now, of before a reset, and of another model."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "tier"
        other = opened(folder, OTHER)
        write(other, 0)
        other.close()
        tier = opened(folder)
        write(tier, 100)
        tier.begin_generation(trusted=True)
        for number in range(COUNT):
            write(tier, number)
        tier.close()
        yield folder


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


many = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@many
@given(number=st.integers(0, COUNT - 1), bit=st.integers(0, 8 * SLOT_BYTES - 1))
def test_any_bit_of_a_record_is_refused_or_is_none_of_it(before: Path, number: int, bit: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(shutil.copytree(before, Path(place) / "tier"))
        tier = opened(folder)
        where = tier._entries[name_of(number).key].slot
        flip(folder / "rank-0" / f"slab-{PAYLOAD_BYTES}", 8 * where * SLOT_BYTES + bit)
        at = bit // 8
        if at < HEADER_BYTES or ALIGNMENT <= at < ALIGNMENT + PAYLOAD_BYTES:
            with pytest.raises(CorruptRecordError):
                read(tier, number)
            assert not read(tier, number)
        assert [other for other in range(COUNT) if other == number or read(tier, other)] == list(range(COUNT))
        write(tier, number)
        assert read(tier, number)
        tier.close()


@many
@given(st.data())
def test_any_bit_of_the_index_costs_records_at_most(before: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(shutil.copytree(before, Path(place) / "tier"))
        index = folder / "rank-0" / "index.sqlite"
        written = [at for at, byte in enumerate(index.read_bytes()) if byte]  # most of it is empty
        at = data.draw(st.one_of(st.sampled_from(written), st.integers(0, index.stat().st_size - 1)))
        flip(index, 8 * at + data.draw(st.integers(0, 7)))
        for identity in (IDENTITY, OTHER):
            tier = opened(folder, identity)
            for number in (*range(COUNT), 100):
                try:
                    read(tier, number)
                except TierError:
                    continue
            list(tier.inventory())
            try:
                write(tier, 50)
                assert read(tier, 50)
            except TierError:
                pass  # costs what would have been kept
            tier.close()


def test_without_a_flipped_bit_all_is_there(before: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(before, tmp_path / "tier"))
    tier = opened(folder)
    assert [number for number in (*range(COUNT), 100) if read(tier, number)] == list(range(COUNT))
    tier.close()
