"""The page of a replay: what its text says, without a browser (tests/browser opens it in one)."""

import re
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import ConfigError
from kvtide.sim import charts
from kvtide.sim.curves import Curves, curves_of
from kvtide.sim.page import headline, write_page
from kvtide.sim.serving_curves import figures_of_serving

HITS = {
    "lru": {"0.005": 0.0458, "0.1": 0.2882, "0.02": 0.0801},
    "arc": {"0.005": 0.0512, "0.02": 0.0923, "0.1": 0.2945},
    "optimum": {"0.005": 0.185, "0.02": 0.3206, "0.1": 0.3819},
}
FIGURES: dict[str, Any] = {"hit_ratio": HITS, "unbounded": 0.3819}
HOSTILE = '</script><script>alert(1)</script><img src=x onerror=alert(2)>"&\u2028'


class Reader(HTMLParser):
    """Reads tables by id, all text that is shown, and which tags there are."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.shown: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self._rows: list[list[str]] = []
        self._within: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        if tag == "table":
            self._rows = self.tables.setdefault(dict(attrs)["id"] or "", [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("th", "td"):
            self._rows[-1].append("")
        if tag not in ("meta", "img", "br"):
            self._within.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._within.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._within and self._within[-1] in ("script", "style"):
            return
        self.shown.append(data)
        if {"th", "td"} & set(self._within):
            self._rows[-1][-1] += data.replace("\u00a0", " ")


def read(folder: Path, figures: Mapping[str, object]) -> Reader:
    write_page(folder / "page.html", curves_of(figures))
    reader = Reader()
    reader.feed((folder / "page.html").read_text(encoding="utf-8"))
    reader.close()
    return reader


def test_the_table_has_the_figures_by_growing_capacity(tmp_path: Path) -> None:
    assert read(tmp_path, FIGURES).tables["hits-table"] == [
        ["capacity", "0.5 %", "2 %", "10 %"],
        ["lru", "4.58 %", "8.01 %", "28.82 %"],
        ["arc", "5.12 %", "9.23 %", "29.45 %"],
        ["optimum", "18.50 %", "32.06 %", "38.19 %"],
        ["unbounded", "38.19 %", "38.19 %", "38.19 %"],
    ]


def test_a_capacity_is_said_in_bytes_and_blocks_where_they_are_known(tmp_path: Path) -> None:
    known = FIGURES | {"unique_blocks": 170_899, "block_bytes": 1 << 20}
    heads = read(tmp_path, known).tables["hits-table"][:3]
    assert heads == [
        ["capacity", "0.5 %", "2 %", "10 %"],
        ["memory", "854 MiB", "3.34 GiB", "16.7 GiB"],
        ["blocks", "854", "3,417", "17,089"],
    ]


def test_what_was_replayed_is_named_without_its_folder_and_never_at_length(tmp_path: Path) -> None:
    many = [f"/home/somebody/week/{day}.jsonl" for day in range(1004)]
    said = "".join(read(tmp_path, FIGURES | {"traces": many, "requests": 12_031}).shown)
    assert "0.jsonl · 1.jsonl · 2.jsonl · 1,001 files more · 12,031 requests" in said
    assert "somebody" not in said


def test_blocks_are_counted_as_a_person_would() -> None:
    curves = curves_of({"hit_ratio": {"lru": {"0.29": 0.1}}, "unbounded": 0.1, "unique_blocks": 100})
    assert curves.blocks_at("0.29") == 29


SERVED = {
    "traces": ["day.jsonl"],
    "results": {
        size: {
            policy: {
                "request_count": 100,
                "prompt_blocks": 900,
                "block_hit_ratio": ratio,
                "ttft_s": {"p50": 0.5 - ratio, "p95": 1.0, "p99": 2.0, "mean": 0.6},
                "written_bytes_per_day": {"host": 3e12, "disk": 1.5e12},
            }
            for policy in ("lru", "arc")
        }
        for size, ratio in (("64GiB", 0.25), ("8GiB", 0.125))
    },
}


def test_a_whole_server_is_shown_over_its_host_memory(tmp_path: Path) -> None:
    found = read(tmp_path, figures_of_serving(SERVED))
    assert found.tables["hits-table"] == [
        ["memory", "8 GiB", "64 GiB"],
        ["lru", "12.50 %", "25.00 %"],
        ["arc", "12.50 %", "25.00 %"],
    ]
    assert found.tables["ttft-table"][1:3] == [["lru p50", "0.375", "0.250"], ["lru p95", "1.000", "1.000"]]
    assert found.tables["wear-table"][3:] == [
        ["arc host", "3,000.0", "3,000.0"],
        ["arc disk", "1,500.0", "1,500.0"],
    ]
    said = "".join(found.shown).replace("\u00a0", " ")
    assert "day.jsonl · 100 requests · 900 blocks asked for" in said
    assert "The best that was tried hits 25.00 %: lru, with 64 GiB." in said
    assert "unbounded" not in said.lower()


def test_times_and_writes_have_tables_of_their_own_and_what_is_missing_is_a_dash(tmp_path: Path) -> None:
    more = {
        "ttft_s": {"lru": {"0.02": {"p50": 0.25, "p95": 1.5}}, "arc": {"0.005": {"p50": 0.125}}},
        "writes_per_access": {"lru": {"0.005": 0.95, "0.02": 0.9}},
    }
    tables = read(tmp_path, FIGURES | more).tables
    assert tables["ttft-table"][1:] == [
        ["lru p50", "-", "0.250", "-"],
        ["lru p95", "-", "1.500", "-"],
        ["arc p50", "0.125", "-", "-"],
        ["arc p95", "-", "-", "-"],
    ]
    assert tables["writes-table"][1:] == [["lru", "0.950", "0.900", "-"]]


def test_names_are_text_wherever_they_come_from(tmp_path: Path) -> None:
    clean = read(tmp_path, FIGURES | {"traces": ["t"], "command": "c"})
    rows = {"0.005": 0.1, "0.1": 0.2}
    hostile = {
        "hit_ratio": {HOSTILE: rows, "optimum": rows},
        "writes_per_access": {HOSTILE: rows},
        "ttft_s": {HOSTILE: {"0.1": {HOSTILE: 0.1}}},
        "traces": [HOSTILE.replace("/", ""), "half a letter \udc80"],
        "command": HOSTILE,
        "unbounded": 0.4,
    }
    found = read(tmp_path, hostile)
    assert found.tags.count("img") == clean.tags.count("img") == 0
    # Two charts more, a script each: none of them came out of a name.
    assert found.tags.count("script") == clean.tags.count("script") + 2
    assert found.tables["hits-table"][1][0] == HOSTILE
    assert "half a letter ?" in "".join(found.shown)
    assert HOSTILE.replace("/", "") in "".join(found.shown)
    assert found.shown.count(HOSTILE) >= 3


def test_nothing_is_loaded(tmp_path: Path) -> None:
    found = read(tmp_path, FIGURES)
    assert found.addresses == []
    assert "link" not in found.tags
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert re.search(r'Content-Security-Policy" content="default-src \'none\';', page)


@pytest.mark.parametrize(
    ("unbounded", "said"),
    [
        (0.32, "Nine tenths of that take 10 % of its memory with arc."),
        (0.9, "The best that was tried hits 29.45 %: arc, with 10 % of its memory."),
    ],
)
def test_the_headline_says_how_much_memory_is_enough(unbounded: float, said: str) -> None:
    found = headline(curves_of(FIGURES | {"unbounded": unbounded})).replace("\u00a0", " ")
    assert (
        found == f"A cache that forgets nothing hits {100 * unbounded:.2f} % of the blocks asked for. {said}"
    )


@pytest.mark.parametrize(
    "figures",
    [
        {"hit_ratio": {"optimum": {"0.1": 0.5}}, "unbounded": 0.5},
        {"hit_ratio": {"lru": {"0.1": 0.0}}, "unbounded": 0.0},
    ],
)
def test_an_optimum_alone_is_no_advice_and_nothing_to_hit_neither(figures: dict[str, object]) -> None:
    assert headline(curves_of(figures)).endswith("of the blocks asked for.")


@pytest.mark.parametrize(
    ("figures", "named"),
    [
        ({}, "hit_ratio"),
        ({"hit_ratio": {}, "unbounded": 0.1}, "hit_ratio"),
        ({"hit_ratio": {"lru": {}}, "unbounded": 0.1}, "no policy has a figure"),
        (FIGURES | {"memory_bytes": {"1GiB": 1 << 30}}, "capacity '0.005' is not among memory_bytes"),
        (FIGURES | {"memory_bytes": {"0.005": 0}}, "memory_bytes.0.005 = 0"),
        (FIGURES | {"unbounded": 1.01}, "unbounded = 1.01"),
        (FIGURES | {"unbounded": True}, "unbounded = True"),
        ({"hit_ratio": {"lru": {"0.1": float("nan")}}, "unbounded": 0.1}, "hit_ratio.lru.0.1 = nan"),
        ({"hit_ratio": {"lru": {"0.1": "0.1"}}, "unbounded": 0.1}, "hit_ratio.lru.0.1 = '0.1'"),
        *(
            ({"hit_ratio": {"lru": {capacity: 0.1}}, "unbounded": 0.1}, f"and {capacity!r} is not")
            for capacity in ("0", "-1", "nan", "snan", "inf", "1e9", "1e-999", "", "5%")
        ),
        (FIGURES | {"unique_blocks": -1}, "unique_blocks = -1"),
        (FIGURES | {"unique_blocks": 1 << 63}, "unique_blocks = 9223372036854775808"),
        (FIGURES | {"ttft_s": {"lru": {"0.1": {"p50": -1.0}}}}, "ttft_s.lru.0.1.p50 = -1.0"),
        ([], "figures"),
    ],
)
def test_figures_that_cannot_be_are_refused_by_name(figures: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        curves_of(figures)


def test_what_a_later_version_says_is_ignored() -> None:
    assert curves_of(FIGURES | {"colour_of_the_cache": "blue"}) == curves_of(FIGURES)


def test_capacities_are_ordered_by_size_however_they_are_spelt() -> None:
    spelt = dict.fromkeys(["1e-1", "0.05", "2", "0.005"], 0.1)
    assert curves_of({"hit_ratio": {"lru": spelt}, "unbounded": 0.1}).capacities == (
        "0.005", "0.05", "1e-1", "2",
    )  # fmt: skip


def many_capacities(count: int) -> Curves:
    spelt = {f"{0.001 * 1.1**i:.6f}": 0.1 for i in range(count)}
    return curves_of({"hit_ratio": {"lru": spelt}, "unbounded": 0.1, "unique_blocks": 1, "block_bytes": 1})


@pytest.mark.parametrize("count", [1, 2, 3, 7, 60])
def test_labels_of_capacities_find_room_and_the_ends_are_among_them(count: int) -> None:
    curves = many_capacities(count)
    axis = charts.hits(curves).layout.xaxis
    assert axis.tickvals[0] == pytest.approx(100 * float(curves.capacities[0]))
    assert axis.tickvals[-1] == pytest.approx(100 * float(curves.capacities[-1]))
    assert len(axis.tickvals) <= min(count, 13)
    assert len(axis.ticktext) == len(axis.tickvals) == len(set(axis.tickvals))


@pytest.mark.parametrize(
    ("size_bytes", "written"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1 KiB"), (69_939 << 20, "68.3 GiB"), (1 << 70, "1,048,576 PiB")],
)
def test_a_size_is_written_in_three_digits_or_its_whole_part(size_bytes: int, written: str) -> None:
    assert charts.size_label(size_bytes).replace("\u00a0", " ") == written


def test_a_policy_keeps_its_colour_from_page_to_page() -> None:
    both = curves_of(FIGURES | {"hit_ratio": {"arc": {"0.1": 0.1}, "mine": {"0.1": 0.2}}})
    assert charts.colour_of(both, "arc") == charts.colour_of(curves_of(FIGURES), "arc")
    assert charts.colour_of(both, "mine") not in charts.COLOURS.values()


def test_without_plotly_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvtide\[replay\]'"):
        write_page(tmp_path / "page.html", curves_of(FIGURES))
    assert list(tmp_path.iterdir()) == []
