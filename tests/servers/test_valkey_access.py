"""How one gets in: TLS, certificates, passwords and users, and what is said when one does not."""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import TierFullError, TierUnavailableError
from kvtide.testing.servers.valkey import (
    PASSWORD,
    Server,
    certificates,
    redis_server,
    tls_server,
)
from kvtide.testing.tiers import IDENTITY, PAYLOAD_BYTES, name_of, payload_of
from kvtide.tiers.base import TierPlace, Written
from kvtide.tiers.valkey import ValkeyTier

PATIENCE_S = 20.0
WRONG = "battery staple"


@pytest.fixture(autouse=True)
def passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIGHT_PASSWORD", PASSWORD)
    monkeypatch.setenv("WRONG_PASSWORD", WRONG)


@contextmanager
def built(url: str, **options: Any) -> Iterator[ValkeyTier]:
    tier = ValkeyTier.build(TierPlace(IDENTITY, 0, 0, {"url": url, **options}))
    try:
        yield tier
    finally:
        tier.close()


def works(tier: ValkeyTier, number: int, byte_count: int = PAYLOAD_BYTES) -> None:
    tier.open()
    payload = payload_of(number, byte_count)
    assert tier.write(name_of(number), memoryview(payload), PATIENCE_S) is Written.NEW
    found = bytearray(byte_count)
    assert tier.read_into(name_of(number).key, memoryview(found), PATIENCE_S)
    assert found == payload


def refusal(tier: ValkeyTier) -> str:
    """Say why it does not open, having seen to it that nobody's password is in it."""
    with pytest.raises(TierUnavailableError) as caught:
        tier.open()
    shown = "".join(traceback.format_exception(caught.value)) + repr(tier) + repr(vars(tier))
    assert PASSWORD not in shown
    assert WRONG not in shown
    return str(caught.value)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with TLS that wants a certificate, a password for the default user, and has other users."""
    folder = tmp_path_factory.mktemp("tls") / "one"
    with tls_server(folder, "--requirepass", PASSWORD) as server:
        for user in (
            ["tide", "on", f">{PASSWORD}", "~kvtide/*", "+@read", "+@write", "+ping", "+info"],
            ["reader", "on", f">{PASSWORD}", "~kvtide/*", "+get", "+exists", "+ping"],
            ["elsewhere", "on", f">{PASSWORD}", "~other/*", "+@all"],
            ["off", "off", f">{PASSWORD}", "~*", "+@all"],
        ):
            server.command("ACL", "SETUSER", *user, password=PASSWORD)
        yield server


@pytest.fixture
def door(secured: Server) -> dict[str, Any]:
    """Options that let one in."""
    tls = secured.folder.with_name("one-tls")
    return {
        "url": secured.url.replace("redis:", "rediss:"),
        "ca_file": str(tls / "ca.crt"),
        "cert_file": str(tls / "client.crt"),
        "key_file": str(tls / "client.key"),
        "password_env": "RIGHT_PASSWORD",
    }


def test_with_the_right_certificates_and_password_one_gets_in(secured: Server, door: dict[str, Any]) -> None:
    secured.command("FLUSHALL", password=PASSWORD)
    with built(**door) as tier:
        for number, byte_count in enumerate((1, PAYLOAD_BYTES, 1 << 20)):
            works(tier, number, byte_count)
        assert tier.contains([name_of(number).key for number in (1, 9)], PATIENCE_S) == [True, False]
        assert tier.ping(PATIENCE_S).startswith("Redis ")
        assert tier.nodes[0].connection_count == 1


def test_a_user_with_just_the_rights_it_needs_gets_in(
    secured: Server, door: dict[str, Any], tmp_path: Path
) -> None:
    secured.command("FLUSHALL", password=PASSWORD)
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    del door["password_env"]
    with built(**door, username="tide", password_file=str(file)) as tier:
        works(tier, 1)
        tier.discard([name_of(1).key])
        assert tier.contains([name_of(1).key], PATIENCE_S) == [False]
        assert "127.0.0.1" in tier.ping(PATIENCE_S)


def test_a_user_that_may_only_read_reads(secured: Server, door: dict[str, Any]) -> None:
    secured.command("FLUSHALL", password=PASSWORD)
    with built(**door) as tier:
        works(tier, 1)
    with built(**door, username="reader") as tier:
        tier.open()
        found = bytearray(PAYLOAD_BYTES)
        assert tier.read_into(name_of(1).key, memoryview(found), PATIENCE_S)
        with pytest.raises(TierFullError, match="its ACL needs"):
            tier.write(name_of(2), memoryview(payload_of(2)), PATIENCE_S)
        with pytest.raises(TierUnavailableError, match="its ACL needs"):
            tier.ping(PATIENCE_S)
        assert not tier.nodes[0].is_out()


def test_a_user_that_may_not_touch_our_keys_is_told_so(door: dict[str, Any]) -> None:
    with built(**door, username="elsewhere") as tier:
        tier.open()
        with pytest.raises(TierUnavailableError, match="the keys ~PREFIX"):
            tier.ping(PATIENCE_S)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"password_env": "WRONG_PASSWORD"}, "does not accept the password: see tiers.options.username"),
        ({"password_env": None}, "password_env or password_file"),
        ({"username": "nobody"}, "does not accept the password: see tiers.options.username"),
        ({"username": "off"}, "does not accept the password: see tiers.options.username"),
        ({"cert_file": None, "key_file": None}, "tiers.options.ca_file, cert_file and key_file"),
        ({"ca_file": None}, "has a certificate that is not accepted"),
        ({"ca_file": "OTHER"}, "see tiers.options.ca_file"),
        ({"ca_file": "NOISE"}, "tiers.options.ca_file"),
        ({"cert_file": "NOISE", "key_file": None}, "tiers.options.ca_file, cert_file and key_file"),
    ],
    ids=["wrong password", "none", "unknown user", "user off", "no certificate", "no authority",
         "another authority", "no authority but noise", "noise for a certificate"],
)  # fmt: skip
def test_who_does_not_get_in_is_told_by_which_setting(
    door: dict[str, Any], changed: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    if "OTHER" in changed.values():
        certificates(tmp_path / "other")
    (tmp_path / "noise").write_text("noise")
    files = {"OTHER": str(tmp_path / "other" / "ca.crt"), "NOISE": str(tmp_path / "noise")}
    options = {**door, **{name: files.get(value, value) for name, value in changed.items()}}
    with built(**options) as tier:
        assert said in refusal(tier)
    assert PASSWORD not in caplog.text
    assert WRONG not in caplog.text


def test_a_name_that_the_certificate_does_not_have_is_refused(secured: Server, door: dict[str, Any]) -> None:
    # The same address, written so that it is not what the certificate says.
    with built(**{**door, "url": f"rediss://127.1:{secured.port}"}) as tier:
        assert "has a certificate that is not accepted" in refusal(tier)


def test_tls_where_there_is_none_and_none_where_there_is(secured: Server, tmp_path: Path) -> None:
    with built(secured.url) as tier:
        assert "rediss://" in refusal(tier)
    with redis_server(tmp_path / "plain") as plain, built(plain.url.replace("redis:", "rediss:")) as tier:
        assert "give redis://" in refusal(tier)


def test_a_password_where_there_is_none(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path / "open") as server,
        built(server.url, password_env="RIGHT_PASSWORD") as tier,
    ):
        assert "leave out username, password_env and password_file" in refusal(tier)


def test_a_password_that_changes_while_it_runs(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path / "one", "--requirepass", PASSWORD) as server,
        built(server.url, password_env="RIGHT_PASSWORD") as tier,
    ):
        works(tier, 1)
        server.command("CONFIG", "SET", "requirepass", WRONG, password=PASSWORD)
        server.command("CLIENT", "KILL", "TYPE", "normal", password=WRONG)
        with pytest.raises(TierUnavailableError, match="does not accept the password"):
            tier.contains([name_of(1).key], PATIENCE_S)
        assert tier.nodes[0].is_out()
