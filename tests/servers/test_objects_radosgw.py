"""The objects tier over a real S3 server: Ceph's radosgw. ``scripts/radosgw.sh`` installs it."""

import uuid
from collections.abc import Iterator
from typing import Any

import obstore
import pytest
from over_s3 import OverS3, tier_of

from kvtide.errors import TierUnavailableError
from kvtide.testing.servers.s3 import S3Server, missing_for_radosgw, radosgw_server
from kvtide.testing.tiers import DEADLINE_S, PAYLOAD_BYTES, name_of, payload_of
from kvtide.tiers.base import Written
from kvtide.tiers.records import RecordRun

MISSING = missing_for_radosgw()
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"radosgw: {', '.join(MISSING)} not installed; run scripts/radosgw.sh"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with radosgw_server(tmp_path_factory.mktemp("radosgw")) as server:
        yield server


@pytest.fixture
def place(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("RGW_KEY", server.access_key_id)
    monkeypatch.setenv("RGW_SECRET", server.secret_access_key)
    return {
        "url": f"s3://kvtide/{uuid.uuid4().hex}",
        "endpoint": server.endpoint,
        "access_key_id_env": "RGW_KEY",
        "secret_access_key_env": "RGW_SECRET",
        "allow_http": True,
        "timeout_s": 20.0,
        "pack_bytes": 16 * PAYLOAD_BYTES,
    }


class TestOverRadosgw(OverS3):
    @pytest.fixture
    def place(self, place: dict[str, Any]) -> dict[str, Any]:
        return place


def test_packed_chunks_are_read_by_another_server(place: dict[str, Any]) -> None:
    tier, other = tier_of(place), tier_of(place)
    names = [name_of(at) for at in range(40)]
    run = RecordRun(0, 0, tuple(name.key[:-4] for name in names))
    payloads = [memoryview(payload_of(at)) for at in range(40)]
    assert tier.write_run(run, payloads, DEADLINE_S) == [Written.NEW] * 40
    assert len(obstore.list(tier._bucket._store).collect()) == 3
    assert all(other.find(run, DEADLINE_S))
    for start, stop in ((0, 40), (3, 9), (15, 33)):
        read = [bytearray(PAYLOAD_BYTES) for _ in range(start, stop)]
        found = other.read_run(run.between(start, stop), [memoryview(one) for one in read], DEADLINE_S)
        assert found == [True] * (stop - start)
        assert read == [payload_of(at) for at in range(start, stop)]
    assert tier_of(place).write_run(run, payloads, DEADLINE_S) == [Written.THERE_ALREADY] * 40
    tier.discard(run.keys())
    assert obstore.list(tier._bucket._store).collect() == []


def test_it_writes_once_and_says_so(place: dict[str, Any]) -> None:
    tier = tier_of(place)
    tier.open()
    assert "writes once" in tier.ping(DEADLINE_S)


def test_a_wrong_secret_is_refused_with_what_would_do(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RGW_SECRET", "not-the-secret")
    with pytest.raises(
        TierUnavailableError, match="SignatureDoesNotMatch: refused: check the credentials"
    ) as no:
        tier_of(place).open()
    assert "not-the-secret" not in str(no.value)


def test_a_bucket_that_is_not_there_is_no_miss(place: dict[str, Any]) -> None:
    tier = tier_of({**place, "url": "s3://nobody-made-this"})
    payload = memoryview(bytearray(PAYLOAD_BYTES))
    with pytest.raises(TierUnavailableError, match="there is no such bucket"):
        tier.read_into(name_of(1).key, payload, DEADLINE_S)
    with pytest.raises(TierUnavailableError, match="there is no such bucket"):
        tier.write(name_of(1), payload, DEADLINE_S)


def test_a_frozen_gateway_costs_a_call_its_time_and_no_more(server: S3Server, place: dict[str, Any]) -> None:
    tier = tier_of({**place, "timeout_s": 0.5})
    server.freeze()
    try:
        with pytest.raises(TierUnavailableError, match="no answer within 0"):
            tier.write(name_of(1), memoryview(payload_of(1)), DEADLINE_S)
    finally:
        server.thaw()
    patient = tier_of(place)
    patient.write(name_of(1), memoryview(payload_of(1)), DEADLINE_S)
    assert patient.read_into(name_of(1).key, memoryview(bytearray(PAYLOAD_BYTES)), DEADLINE_S)
