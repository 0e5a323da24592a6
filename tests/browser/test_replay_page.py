"""The page of a replay, opened in a real Chromium: what a reader sees, and what the page may not do."""

import functools
import itertools
import math
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from opened_page import Open, Opened
from playwright.sync_api import expect

from kvtide.sim.curves import curves_of
from kvtide.sim.page import write_page

CAPACITIES = ("0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.4")
# The Mooncake conversation trace, as an independent program replayed it.
PERCENT = {
    "lru": (4.58, 5.44, 8.01, 20.22, 28.82, 35.85, 37.55),
    "arc": (5.12, 6.71, 9.23, 21.55, 29.45, 33.32, 37.40),
    "s3fifo": (5.71, 7.77, 10.94, 19.15, 25.24, 33.92, 37.35),
    "second_sight": (5.54, 8.31, 14.29, 20.73, 22.14, 22.24, 22.26),
    "optimum": (18.50, 25.01, 32.06, 38.19, 38.19, 38.19, 38.19),
}
HITS = {
    name: {capacity: percent / 100 for capacity, percent in zip(CAPACITIES, row, strict=True)}
    for name, row in PERCENT.items()
}
FIGURES: dict[str, Any] = {
    "hit_ratio": HITS,
    "unbounded": 0.3819,
    "traces": ["conversation.jsonl.gz"],
    "requests": 12_031,
    "accesses": 276_491,
    "unique_blocks": 170_899,
    "block_bytes": 64 << 20,
    "writes_per_access": {
        "lru": dict(zip(CAPACITIES, (0.95, 0.95, 0.92, 0.8, 0.71, 0.64, 0.62), strict=True))
    },
    "ttft_s": {"lru": {capacity: {"p50": 0.3, "p95": 1.2} for capacity in CAPACITIES}},
    "command": "kvtide replay conversation.jsonl.gz --html page.html",
}
LINES = {"hits": len(PERCENT) + 1, "ttft": 2, "writes": 1}
DESK, PHONE = 1280, 390
SCREENS = list(itertools.product((DESK, PHONE), ("light", "dark")))
LEAST_CONTRAST = 4.5  # WCAG 2.1, level AA, for text of this size
HOSTILE = (
    '</script><script>alert(1)</script><img src="https://kvtide.invalid/x" onerror="alert(2)"><b>bold</b>'
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "page.html"
    write_page(file, curves_of(FIGURES))
    return file


@pytest.fixture(scope="module")
def at_screen(path: Path, opened: Open) -> Iterator[Callable[[int, str], Opened]]:
    """Open the page once on each screen, for all tests that leave it as it was: an opening takes a second."""
    with ExitStack() as pages:
        yield functools.cache(
            lambda width, scheme: pages.enter_context(opened(path, width, scheme, finger=width == PHONE))
        )


@pytest.fixture(params=SCREENS, ids=lambda screen: f"{screen[0]}-{screen[1]}")
def screen(
    at_screen: Callable[[int, str], Opened], request: pytest.FixtureRequest
) -> tuple[int, str, Opened]:
    return (*request.param, at_screen(*request.param))


@pytest.fixture
def desk(at_screen: Callable[[int, str], Opened]) -> Opened:
    return at_screen(DESK, "light")


def drawn(page: Opened, chart: str) -> list[list[tuple[float, float]]]:
    """Read from the picture where each curve's marks are, in pixels from the chart's upper left corner."""
    marks = page.page.eval_on_selector_all(
        f"#{chart} .scatterlayer .trace",
        "(all) => all.map((one) => [...one.querySelectorAll('.points path')].map((mark) => "
        "mark.getAttribute('transform')))",
    )
    return [[numbers(mark) for mark in trace] for trace in marks]


def numbers(transform: str) -> tuple[float, float]:
    x, y = re.findall(r"-?[\d.]+", transform)[:2]
    return float(x), float(y)


def within(box: dict[str, float], frame: dict[str, float]) -> bool:
    """To a pixel: glyphs have soft edges."""
    return (
        frame["x"] - 1 <= box["x"]
        and frame["y"] - 1 <= box["y"]
        and box["x"] + box["width"] <= frame["x"] + frame["width"] + 1
        and box["y"] + box["height"] <= frame["y"] + frame["height"] + 1
    )


def overlap(a: dict[str, float], b: dict[str, float]) -> bool:
    return (
        a["x"] < b["x"] + b["width"]
        and b["x"] < a["x"] + a["width"]
        and a["y"] < b["y"] + b["height"]
        and b["y"] < a["y"] + a["height"]
    )


def luminance(colour: str) -> float:
    most = 1 if colour.startswith("color(srgb") else 255
    parts = [float(part) / most for part in re.findall(r"[\d.]+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_it_opens_without_a_word_and_asks_the_network_for_nothing(screen: tuple[int, str, Opened]) -> None:
    width, scheme, page = screen
    assert [len(drawn(page, chart)) for chart in LINES] == list(LINES.values())
    assert page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    picture = page.keep_picture(f"replay-{width}-{scheme}.png")
    assert page.trouble == []
    assert page.requests == [page.address]
    assert struct.unpack(">I", picture.read_bytes()[16:20]) == (width,)


def test_every_curve_has_an_extent_and_its_marks_stand_where_the_figures_are(desk: Opened) -> None:
    assert desk.texts("#hits .xtitle") == ["capacity (% of unique blocks, log)"]
    assert desk.texts("#hits .ytitle") == ["block accesses that hit (%)"]
    for chart, count in LINES.items():
        lines = desk.boxes(f"#{chart} .scatterlayer path.js-line")
        assert len(lines) == count
        assert all(line["width"] > 600 for line in lines)
    curves = drawn(desk, "hits")
    # Both axes are straight: two marks fix each, all others have to agree.
    expected = [list(row) for row in PERCENT.values()] + [[38.19] * len(CAPACITIES)]
    (left, low), (right, _) = curves[0][0], curves[0][-1]
    high = curves[-1][0][1]
    places = [math.log(float(capacity)) for capacity in CAPACITIES]
    for marks, row in zip(curves, expected, strict=True):
        for (x, y), place, percent in zip(marks, places, row, strict=True):
            along = (place - places[0]) / (places[-1] - places[0])
            up = (percent - expected[0][0]) / (38.19 - expected[0][0])
            assert x == pytest.approx(left + along * (right - left), abs=0.1)
            assert y == pytest.approx(low + up * (high - low), abs=0.1)
    assert high < low - 200


def says_what_the_figures_say(page: Opened) -> None:
    assert page.texts("#hits-table tbody th") == [*PERCENT, "unbounded"]
    for index, row in enumerate([*PERCENT.values(), (38.19,) * len(CAPACITIES)], 1):
        said = page.texts(f"#hits-table tbody tr:nth-child({index}) td")
        assert said == [f"{percent:.2f} %" for percent in row]


def test_the_table_says_what_the_figures_say(desk: Opened) -> None:
    says_what_the_figures_say(desk)


def test_it_does_so_without_scripts_too(path: Path, opened: Open) -> None:
    with opened(path, scripts=False) as page:
        says_what_the_figures_say(page)
        assert "the tables have the same figures" in page.page.locator("noscript").inner_text()


def can_be_read(page: Opened, chart: str) -> None:
    paper = page.page.eval_on_selector(".scroll th", "(one) => getComputedStyle(one).backgroundColor")
    (frame,) = page.boxes(f"#{chart} .svg-container")
    for selector in (".xtitle", ".ytitle", ".xtick text", ".ytick text", ".legendtext"):
        found = page.boxes(f"#{chart} {selector}")
        assert found, selector
        assert all(within(box, frame) for box in found), (selector, found, frame)
        assert not any(itertools.starmap(overlap, itertools.combinations(found, 2))), (selector, found)
        styles = page.page.eval_on_selector_all(
            f"#{chart} {selector}",
            "(all) => all.map((one) => [getComputedStyle(one).fill, getComputedStyle(one).fontSize])",
        )
        for ink, size in styles:
            assert contrast(ink, paper) >= LEAST_CONTRAST, (selector, ink, paper)
            assert float(size.removesuffix("px")) >= 11, selector
    for ink in page.page.eval_on_selector_all(
        "td, th, p", "(all) => all.map((one) => getComputedStyle(one).color)"
    ):
        assert contrast(ink, paper) >= LEAST_CONTRAST, (ink, paper)


@pytest.mark.parametrize("chart", LINES)
def test_titles_names_and_labels_can_be_read(screen: tuple[int, str, Opened], chart: str) -> None:
    can_be_read(screen[2], chart)


def test_a_whole_server_is_drawn_over_its_host_memory(tmp_path: Path, opened: Open) -> None:
    sizes = {"16GiB": 16 << 30, "64GiB": 64 << 30, "256GiB": 256 << 30, "1TiB": 1 << 40}
    figures = {
        "hit_ratio": {name: dict.fromkeys(sizes, 0.1) for name in ("lru", "adaptive")},
        "memory_bytes": sizes,
        "ttft_s": {"lru": {size: {"p50": 0.2, "p95": 1.5} for size in sizes}},
        "written_per_day": {"lru": {size: {"host": 9e12, "disk": 2.5e12} for size in sizes}},
    }
    write_page(tmp_path / "page.html", curves_of(figures))
    with opened(tmp_path / "page.html") as page:
        for width in (DESK, PHONE):
            page.page.set_viewport_size({"width": width, "height": 900})
            for chart in ("hits", "ttft", "wear"):
                frame = page.page.locator(f"#{chart} .main-svg").first
                expect(frame).to_have_js_property("clientWidth", min(width, 62 * 16 + 32) - 32)
                assert len(drawn(page, chart)) == 2
                can_be_read(page, chart)
            assert page.texts("#hits .xtick text") == ["16 GiB", "64 GiB", "256 GiB", "1 TiB"]
            assert page.texts("#hits .xtitle") == ["host memory (log)"]
            assert page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            page.keep_picture(f"replay-serving-{width}.png")
        assert page.trouble == []


def test_pointing_at_a_capacity_shows_every_value_there(desk: Opened) -> None:
    (area,) = desk.boxes("#hits .nsewdrag")
    x, _ = drawn(desk, "hits")[0][3]
    desk.page.mouse.move(area["x"] + x, area["y"] + area["height"] / 2)
    desk.page.locator("#hits .hoverlayer .legendtext").first.wait_for()
    expected = {name: row[3] for name, row in PERCENT.items()} | {"unbounded": 38.19}
    assert sorted(desk.texts("#hits .hoverlayer .legendtext")) == sorted(
        f"{name} : {percent:.2f} %" for name, percent in expected.items()
    )
    assert desk.texts("#hits .hoverlayer .legendtitletext") == ["5 %534 GiB"]
    desk.page.mouse.move(0, 0)


def test_a_click_on_a_name_hides_its_curve_and_another_brings_it_back(desk: Opened) -> None:
    curves = desk.page.locator("#hits .scatterlayer .trace")
    for count in (LINES["hits"] - 1, LINES["hits"]):
        desk.page.locator("#hits .legendtoggle").nth(1).click()
        expect(curves).to_have_count(count)
    assert desk.trouble == []


def test_it_follows_the_screen_when_it_turns_dark_or_narrow(path: Path, opened: Open) -> None:
    ink = "(one) => getComputedStyle(one).fill"
    with opened(path) as page:
        in_light = page.page.eval_on_selector("#hits .xtitle", ink)
        assert page.page.locator("#hits .xtick text").count() == len(CAPACITIES)
        page.page.emulate_media(color_scheme="dark")
        page.page.set_viewport_size({"width": 390, "height": 900})
        expect(page.page.locator("#hits .xtick text")).to_have_count(4)
        assert luminance(page.page.eval_on_selector("#hits .xtitle", ink)) > 0.7 > luminance(in_light)
        assert page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_finger_on_a_chart_scrolls_the_page_and_a_mouse_zooms(screen: tuple[int, str, Opened]) -> None:
    width, _, page = screen
    mode = page.page.evaluate("document.querySelector('#hits .js-plotly-plot').layout.dragmode")
    assert mode == (False if width == PHONE else "zoom")


def test_names_are_shown_as_they_are_and_do_nothing(tmp_path: Path, opened: Open) -> None:
    rows = {"0.005": 0.1, "0.1": 0.2}
    figures = {
        "hit_ratio": {HOSTILE: rows, "<i>x</i>": rows, "optimum": rows},
        "ttft_s": {HOSTILE: {"0.1": {HOSTILE: 0.1}}},
        "traces": [HOSTILE],
        "command": HOSTILE,
        "unbounded": 0.4,
    }
    write_page(tmp_path / "page.html", curves_of(figures))
    with opened(tmp_path / "page.html") as page:
        assert page.texts("#hits .legendtext")[1] == "<i>x</i>"
        assert page.texts("#hits .legendtext")[0].startswith("</script><script>alert(1)")
        assert page.texts("#hits-table tbody th")[0] == HOSTILE
        assert page.page.locator("img").count() == 0
        assert page.trouble == []
        assert page.requests == [page.address]


def test_one_capacity_is_drawn_too(tmp_path: Path, opened: Open) -> None:
    only = {"hit_ratio": {"lru": {"0.1": 0.2}, "optimum": {"0.1": 0.3}}, "unbounded": 0.4}
    write_page(tmp_path / "page.html", curves_of(only))
    with opened(tmp_path / "page.html", 390) as page:
        marks = page.boxes("#hits .scatterlayer .points path")
        assert [mark["width"] > 4 for mark in marks] == [True] * 3
        assert page.texts("#hits .xtick text") == ["10 %"]
        assert page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.trouble == []
