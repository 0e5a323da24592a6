"""kvtide's tiers under vLLM's own tiering: names, settings, whose bytes, and the page that tells of them."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from secondary_tiering import (
    MEMORY,
    Tiering,
    disk,
    keys_of,
    tierings,
)
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtide.errors import ConfigError
from kvtide.vllm.plugin import SECONDARY_MODULE, SECONDARY_TIERS, register
from kvtide.vllm.secondary_identity import vllm_config_behind
from kvtide.vllm.secondary_settings import SecondarySettings, settings_of


@pytest.fixture
def tiering() -> Iterator[Callable[..., Tiering]]:
    with tierings() as make:
        yield make


def test_every_name_leads_to_its_class_with_and_without_the_plug_in() -> None:
    register()
    for name, class_name in SECONDARY_TIERS.items():
        by_name = SecondaryTierFactory.get_tier_class({"type": name})
        by_path = SecondaryTierFactory.get_tier_class({"type": class_name, "module_path": SECONDARY_MODULE})
        assert by_name is by_path
        assert by_name.__name__ == class_name


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"type": "kvtide-disk", "limit": "1GiB"}, "folder"),
        ({"type": "kvtide-disk", "folder": "{tmp}", "limit": 0}, "limit"),
        ({"type": "kvtide-disk", "folder": "{tmp}", "threads": 0}, "kvtide-disk.threads = 0: give"),
        ({"type": "kvtide-disk", "folder": "{tmp}", "class": "a.B"}, "is for the type kvtide-tier"),
        ({"type": "kvtide-tier"}, "kvtide-tier.class"),
        ({"type": "kvtide-tier", "class": "no.such.Tier"}, "cannot be imported"),
        ({**MEMORY, "identity": ""}, "does not say which weights"),
        ({**MEMORY, "locality": "near"}, "give LOCAL or REMOTE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_setting_is_refused_by_name(entry: dict[str, Any], said: str, tmp_path: Path) -> None:
    register()
    filled = {name: str(tmp_path) if value == "{tmp}" else value for name, value in entry.items()}
    with pytest.raises(ConfigError, match=said):
        Tiering(filled)


def test_options_of_a_tier_are_not_shown_when_another_setting_is_wrong() -> None:
    register()
    with pytest.raises(ConfigError) as caught:
        Tiering({**MEMORY, "password": "hush", "threads": 0})
    assert "hush" not in str(caught.value)


def test_two_servers_on_one_folder_are_refused_by_name(
    tiering: Callable[..., Tiering], tmp_path: Path
) -> None:
    tiering(disk(tmp_path))
    with pytest.raises(ConfigError, match="another instance"):
        tiering(disk(tmp_path))


def test_replicas_of_one_server_have_folders_of_their_own_and_share_the_limit(
    tiering: Callable[..., Tiering], tmp_path: Path
) -> None:
    entry = disk(tmp_path, limit="128MiB")
    first, second = (tiering(entry, replica=index, replicas=2) for index in range(2))
    first.kept(keys_of(32, 4))
    assert second.load(keys_of(32, 4)) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["replica-0", "replica-1"]
    assert first.tier._state.capacity_bytes <= 64 << 20


def test_what_is_not_named_here_is_the_tier_s_own_option() -> None:
    given = {"path": "/mnt/kv", "url": "redis://there", "threads": 2}
    settings = settings_of("kvtide-directory", "directory", "REMOTE", given)
    assert settings.options == {"path": "/mnt/kv", "url": "redis://there"}
    assert (settings.class_path, settings.threads, settings.locality) == ("directory", 2, "REMOTE")


def test_the_configuration_is_the_one_that_the_settings_come_from() -> None:
    mine, others = (
        VllmConfig(
            kv_transfer_config=KVTransferConfig(
                kv_connector="OffloadingConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"cpu_bytes_to_use": 1},
            )
        )
        for _ in range(2)
    )
    spec = SimpleNamespace(extra_config=mine.kv_transfer_config.kv_connector_extra_config)

    def called_with(nearer: VllmConfig) -> VllmConfig | None:
        return vllm_config_behind(spec)

    def asks(further: VllmConfig, nearer: VllmConfig) -> VllmConfig | None:
        return called_with(nearer)

    found = asks(mine, others)
    assert found is mine
    del mine, found
    assert called_with(others) is None


# -- the page --------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "secondary.md").read_text()


def rows_of(first_column: str) -> list[list[str]]:
    lines = PAGE.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"| {first_column} |")) + 2
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]


def test_the_command_on_the_page_is_one_that_vllm_and_we_understand(tmp_path: Path) -> None:
    register()
    (command,) = re.findall(r"--kv-transfer-config '(.+?)'\n", PAGE, re.DOTALL)
    given = json.loads(command)
    KVTransferConfig(**given)
    extra = given["kv_connector_extra_config"]
    assert OffloadingSpecFactory.get_spec_cls(extra) is TieringOffloadingSpec
    assert TieringOffloadingSpec.build_metric_definitions(extra)
    (entry,) = extra["secondary_tiers"]
    Tiering({**entry, "folder": str(tmp_path)}).close()
    assert '"module_path": "kvtide.vllm.secondary"' in PAGE


def test_the_page_names_every_type_and_every_setting_with_its_default() -> None:
    assert {name: class_name for name, class_name, *_ in rows_of("`type`")} == SECONDARY_TIERS
    fields = dict(SecondarySettings.model_fields)
    del fields["class_path"]
    rows = rows_of("setting")
    assert [row[0] for row in rows] == list(fields)
    for name, shown, _ in rows:
        if name in ("identity", "locality"):
            continue
        (built,) = {getattr(SecondarySettings(**{"class": "a.B", "locality": "LOCAL", name: shown}), name)}
        assert built == fields[name].default
