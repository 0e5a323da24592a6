"""The objects tier over HTTP: moto's S3 server in a process of its own, and what goes wrong with one."""

import contextlib
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import obstore
import pytest
from over_s3 import OverS3, tier_of

from kvtide.errors import CorruptRecordError, TierFullError, TierUnavailableError
from kvtide.testing.servers.s3 import S3Server, moto_checks_signatures, moto_server
from kvtide.testing.tiers import DEADLINE_S, PAYLOAD_BYTES, name_of, payload_of
from kvtide.tiers.base import Written
from kvtide.tiers.objects import ObjectsTier
from kvtide.tiers.records import RecordRun

SECRET = "a-secret-that-nobody-may-see"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with moto_server(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[S3Server]:
    """One that may be frozen and killed."""
    with moto_server(tmp_path) as server:
        yield server


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KV_ACCESS_KEY", "somebody")
    monkeypatch.setenv("KV_SECRET_KEY", SECRET)


def options_for(endpoint: str, url: str = "", **more: Any) -> dict[str, Any]:
    return {
        "url": url or f"s3://kvtide/{uuid.uuid4().hex}",
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key_id_env": "KV_ACCESS_KEY",
        "secret_access_key_env": "KV_SECRET_KEY",
        "allow_http": True,
        "timeout_s": 10.0,
        **more,
    }


class TestOverHTTP(OverS3):
    @pytest.fixture
    def place(self, server: S3Server) -> dict[str, Any]:
        return options_for(server.endpoint)


def run_of(stop: int, start: int = 0) -> RecordRun:
    hashes = tuple(hashlib.sha256(str(at).encode()).digest() for at in range(stop))
    return RecordRun(0, 0, hashes).between(start, stop)


def payloads_of(run: RecordRun) -> list[memoryview]:
    return [memoryview(payload_of(at)) for at in range(run.start, run.start + len(run))]


def read(tier: ObjectsTier, run: RecordRun, deadline_s: float = DEADLINE_S) -> list[Any]:
    payloads = [bytearray(PAYLOAD_BYTES) for _ in range(len(run))]
    outcomes = list(tier.read_run(run, [memoryview(one) for one in payloads], deadline_s))
    for outcome, payload, right in zip(outcomes, payloads, payloads_of(run), strict=True):
        assert outcome is not True or payload == right
    return outcomes


def test_packed_chunks_are_read_by_another_server(server: S3Server) -> None:
    options = options_for(server.endpoint, pack_bytes=16 * PAYLOAD_BYTES)
    tier, other = tier_of(options), tier_of(options)
    run = run_of(100)
    assert tier.write_run(run, payloads_of(run), DEADLINE_S) == [Written.NEW] * 100
    assert len(obstore.list(tier._bucket._store).collect()) == 7
    assert other.find(run_of(110), DEADLINE_S) == [True] * 100 + [False] * 10
    assert read(other, run_of(110)) == [True] * 100 + [False] * 10
    assert read(tier_of(options), run_of(77, 70)) == [True] * 7
    assert other.write_run(run, payloads_of(run), DEADLINE_S) == [Written.THERE_ALREADY] * 100
    other.discard(run.keys())
    assert obstore.list(tier._bucket._store).collect() == []


def test_a_large_run_is_looked_for_in_steps(server: S3Server) -> None:
    tier = tier_of(options_for(server.endpoint, pack_bytes=0))
    run = run_of(30)
    assert tier.run_chunks(PAYLOAD_BYTES) == 1
    tier.write_run(run, payloads_of(run), DEADLINE_S)
    assert tier.find(run_of(64), DEADLINE_S) == [True] * 30 + [False] * 34
    assert read(tier, run_of(31)) == [True] * 30 + [False]


def test_ping_and_open_tell_that_all_is_well(server: S3Server) -> None:
    tier = tier_of(options_for(server.endpoint))
    tier.open()
    assert "writes once" in tier.ping(DEADLINE_S)
    assert SECRET not in repr(tier) + str(vars(tier))


# -- what goes wrong -----------------------------------------------------------------------------------


def calls_of(tier: ObjectsTier) -> list[Any]:
    run = run_of(3)
    return [
        tier.open,
        lambda: tier.read_into(name_of(1).key, memoryview(bytearray(PAYLOAD_BYTES)), 1.5),
        lambda: tier.write(name_of(1), memoryview(payload_of(1)), 1.5),
        lambda: tier.contains([name_of(1).key], 1.5),
        lambda: tier.contains([name_of(1).key, name_of(2).key], 1.5),
        lambda: tier.find(run, 1.5),
        lambda: read(tier, run, 1.5),
        lambda: tier.write_run(run, payloads_of(run), 1.5),
        lambda: tier.ping(1.5),
    ]


def refused(tier: ObjectsTier, *said: str) -> None:
    """Each call ends as unavailable, says why, and no secret."""
    for call in calls_of(tier):
        with pytest.raises(TierUnavailableError) as caught:
            call()
        assert any(one in str(caught.value) for one in said), str(caught.value)
        assert SECRET not in str(caught.value)
        assert "Signature=" not in str(caught.value)
        assert len(str(caught.value)) < 400
    tier.discard([name_of(7).key])
    assert tier.discards_failed == 1


def test_a_frozen_server_costs_each_call_its_time_and_no_more(own_server: S3Server) -> None:
    tier = tier_of(options_for(own_server.endpoint, timeout_s=0.5))
    tier.open()
    tier.write(name_of(1), memoryview(payload_of(1)), DEADLINE_S)
    own_server.freeze()
    began_s = time.monotonic()
    refused(tier, "no answer within 0.5 s (timeout_s)", "out of time")
    assert time.monotonic() - began_s < 60.0  # and not three minutes each
    own_server.thaw()
    payload = bytearray(PAYLOAD_BYTES)
    patient = tier_of(options_for(own_server.endpoint, tier._options.url))
    assert patient.read_into(name_of(1).key, memoryview(payload), DEADLINE_S)
    assert payload == payload_of(1)


def test_while_one_thread_waits_for_a_frozen_server_others_run(own_server: S3Server) -> None:
    tier = tier_of(options_for(own_server.endpoint, timeout_s=30.0))
    own_server.freeze()
    outcomes: list[Any] = []
    thread = threading.Thread(target=lambda: outcomes.append(tier.contains([name_of(1).key], DEADLINE_S)))
    thread.start()
    assert sum(range(1000)) == 499500  # obstore does not hold the interpreter
    assert not outcomes
    own_server.thaw()
    thread.join(60.0)
    assert outcomes == [[False]]


def test_a_dead_server_is_said_to_be_unreachable(own_server: S3Server) -> None:
    tier = tier_of(options_for(own_server.endpoint))
    tier.open()
    own_server.kill()
    refused(tier, "cannot be reached: check endpoint")


def test_a_bucket_that_is_not_there_is_no_miss(server: S3Server) -> None:
    tier = tier_of(options_for(server.endpoint, "s3://nobody-made-this/x"))
    for call in (calls_of(tier)[at] for at in (0, 1, 2, 5, 6, 7, 8)):
        with pytest.raises(TierUnavailableError, match="there is no such bucket: make it, or correct url"):
            call()


def test_wrong_credentials_are_refused_with_what_would_do(own_server: S3Server) -> None:
    moto_checks_signatures(own_server)
    refused(tier_of(options_for(own_server.endpoint)), "refused: check the credentials")


class Answering(BaseHTTPRequestHandler):
    """Answers everything alike."""

    status, body = 503, b""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.body)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def answering() -> Iterator[type[Answering]]:
    """A server whose answers the test decides."""
    handler = type("Handler", (Answering,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        handler.endpoint = f"http://127.0.0.1:{server.server_port}"
        yield handler
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (503, "SlowDown", "503 SlowDown: throttled"),
        (429, "TooManyRequests", "429 TooManyRequests: throttled"),
        (500, "InternalError", "500 InternalError"),
        (403, "RequestTimeTooSkewed", "403 RequestTimeTooSkewed: refused"),
        (400, "AuthorizationHeaderMalformed", "correct region"),
    ],
)
def test_what_a_server_refuses_is_told_by_its_code(answering: Any, status: int, code: str, said: str) -> None:
    answering.status = status
    answering.body = f"<Error><Code>{code}</Code><Message>{SECRET}</Message></Error>".encode()
    tier = tier_of(options_for(answering.endpoint))
    for call in (calls_of(tier)[at] for at in (0, 1, 2, 5, 6, 7)):
        with pytest.raises(TierUnavailableError) as caught:
            call()
        assert said in str(caught.value)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(("status", "code"), [(403, "QuotaExceeded"), (507, "XMinioStorageFull")])
def test_a_full_store_is_full(answering: Any, status: int, code: str) -> None:
    answering.status, answering.body = status, f"<Error><Code>{code}</Code></Error>".encode()
    tier = tier_of(options_for(answering.endpoint))
    with pytest.raises(TierFullError):
        tier.write(name_of(1), memoryview(payload_of(1)), DEADLINE_S)


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>a proxy's page</html>", b"\xff" * 4096, b"<ListBucketResult><Contents><Key>x</Key>"],
    ids=["nothing", "a page", "bytes", "half a listing"],
)
def test_a_server_that_is_no_object_store_harms_nothing(answering: Any, body: bytes) -> None:
    answering.status, answering.body = 200, body
    tier = tier_of(options_for(answering.endpoint))
    run, payload = run_of(3), memoryview(bytearray(PAYLOAD_BYTES))
    for reads in (lambda: read(tier, run), lambda: [tier.read_into(run.keys()[0], payload, DEADLINE_S)]):
        with contextlib.suppress(TierUnavailableError, CorruptRecordError):
            assert True not in reads()
    for hints in (tier.open, lambda: tier.find(run, DEADLINE_S), lambda: tier.ping(DEADLINE_S)):
        with contextlib.suppress(TierUnavailableError, CorruptRecordError):
            hints()


def test_of_a_body_that_does_not_end_no_more_is_taken_than_is_due(answering: Any) -> None:
    sent: list[int] = []

    def flood(self: Answering) -> None:
        self.send_response(206)
        self.send_header("Content-Range", "bytes 0-255/1000000")
        self.send_header("ETag", '"x"')
        self.send_header("Last-Modified", "Mon, 30 Nov 2026 06:55:44 GMT")
        self.send_header("Content-Length", str(1 << 30))
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(1 << 10):
                self.wfile.write(bytes(1 << 20))
                sent.append(1)

    answering.do_GET = flood
    tier = tier_of(options_for(answering.endpoint))
    with pytest.raises(CorruptRecordError, match="256 that are due"):
        tier._bucket.read("x", 1_000_000, time.monotonic() + DEADLINE_S, (0, 256))
    assert len(sent) < 128  # of 1,024; the rest was on its way


def test_without_credentials_anywhere_that_is_said(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_for(server.endpoint, timeout_s=1.0)
    del options["access_key_id_env"], options["secret_access_key_env"]
    # Where a machine of Amazon's would answer; here nobody does.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TierUnavailableError, match="no credentials: give access_key_id_env"):
        tier_of(options).open()
