"""Options of any tier: read, refused by name, and shown only where there can be no secret."""

import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ByteSize, Field, field_validator

from kvtide.errors import ConfigError
from kvtide.tiers.directory_options import DirectoryOptions
from kvtide.tiers.disk import DiskOptions
from kvtide.tiers.mooncake_options import MooncakeOptions
from kvtide.tiers.objects_options import ObjectsOptions
from kvtide.tiers.options import HIDDEN, TierOptions, need_client, option_error
from kvtide.tiers.valkey_options import ValkeyOptions

SECRET = "correcthorse"

ENOUGH: list[tuple[type[TierOptions], dict[str, Any]]] = [
    (DirectoryOptions, {"path": "/mnt/kv"}),
    (DiskOptions, {"folder": "/mnt/nvme"}),
    (MooncakeOptions, {"master": "127.0.0.1:50051"}),
    (ObjectsOptions, {"url": "s3://bucket"}),
    (ValkeyOptions, {"url": "redis://cache"}),
]
"""Each model that there is, with what has to be said at least."""


class ShelfOptions(TierOptions):
    """Of a tier that is not there."""

    HINTS: ClassVar[Mapping[str, str]] = {
        "shelf": "give the name of a shelf",
        "size": "give a size such as 4GiB",
        "password": "give password_env",
    }
    SHOWN = frozenset({"shelf", "size", "count"})

    shelf: str = Field(min_length=2)
    size: ByteSize = Field(default=ByteSize(7), ge=0)
    count: int = Field(default=0, le=9)
    key: ByteSize | None = None

    @field_validator("shelf")
    @classmethod
    def _is_low(cls, shelf: str) -> str:
        if shelf.startswith("high"):
            raise ValueError("is too high")
        return shelf


def refused(options: Mapping[str, Any], model: type[TierOptions] = ShelfOptions) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        model.read_from(options)
    assert caught.value.setting.startswith("tiers.options.")
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return caught.value


def test_what_will_do_is_read() -> None:
    options = ShelfOptions.read_from({"shelf": "low", "size": "4GiB"})
    assert (options.shelf, options.size) == ("low", 4 << 30)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "shelf = None: is needed: give the name of a shelf"),
        ({"shelf": "high up"}, "shelf = 'high up': give the name of a shelf (is too high)"),
        (
            {"shelf": "low", "colour": 1},
            "colour = '…': there is no such option: there are shelf, size, count, key",
        ),
        # Of two, the one that explains the other.
        ({"shelv": "low"}, "shelv = '…': there is no such option: there are shelf, size, count, key"),
        ({"shelf": "low", "password": SECRET}, "password = '…': there is no such option: give password_env"),
        ({"shelf": "low", SECRET[:7] * 20: 1}, f"{(SECRET[:7] * 20)[:40]} = '…': there is no such option"),
        ({"shelf": "low", 7: 1}, "7 = '…': there is no such option"),
    ],
)
def test_an_option_that_will_not_do_is_named_with_what_would(options: dict[str, Any], text: str) -> None:
    assert str(refused(options)).startswith(f"tiers.options.{text}")


def test_without_a_hint_the_reason_is_said_unless_it_may_quote_what_is_not_shown() -> None:
    assert "less than or equal to 9" in str(refused({"shelf": "low", "count": 10}))
    error = refused({"shelf": "low", "key": f"1 {SECRET}"})
    assert (error.value, error.hint) == (HIDDEN, "will not do")


@pytest.mark.parametrize("value", [-1, "many", "1 XiB", 1.5e300])
def test_a_value_that_can_be_no_secret_is_shown(value: object) -> None:
    assert refused({"shelf": "low", "size": value}).value == value


@pytest.mark.parametrize(
    "value",
    [
        f"joe:{SECRET}@host",
        f"1 {SECRET}@host",
        [SECRET],
        {"password": SECRET},
        SECRET.encode(),
        f"{SECRET} {'x' * 80}",
        f"http://host?password={SECRET}",
    ],
)
def test_a_value_that_looks_as_if_it_were_one_is_not(value: object) -> None:
    assert refused({"shelf": "low", "size": value}).value == HIDDEN


@pytest.mark.parametrize(("model", "enough"), ENOUGH)
def test_no_tier_shows_what_may_be_a_secret(model: type[TierOptions], enough: dict[str, Any]) -> None:
    model.read_from(enough)
    for name in (*model.model_fields, "no_such"):
        error = refused({**enough, name: {"secret": SECRET}}, model)
        assert (error.setting, error.value) == (f"tiers.options.{name}", HIDDEN)
        assert error.hint
    for name in {*model.model_fields} - model.SHOWN:
        assert refused({**enough, name: [SECRET]}, model).value == HIDDEN
    assert {*model.model_fields} >= model.SHOWN
    assert not model.SHOWN & {"url", "endpoint", "metadata", "username", "password_env"}


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=200)


@given(
    name=st.sampled_from(["shelf", "size", "key", "other"]),
    value=PLAIN | st.lists(PLAIN, max_size=2) | st.dictionaries(st.text(max_size=9), PLAIN, max_size=2),
)
def test_whatever_a_settings_file_can_hold_is_read_or_refused_in_few_words(name: str, value: Any) -> None:
    try:
        ShelfOptions.read_from({"shelf": "low", name: value})
    except ConfigError as error:
        said = error
    else:
        return
    assert said.setting == f"tiers.options.{name}"
    assert len(str(said)) < 300


def test_an_error_of_an_option_shows_what_it_is_given() -> None:
    assert str(option_error("path", "/x", "is gone")) == "tiers.options.path = '/x': is gone"


# -- what a tier needs beside -------------------------------------------------------------------------------


def test_a_client_that_is_there_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shelf_client.py").write_text("raise AssertionError('it was loaded')")
    monkeypatch.syspath_prepend(tmp_path)
    need_client("shelf", "shelf_client", "the client")
    assert "shelf_client" not in sys.modules


def test_a_client_that_is_not_there_is_said_with_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match=r"shelf.*needs the client, which is not here: .*'kvtide\[shelf\]'"):
        need_client("shelf", "no_such_client", "the client")


@pytest.mark.parametrize("content", ["import no_such_library", "raise ImportError('libfoo.so.1')"])
def test_a_client_whose_package_cannot_be_loaded_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    (tmp_path / "broken_client").mkdir()
    (tmp_path / "broken_client" / "__init__.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be had \(.*(no_such_library|libfoo)"):
        need_client("shelf", "broken_client.part", "the client")
