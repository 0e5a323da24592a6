"""Secrets of tiers: fetched from where the settings say, and shown nowhere."""

from pathlib import Path

import pytest

from kvtide.errors import ConfigError
from kvtide.tiers.secrets import refuse_secret_in_url, secret_of

SECRET = "correct horse"


def of_file(path: Path) -> str:
    secret = secret_of("tiers.options.password", None, str(path))
    assert secret is not None
    return secret.get_secret_value()


# -- where it comes from -------------------------------------------------------------------------------------


def test_it_comes_from_the_variable_that_is_named_and_is_not_shown_by_accident() -> None:
    secret = secret_of("password", "STORE_PASSWORD", None, {"STORE_PASSWORD": SECRET})
    assert secret is not None
    assert secret.get_secret_value() == SECRET
    assert SECRET not in f"{secret} {secret!r} {[secret]}"


def test_without_another_the_environment_is_the_processs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIDE_TEST_SECRET", SECRET)
    secret = secret_of("password", "KVTIDE_TEST_SECRET", None)
    assert secret is not None
    assert secret.get_secret_value() == SECRET


@pytest.mark.parametrize(("variable", "file"), [(None, None), ("", ""), (None, "")])
def test_where_nothing_is_named_there_is_none(variable: str | None, file: str | None) -> None:
    assert secret_of("password", variable, file, {"": SECRET}) is None


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
def test_it_comes_from_a_file_without_the_newline_at_its_end(tmp_path: Path, end: str) -> None:
    file = tmp_path / "secret"
    file.write_bytes(f" {SECRET} ".encode() + end.encode())
    assert of_file(file) == f" {SECRET} ", "blanks may be part of it"


def test_a_file_of_several_lines_is_one_secret(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("-----BEGIN\nKEY-----\n")
    assert of_file(file) == "-----BEGIN\nKEY-----"


def test_letters_of_any_kind_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("pässwörd☃", encoding="utf-8")
    assert of_file(file) == "pässwörd☃"


# -- where there is none -------------------------------------------------------------------------------------


@pytest.mark.parametrize("environment", [{}, {"STORE_PASSWORD": ""}, {"OTHER": SECRET}])
def test_a_variable_that_is_not_there_or_empty_is_refused_by_its_name(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        secret_of("tiers.options.password", "STORE_PASSWORD", None, environment)
    assert caught.value.setting == "tiers.options.password_env"
    assert "STORE_PASSWORD" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_both_are_refused_without_a_look_at_either(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"give this or password_file, not both") as caught:
        secret_of("password", "STORE_PASSWORD", str(tmp_path / "nowhere"), {"STORE_PASSWORD": SECRET})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n", b"\r\n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="is empty"):
        of_file(file)


@pytest.mark.parametrize("kind", ["nowhere", "a folder", "no text", "no name"])
def test_a_file_that_cannot_be_read_is_refused_by_its_name_and_shows_nothing(
    tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "secret"
    if kind == "a folder":
        file.mkdir()
    elif kind == "no text":
        file.write_bytes(b"\xff" + SECRET.encode() + b"\xff")
    elif kind == "no name":
        file = tmp_path / "sec\0ret"
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        of_file(file)
    assert caught.value.setting == "tiers.options.password_file"
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__, "a traceback would show what was read"


# -- URLs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "redis://host:6379",
        "rediss://user@host:6379/0",
        "redis://user:@host",
        "unix:///run/store.sock",
        "host:6379",
        "host",
        "10.0.0.1:6379,10.0.0.2:6379",
        "redis://[::1]:6379",
        "[::1]:6379",
        "http://[::1]/path@here",
        "http://host:80/path@here",
        "s3://bucket/prefix@2024",
        "https://host/path:with@signs",
        "/run/store@host.sock",
        "http://host:8080/metadata?cluster=a&timeout=5#top",
        "http://host/metadata?password=&monkey=1",
        "http://host/password=1/token=2",
        "",
    ],
)
def test_a_url_without_a_secret_is_handed_back_as_it_is(url: str) -> None:
    assert refuse_secret_in_url("tiers.options.url", url) == url


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{SECRET}@host:6379",
        f"redis://:{SECRET}@host",
        f"redis://{SECRET}@",
        f"redis://{SECRET}@:6379",
        f"REDIS://user:{SECRET}@host",
        f"user:{SECRET}@host:6379",
        f":{SECRET}@host",
        f"//user:{SECRET}@host",
        f"redis://one:6379,user:{SECRET}@two:6379",
        f"redis://user:{SECRET}@[::1]:6379",
        f"redis://user:a@{SECRET}@host",
        f"redis://user:{SECRET}@host:no-port",
        "redis://user:correct/horse@host:6379",
        "redis://:correct?horse@host",
        "user:correct#horse@host",
        f"redis://host:6379/0?password={SECRET}",
        f"host:6379?db=0&pwd={SECRET}",
        f"http://host/metadata?a=1;X-Auth-Token={SECRET}",
        f"http://host/metadata?%70assword={SECRET}",
        f"http://host/metadata?a?API_KEY={SECRET}",
        f"http://host/metadata#access-key={SECRET}",
        f"https://host/o?X-Amz-Signature={SECRET}&X-Amz-Expires=60",
    ],
)
def test_a_url_with_a_secret_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="give password_env") as caught:
        refuse_secret_in_url("tiers.options.url", url)
    assert caught.value.setting == "tiers.options.url"
    for part in ("correct", "horse"):
        assert part not in f"{caught.value} {caught.value.value!r} {caught.value.args}"


@pytest.mark.parametrize("url", [f"redis://user:{SECRET}@[::1", "http://[host]:1/", f"[{SECRET}"])
def test_what_is_no_url_is_refused_by_the_name_of_its_setting(url: str) -> None:
    with pytest.raises(ConfigError, match="is no URL") as caught:
        refuse_secret_in_url("tiers.options.url", url)
    assert caught.value.setting == "tiers.options.url"
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__
