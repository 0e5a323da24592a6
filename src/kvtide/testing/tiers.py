"""What every tier has to pass: subclass ``TierTests`` with a way to make one and two that bypass it.

One that an instance has for itself passes ``PrivateTierTests``.
"""

import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvtide.errors import CorruptRecordError
from kvtide.keys import OffloadKey, make_offload_key
from kvtide.tiers.base import PrivateTier, Tier, Written
from kvtide.tiers.records import ChunkName, RecordIdentity, Shard

DEADLINE_S = 20.0
IDENTITY = RecordIdentity(bytes(range(32)), (Shard(1, 4),))
PAYLOAD_BYTES = 8192


def name_of(number: int, group_index: int = 0, parent: int | None = None) -> ChunkName:
    """A chunk; another number is another chunk."""

    def hash_of(one: int) -> bytes:
        return (one + 1).to_bytes(4, "big") * 8

    return ChunkName(
        make_offload_key(hash_of(number), group_index), None if parent is None else hash_of(parent), number
    )


def payload_of(number: int, byte_count: int = PAYLOAD_BYTES) -> bytearray:
    """Bytes that differ in every number and place."""
    return bytearray(((number * 7919 + at) * 2654435761 >> 13) & 255 for at in range(byte_count))


class TierTests(ABC):
    """The contract of ``Tier``, as tests.

    A tier is made anew over the same place by ``make``, which does not open it; what lies there between the
    two is the subclass's business.
    """

    @abstractmethod
    def make(self, place: Any, identity: RecordIdentity) -> Tier:
        """Make a tier over ``place``, with room for 64 payloads of ``PAYLOAD_BYTES`` at least."""

    @abstractmethod
    def damage(self, tier: Tier, key: OffloadKey) -> None:
        """Change one byte of what is kept under ``key``, behind the tier's back."""

    @abstractmethod
    def lose(self, tier: Tier, key: OffloadKey) -> None:
        """Take away what is kept under ``key``, behind the tier's back."""

    @pytest.fixture
    def place(self, tmp_path: Any) -> Any:
        """Where a tier is: a folder of its own; to be overridden where it is something else."""
        return tmp_path / "tier"

    @pytest.fixture
    def tier(self, place: Any) -> Any:
        """A tier that holds nothing."""
        tier = self.opened(place)
        yield tier
        tier.close()

    def opened(self, place: Any, identity: RecordIdentity = IDENTITY) -> Tier:
        """A tier that serves."""
        tier = self.make(place, identity)
        tier.open()
        return tier

    # -- bytes come back ------------------------------------------------------------------------

    def test_what_was_written_is_read_back(self, tier: Tier) -> None:
        for number in range(8):
            assert self._write(tier, number) is Written.NEW
        for number in reversed(range(8)):
            assert self._read(tier, number) == payload_of(number)

    def test_what_was_never_written_is_a_miss_and_no_error(self, tier: Tier) -> None:
        self._write(tier, 1)
        assert self._read(tier, 2) is None
        assert self._read(tier, 1, group_index=1) is None

    def test_payloads_of_other_sizes_keep_apart(self, tier: Tier) -> None:
        sizes = {3: 1, 4: 511, 5: 4096, 6: 12289}
        for number, byte_count in sizes.items():
            tier.write(name_of(number), memoryview(payload_of(number, byte_count)), DEADLINE_S)
        for number, byte_count in sizes.items():
            assert self._read(tier, number, byte_count=byte_count) == payload_of(number, byte_count)

    def test_a_second_write_of_a_key_changes_nothing(self, tier: Tier) -> None:
        self._write(tier, 1)
        assert self._write(tier, 1) is Written.THERE_ALREADY
        assert self._read(tier, 1) == payload_of(1)

    def test_groups_of_one_hash_keep_apart(self, tier: Tier) -> None:
        for group_index in range(3):
            name = name_of(5, group_index)
            tier.write(name, memoryview(payload_of(10 + group_index)), DEADLINE_S)
        for group_index in range(3):
            assert self._read(tier, 5, group_index=group_index) == payload_of(10 + group_index)

    def test_a_buffer_of_another_length_gets_nothing(self, tier: Tier) -> None:
        self._write(tier, 1)
        for byte_count in (PAYLOAD_BYTES - 1, PAYLOAD_BYTES + 1):
            with pytest.raises(CorruptRecordError):
                self._read(tier, 1, byte_count=byte_count)
            self._write(tier, 1)

    # -- what is here -----------------------------------------------------------------------------

    def test_contains_says_what_is_here(self, tier: Tier) -> None:
        for number in (1, 3):
            self._write(tier, number)
        keys = [name_of(number).key for number in range(5)]
        assert tier.contains(keys, DEADLINE_S) == [False, True, False, True, False]
        assert tier.contains([], DEADLINE_S) == []

    def test_what_is_discarded_is_gone_and_may_come_again(self, tier: Tier) -> None:
        for number in range(4):
            self._write(tier, number)
        tier.discard([name_of(number).key for number in (1, 2, 99)])
        assert [self._read(tier, number) is not None for number in range(4)] == [True, False, False, True]
        assert self._write(tier, 1) is Written.NEW
        assert self._read(tier, 1) == payload_of(1)

    # -- never a wrong byte -------------------------------------------------------------------------

    def test_a_damaged_record_is_refused_once_and_then_a_miss(self, tier: Tier) -> None:
        self._write(tier, 1)
        self._write(tier, 2)
        self.damage(tier, name_of(1).key)
        with pytest.raises(CorruptRecordError):
            self._read(tier, 1)
        assert self._read(tier, 1) is None
        assert self._read(tier, 2) == payload_of(2)
        assert self._write(tier, 1) is Written.NEW
        assert self._read(tier, 1) == payload_of(1)

    def test_a_record_that_was_taken_away_is_a_miss(self, tier: Tier) -> None:
        self._write(tier, 1)
        self.lose(tier, name_of(1).key)
        try:
            assert self._read(tier, 1) is None
        except CorruptRecordError:
            assert self._read(tier, 1) is None

    @pytest.mark.parametrize(
        "other",
        [
            RecordIdentity(bytes(32), IDENTITY.shards),
            RecordIdentity(IDENTITY.fingerprint, (Shard(2, 4),)),
            RecordIdentity(IDENTITY.fingerprint, (Shard(1, 8),)),
        ],
        ids=["weights", "rank", "rank count"],
    )
    def test_what_another_model_or_rank_has_written_is_not_served(
        self, place: Any, other: RecordIdentity
    ) -> None:
        tier = self.opened(place)
        self._write(tier, 1)
        tier.close()
        stranger = self.opened(place, other)
        try:
            assert self._read(stranger, 1) is None
        finally:
            stranger.close()

    def test_a_new_generation_serves_nothing_of_before(self, tier: Tier) -> None:
        for number in range(3):
            self._write(tier, number)
        tier.begin_generation()
        assert [self._read(tier, number) for number in range(3)] == [None] * 3
        assert tier.contains([name_of(0).key], DEADLINE_S) == [False]
        assert self._write(tier, 1) is Written.NEW
        assert self._read(tier, 1) == payload_of(1)

    # -- many at once -------------------------------------------------------------------------------

    def test_calls_of_many_threads_do_not_disturb_one_another(self, tier: Tier) -> None:
        started = threading.Barrier(8)

        def work(worker: int) -> None:
            started.wait(DEADLINE_S)
            for turn in range(12):
                number = (worker * 5 + turn) % 16
                self._write(tier, number)
                read = self._read(tier, number)
                assert read in (None, payload_of(number)), f"{number} came back wrong"
                if turn % 4 == worker % 4:
                    tier.discard([name_of(number).key])

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work, worker) for worker in range(8)]:
                done.result(60.0)

    # -- inside -------------------------------------------------------------------------------------

    @staticmethod
    def _write(tier: Tier, number: int) -> Written:
        return tier.write(name_of(number), memoryview(payload_of(number)), DEADLINE_S)

    @staticmethod
    def _read(
        tier: Tier, number: int, group_index: int = 0, byte_count: int = PAYLOAD_BYTES
    ) -> bytearray | None:
        payload = bytearray(byte_count)
        found = tier.read_into(name_of(number, group_index).key, memoryview(payload), DEADLINE_S)
        return payload if found else None


class PrivateTierTests(TierTests):
    """The contract of ``PrivateTier``, as tests: of ``TierTests``, and of what is there after a restart."""

    # -- a reset and a restart ------------------------------------------------------------------

    @pytest.mark.parametrize("trusted", [False, True], ids=["other weights perhaps", "the same weights"])
    def test_what_came_after_a_reset_is_there_after_a_restart_if_the_weights_are_the_same(
        self, place: Any, trusted: bool
    ) -> None:
        tier = self._private(place)
        self._write(tier, 1)
        tier.begin_generation(trusted)
        self._write(tier, 2)
        tier.close()
        for _ in range(2):
            again = self._private(place)
            try:
                listed = [header.name.chunk_index for header in again.inventory()]
                assert listed == ([2] if trusted else [])
                assert self._read(again, 1) is None
                assert self._read(again, 2) == (payload_of(2) if trusted else None)
            finally:
                again.close()

    def test_after_a_reset_and_a_restart_it_keeps_again_what_is_written(self, place: Any) -> None:
        tier = self._private(place)
        tier.begin_generation()
        tier.close()
        for number in (1, 2):
            again = self._private(place)
            assert self._write(again, number) is Written.NEW
            again.close()
        last = self._private(place)
        assert [self._read(last, number) for number in (1, 2)] == [payload_of(1), payload_of(2)]
        last.close()

    # -- how much -----------------------------------------------------------------------------------

    def test_what_a_record_takes_is_what_it_said(self, place: Any) -> None:
        tier = self._private(place)
        try:
            assert tier.used_bytes == 0
            for number in range(4):
                self._write(tier, number)
            assert tier.used_bytes == 4 * tier.record_bytes(PAYLOAD_BYTES) <= tier.capacity_bytes
            tier.discard([name_of(number).key for number in range(3)])
            assert tier.used_bytes == tier.record_bytes(PAYLOAD_BYTES)
        finally:
            tier.close()

    # -- a restart ----------------------------------------------------------------------------------

    def test_what_was_closed_is_there_again_and_listed(self, place: Any) -> None:
        tier = self._private(place)
        for number in range(6):
            tier.write(
                name_of(number, parent=number - 1 if number else None),
                memoryview(payload_of(number)),
                DEADLINE_S,
            )
        tier.discard([name_of(5).key])
        tier.close()
        again = self._private(place)
        try:
            listed = {header.name.chunk_index: header for header in again.inventory()}
            assert sorted(listed) == [0, 1, 2, 3, 4]
            for number, header in listed.items():
                assert header.name == name_of(number, parent=number - 1 if number else None)
                assert (header.shard, header.payload_bytes) == (IDENTITY.shards[0], PAYLOAD_BYTES)
                assert self._read(again, number) == payload_of(number)
        finally:
            again.close()

    def _private(self, place: Any) -> PrivateTier:
        tier = self.opened(place)
        assert isinstance(tier, PrivateTier)
        return tier
