"""Options of the Mooncake tier: what they default to, and what is said about a wrong one."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import ConfigError
from kvtide.testing.tiers import IDENTITY
from kvtide.tiers.base import TierPlace
from kvtide.tiers.mooncake import MooncakeTier
from kvtide.tiers.mooncake_client import DEFAULT_VARIABLES
from kvtide.tiers.mooncake_options import MooncakeOptions
from kvtide.tiers.named import SHORT_NAMES, check_tier, tier_named

MASTER = "127.0.0.1:50051"


def test_a_master_is_enough() -> None:
    options = MooncakeOptions.read_from({"master": MASTER})
    assert options.model_dump() == {
        "master": MASTER,
        "metadata": "P2PHANDSHAKE",
        "local_hostname": "",
        "segment": 0,
        "buffer": 256 << 20,
        "protocol": "tcp",
        "device": "",
    }


def test_sizes_are_written_as_everywhere() -> None:
    options = MooncakeOptions.read_from(
        {"master": "store.example:50051", "segment": "4GiB", "buffer": 1 << 20}
    )
    assert (options.segment, options.buffer) == (4 << 30, 1 << 20)


@pytest.mark.parametrize(
    "master", ["10.0.0.7:1", "[::1]:65535", "[fe80::1%eth0]:50051", "master-0.store_a:7"]
)
def test_masters_that_will_do(master: str) -> None:
    assert MooncakeOptions.read_from({"master": master}).master == master


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("master", None),
        ("master", "127.0.0.1"),
        ("master", ":50051"),
        ("master", "127.0.0.1:0"),
        ("master", "127.0.0.1:65536"),
        ("master", "http://127.0.0.1:50051"),
        ("master", "127.0.0.1:50051\n"),
        ("metadata", "127.0.0.1:2379"),
        ("local_hostname", "a b"),
        ("segment", -1),
        ("segment", "plenty"),
        ("buffer", 0),
        ("buffer", "1TiB"),
        ("protocol", "udp"),
        ("device", "mlx5_0;"),
        ("masters", MASTER),
    ],
)
def test_an_option_that_will_not_do_is_named(field: str, value: Any) -> None:
    options = {"master": MASTER, field: value}
    with pytest.raises(ConfigError, match=rf"^tiers\.options\.{field} = ") as raised:
        MooncakeOptions.read_from(options)
    assert raised.value.hint


def test_without_a_master_it_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"^tiers\.options\.master = None: is needed: give host:port"):
        MooncakeOptions.read_from({})


@pytest.mark.parametrize(
    "wrong",
    [
        {"password": "hunter2"},
        {"master": "joe:hunter2@store:50051"},
        {"metadata": "redis://joe:hunter2@store:6379"},
        {"metadata": "http://joe:hunter2@store:8080/metadata"},
        {"metadata": "http://store:8080/metadata?user=joe&password=hunter2"},
    ],
)
def test_a_secret_is_refused_and_not_repeated(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as raised:
        MooncakeOptions.read_from({"master": MASTER, **wrong})
    assert "hunter2" not in str(raised.value)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.delitem(sys.modules, "mooncake.store", raising=False)
    place = TierPlace(IDENTITY, 0, 0, {"master": MASTER})
    with pytest.raises(ConfigError, match=r"pip install 'kvtide\[mooncake\]'"):
        tier_named("mooncake", place)
    with pytest.raises(ConfigError, match=r"pip install 'kvtide\[mooncake\]'"):
        check_tier("mooncake", "mooncake", 0, {"master": MASTER})
    with pytest.raises(ConfigError, match=r"tiers\.options\.protocol"):
        MooncakeTier.build(TierPlace(IDENTITY, 0, 0, {"master": MASTER, "protocol": "udp"}))


def test_the_documentation_names_every_option_and_what_the_library_is_told() -> None:
    text = (Path(__file__).parents[2] / "docs" / "mooncake.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (?:`([^`]+)`|.*?) \|", text, re.MULTILINE)
    fields = MooncakeOptions.model_fields
    assert [name for name, _ in rows] == list(fields)
    for name, default in rows:
        if default:
            assert MooncakeOptions.read_from({"master": MASTER, name: default}) == MooncakeOptions.read_from(
                {"master": MASTER}
            )
    for variable, value in DEFAULT_VARIABLES.items():
        assert f"`{variable}={value}`" in text


def test_the_example_of_the_documentation_is_read() -> None:
    text = (Path(__file__).parents[2] / "docs" / "mooncake.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    [entry] = json.loads(example)["tiers"]
    assert SHORT_NAMES[entry["class"]].endswith(".MooncakeTier")
    assert MooncakeOptions.read_from(entry["options"]).master == MASTER
