"""Options of the objects tier: what is wrong with one is said by name, and no secret is shown."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import ConfigError
from kvtide.testing.tiers import IDENTITY
from kvtide.tiers.base import TierPlace
from kvtide.tiers.named import check_tier, tier_named
from kvtide.tiers.objects_bucket import Bucket
from kvtide.tiers.objects_options import _client, _retries, options_of, store_of

SECRET = "wJalrXUtnFEMI/K7MDENG"

S3 = {"url": "s3://bucket/prefix", "endpoint": "https://minio.example:9000", "region": "here"}


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({}, "url"),
        ({"url": 7}, "url"),
        ({"url": "bucket"}, "url"),
        ({"url": "http://bucket"}, "url"),
        ({"url": "s3:bucket"}, "url"),
        ({"url": f"s3://key:{SECRET}@bucket"}, "url"),
        ({"url": f"az://container?sig={SECRET}"}, "url"),
        ({"url": f"s3://{SECRET.replace('/', '')}@bucket"}, "url"),
        ({"url": "s3://b", "endpoint": "minio:9000"}, "endpoint"),
        ({"url": "s3://b", "endpoint": "http://minio:9000"}, "endpoint"),
        ({"url": "s3://b", "endpoint": f"https://u:{SECRET}@minio"}, "endpoint"),
        ({"url": "gs://b", "endpoint": "https://minio"}, "endpoint"),
        ({"url": "file:///b", "region": "here"}, "region"),
        ({"url": "s3://b", "secret_access_key": SECRET}, "secret_access_key"),
        ({"url": "s3://b", "access_key_id_env": "A"}, "secret_access_key_env"),
        ({"url": "s3://b", "secret_access_key_env": "A"}, "access_key_id_env"),
        ({"url": "s3://b", "secret_access_key_file": "/x"}, "access_key_id_env"),
        (
            {"url": "s3://b", "access_key_id_env": "A", "secret_access_key_env": SECRET},
            "secret_access_key_env",
        ),
        ({"url": "s3://b", "pack_bytes": -1}, "pack_bytes"),
        ({"url": "s3://b", "pack_bytes": "2GiB"}, "pack_bytes"),
        ({"url": "s3://b", "pack_bytes": "many"}, "pack_bytes"),
        ({"url": "s3://b", "timeout_s": 0}, "timeout_s"),
        ({"url": "s3://b", "timeout_s": "nan"}, "timeout_s"),
        ({"url": "s3://b", "allow_http": "perhaps"}, "allow_http"),
        ({"url": "s3://b", "\x1b[31m": 1}, "\x1b[31m"),
    ],
)
def test_a_wrong_option_is_named_and_no_secret_is_shown(options: dict[str, Any], setting: str) -> None:
    for refuse in (
        lambda: tier_named("objects", TierPlace(IDENTITY, 0, 0, options)),
        lambda: check_tier("objects", "bucket", 0, options),
    ):
        with pytest.raises(ConfigError) as caught:
            refuse()
        assert caught.value.setting == f"tiers.options.{setting}"
        assert SECRET not in str(caught.value)
        assert SECRET.replace("/", "") not in str(caught.value)


def test_sizes_are_written_as_everywhere() -> None:
    assert options_of({"url": "s3://b", "pack_bytes": "8MiB"}).pack_bytes == 8 << 20
    assert options_of({"url": "s3://b"}).pack_bytes == 8 << 20


@pytest.mark.parametrize("kind", ["env", "file"])
def test_a_secret_is_fetched_where_the_options_say_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("MY_KEY", "somebody")
    monkeypatch.setenv("MY_SECRET", SECRET)
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    where = {"env": "MY_SECRET", "file": str(tmp_path / "secret")}[kind]
    options = options_of({**S3, "access_key_id_env": "MY_KEY", f"secret_access_key_{kind}": where})
    store = store_of(options)
    assert store.config["secret_access_key"] == SECRET
    assert store.config["access_key_id"] == "somebody"
    assert store.config["endpoint"] == S3["endpoint"]
    assert store.prefix == "prefix"
    assert SECRET not in repr(options) + repr(Bucket(store, options.url, 1.0))


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"secret_access_key_env": "NOBODY_SET_THIS"}, "secret_access_key_env"),
        ({"secret_access_key_file": "/there/is/no/such/file"}, "secret_access_key_file"),
        ({"secret_access_key_env": "MY_KEY", "secret_access_key_file": "/x"}, "secret_access_key_env"),
    ],
)
def test_a_secret_that_is_not_where_it_should_be_is_said(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], setting: str
) -> None:
    monkeypatch.setenv("MY_KEY", "somebody")
    with pytest.raises(ConfigError) as caught:
        store_of(options_of({**S3, "access_key_id_env": "MY_KEY", **options}))
    assert caught.value.setting == f"tiers.options.{setting}"


def test_a_request_and_its_retry_end_within_the_time_out() -> None:
    options = options_of({**S3, "timeout_s": 2.0})
    client, retries = _client(options), _retries(options)
    longest = client["timeout"] + retries["retry_timeout"] + retries["backoff"]["max_backoff"]
    assert longest <= timedelta(seconds=2.0)
    assert client["connect_timeout"] <= client["timeout"]
    assert retries["max_retries"] == 1


@pytest.mark.parametrize("url", ["gs://bucket/kv", "az://container/kv", "abfss://container/kv"])
def test_google_and_azure_are_made_from_the_environment(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert store_of(options_of({"url": url})).prefix == "kv"


def test_what_obstore_refuses_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"tiers\.options\.url = 'az://container': obstore refuses it"):
        store_of(options_of({"url": "az://container"}))


def test_a_folder_that_cannot_be_made_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"tiers\.options\.url"):
        store_of(options_of({"url": f"file://{tmp_path}/file/kv"}))


def test_without_obstore_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvtide\[objects\]'"):
        check_tier("objects", "bucket", 0, S3)
