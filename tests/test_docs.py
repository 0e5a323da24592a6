"""The tables in docs/ say what the classes say; how a name is put together is written here anew."""

from pathlib import Path

import pytest
from pydantic import ByteSize

from kvtide.config import KVTideConfig, hint_of
from kvtide.metrics import DEFINITIONS, SKIP_REASONS, Definition, Kind

DOCS = Path(__file__).parents[1] / "docs"
UNITS = {
    "blocks_per_chunk": "blocks",
    "store_threshold": "requests",
    "store_filter_entries": "chunks",
    "restore_interval": "tokens",
    "eviction_policy": "a name",
    "store_policy": "a name",
    "disk": "a folder",
    "copy_threads": "threads",
    "disk_threads": "threads",
    "disk_demotion": "a name",
    "disk_eviction_policy": "a name",
    "promotion_share": "a share",
    "tiers": "JSON",
    "record_trace": "a file",
}
SUFFIX = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: ""}


def table(page: str, first_column: str) -> list[dict[str, str]]:
    lines = (DOCS / page).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    columns = cells(lines[start])
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        assert len(cells(line)) == len(columns), line
        rows.append(dict(zip(columns, cells(line), strict=True)))
    return rows


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


SETTINGS = table("settings.md", "option")
METRICS = table("metrics.md", "name")


def test_every_setting_has_a_row_and_every_row_a_setting_in_the_same_order() -> None:
    assert [row["in `kv_connector_extra_config`"] for row in SETTINGS] == [
        f"`{name}`" for name in KVTideConfig.model_fields
    ]


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row["option"].strip("`"))
def test_a_row_says_what_the_class_says(row: dict[str, str]) -> None:
    name = row["in `kv_connector_extra_config`"].strip("`")
    field = KVTideConfig.model_fields[name]
    dashed = name.replace("_", "-")
    is_flag = field.annotation is bool
    assert row["option"] == (f"`--{dashed}`, `--no-{dashed}`" if is_flag else f"`--{dashed}`")
    assert row["environment"] == f"`KVTIDE_{name.upper()}`"
    assert row["meaning"] == field.description
    assert row["accepts"] == hint_of(name).removeprefix("give ")
    if field.annotation is ByteSize:
        assert row["unit"] == "bytes"
    elif is_flag:
        assert row["unit"] == "yes or no"
    else:
        assert row["unit"] == ("seconds" if name.endswith("_s") else UNITS[name])


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row["option"].strip("`"))
def test_a_documented_default_is_the_default(row: dict[str, str]) -> None:
    name = row["in `kv_connector_extra_config`"].strip("`")
    if KVTideConfig.model_fields[name].is_required():
        assert row["default"] == "none, required"
        return
    documented = {name: row["default"].strip("`")}
    if documented[name] == "none":
        assert not KVTideConfig.model_fields[name].default
        return
    assert getattr(KVTideConfig(**({"host_memory": "1GiB"} | documented)), name) == getattr(
        KVTideConfig(host_memory=ByteSize(1)), name
    )


def test_every_metric_has_a_row_and_every_row_a_metric_in_the_same_order() -> None:
    assert [row["name"] for row in METRICS] == [
        f"`vllm:kvtide_{one.name}{SUFFIX[one.kind]}`" for one in DEFINITIONS
    ]


@pytest.mark.parametrize(
    ("definition", "row"), list(zip(DEFINITIONS, METRICS, strict=False)), ids=[d.name for d in DEFINITIONS]
)
def test_a_metric_s_row_says_what_its_definition_says(definition: Definition, row: dict[str, str]) -> None:
    values = ", ".join(f"`{value}`" for value in definition.label_values)
    assert row["kind"] == definition.kind.value
    assert row["unit"] == definition.unit
    labels = ", ".join(f"`{name}`" for name in definition.label.split(",") if name)
    assert row["label"] == (": ".join(filter(None, (labels, values))) or "none")
    assert row["meaning"] == definition.help


def test_every_reason_for_not_storing_is_explained() -> None:
    assert [row["reason"] for row in table("metrics.md", "reason")] == [f"`{one}`" for one in SKIP_REASONS]


def test_every_metric_named_in_the_text_exists() -> None:
    known = {row["name"].strip("`") for row in METRICS}
    known |= {f"{name}{end}" for name in known for end in ("_sum", "_count", "_bucket")}
    words = (DOCS / "metrics.md").read_text().replace("`", " ").replace("(", " ").replace("{", " ").split()
    named = {word.split("[")[0].rstrip(",.;)") for word in words if word.startswith("vllm:kvtide_")}
    assert named - known == set()
    assert len(named) > len(DEFINITIONS) // 2


def test_units_stand_last_in_a_metric_s_name() -> None:
    for one in DEFINITIONS:
        if one.unit in ("bytes", "seconds", "tokens", "chunks", "errors"):
            assert one.name.endswith(one.unit), one.name
