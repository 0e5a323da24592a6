"""Options of the valkey tier: what is understood, what is refused by name, and that no secret is shown."""

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import ConfigError
from kvtide.testing.tiers import IDENTITY
from kvtide.tiers.base import TierPlace
from kvtide.tiers.named import check_tier, tier_named
from kvtide.tiers.valkey import ValkeyTier
from kvtide.tiers.valkey_options import Address, ValkeySettings

SECRET = "correct horse"
ENVIRONMENT = {"STORE_PASSWORD": SECRET}


@pytest.mark.parametrize(
    ("url", "address", "database", "tls"),
    [
        ("redis://cache", Address("cache", 6379), 0, False),
        ("redis://10.0.0.1:7000/3", Address("10.0.0.1", 7000), 3, False),
        ("rediss://cache.example:6380/0", Address("cache.example", 6380), 0, True),
        ("redis://[::1]:7000", Address("::1", 7000), 0, False),
        ("unix:///run/val%20key.sock", Address(path="/run/val key.sock"), 0, False),
    ],
)
def test_a_url_says_where_the_server_is(url: str, address: Address, database: int, tls: bool) -> None:
    settings = ValkeySettings.of({"url": url})
    assert settings.address == address
    assert (settings.access.database, settings.access.tls) == (database, tls)
    assert not settings.cluster


def test_addresses_are_written_as_people_do() -> None:
    assert [str(Address("::1", 7)), str(Address("a", 7)), str(Address(path="/s"))] == ["[::1]:7", "a:7", "/s"]


@pytest.mark.parametrize(
    ("options", "option", "said"),
    [
        ({}, "url", "give redis://host:6379"),
        ({"url": ""}, "url", "give redis://host:6379"),
        ({"url": 5}, "url", "give redis://host:6379"),
        ({"url": "cache:6379"}, "url", "give redis://host:6379"),
        ({"url": "http://cache"}, "url", "give redis://host:6379"),
        ({"url": "redis://"}, "url", "names no host"),
        ({"url": "redis://cache:port"}, "url", "is not a URL"),
        ({"url": "redis://[::1"}, "url", "is not a URL"),
        ({"url": "redis://cache/first"}, "url", "number of a database"),
        ({"url": "redis://cache?db=3"}, "url", "an option of its own"),
        ({"url": f"redis://cache?password={SECRET}"}, "url", "give password_env"),
        ({"url": f"redis://:{SECRET}@cache"}, "url", "password_env"),
        ({"url": f"redis://me:{SECRET}@cache"}, "url", "password_env"),
        ({"url": f"redis://{SECRET}@cache"}, "url", "give username"),
        ({"url": "unix://run/valkey.sock"}, "url", "three slashes"),
        ({"url": "redis://cache", "password": SECRET}, "password", "give password_env or password_file"),
        (
            {"url": "redis://cache", "colour": SECRET},
            "colour",
            "there is no such option: there are url, cluster",
        ),
        ({"url": "redis://cache", "cluster": "perhaps"}, "cluster", "true or false"),
        ({"url": "redis://cache/1", "cluster": True}, "cluster", "database 0 only"),
        ({"url": "unix:///run/valkey.sock", "cluster": True}, "cluster", "by host and port"),
        ({"url": "redis://cache", "ttl_s": -1}, "ttl_s", "whole seconds"),
        ({"url": "redis://cache", "ttl_s": 1.5}, "ttl_s", "whole seconds"),
        ({"url": "redis://cache", "prefix": "a b"}, "prefix", "characters"),
        ({"url": "redis://cache", "prefix": "{one-slot}"}, "prefix", "characters"),
        ({"url": "redis://cache", "prefix": "a\r\nFLUSHALL\r\n"}, "prefix", "characters"),
        ({"url": "redis://cache", "prefix": "a\n"}, "prefix", "characters"),
        ({"url": "redis://cache", "ca_file": "/etc/hosts"}, "ca_file", "rediss://"),
        ({"url": "rediss://cache", "ca_file": "/no/such/file"}, "ca_file", "no such file"),
        ({"url": "rediss://cache", "key_file": "/etc/hosts"}, "key_file", "cert_file"),
        ({"url": "redis://cache", "password_env": "NO_SUCH"}, "password_env", "no such variable"),
        ({"url": "redis://cache", "password_file": "/no/such"}, "password_file", "cannot be read"),
        ({"url": "redis://cache", "password_env": [SECRET]}, "password_env", "an environment variable"),
    ],
)
def test_what_will_not_do_is_refused_by_its_name(options: dict[str, Any], option: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ValkeySettings.of(options, ENVIRONMENT)
    assert caught.value.setting == f"tiers.options.{option}"
    assert said in str(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_password_is_fetched_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    for options in ({"password_env": "STORE_PASSWORD"}, {"password_file": str(file)}):
        settings = ValkeySettings.of({"url": "redis://cache", "username": "me", **options}, ENVIRONMENT)
        assert settings.access.password is not None
        assert settings.access.password.get_secret_value() == SECRET
        assert SECRET not in repr(settings) + str(settings) + repr(settings.access)


def test_options_are_checked_before_anything_is_built() -> None:
    ValkeyTier.check_options({"url": "redis://cache"})
    with pytest.raises(ConfigError, match=r"tiers\.options\.colour"):
        check_tier("valkey", "valkey", 0, {"url": "redis://cache", "colour": 1})


def test_without_the_client_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.connection", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"pip install 'kvtide\[valkey\]'"):
        check_tier("valkey", "valkey", 0, {"url": "redis://cache"})


def test_a_tier_is_built_by_its_short_name_without_a_server() -> None:
    tier = tier_named("valkey", TierPlace(IDENTITY, 0, 0, {"url": "redis://127.0.0.1:1"}))
    assert repr(tier) == "<ValkeyTier 127.0.0.1:1>"
    assert [tier.run_chunks(size) for size in (1, 65536, 131072, 262143, 262144, 1 << 22)] == [
        16,
        16,
        8,
        4,
        1,
        1,
    ]
    tier.close()
