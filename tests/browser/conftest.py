"""A real Chromium. Where there is none, the tests fail: a page that nobody opened has shown nothing."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opened_page import Open, Opened
from playwright.sync_api import Browser, sync_playwright


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("no chromium here: make browser installs it")
    # Chromium refuses to sandbox what root started, and CI is root.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=sandbox)
        yield started
        started.close()


@pytest.fixture(scope="session")
def opened(browser: Browser) -> Open:
    """Open a file: ``with opened(path, width=390, scheme="dark") as page``."""

    @contextmanager
    def open_file(
        path: Path, width: int = 1280, scheme: str = "light", scripts: bool = True, finger: bool = False
    ) -> Iterator[Opened]:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            java_script_enabled=scripts,
            has_touch=finger,
            is_mobile=finger,
            offline=True,
        )
        found = Opened(context.new_page(), path.as_uri())
        found.page.goto(found.address)
        yield found
        context.close()

    return open_file
