"""A page in a browser: what is where, what it says, and all that happened while it was open."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from playwright.sync_api import Page

PICTURES = Path(__file__).parents[2] / "build" / "browser"
DONE_WITHIN_MS = 30_000


class Opened:
    """A page as a reader has it before them, and what went on meanwhile: ``trouble`` and ``requests``."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.address = address
        self.trouble: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.trouble.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.trouble.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (self.trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self.requests.append(request.url))
        page.set_default_timeout(DONE_WITHIN_MS)

    def boxes(self, selector: str) -> list[dict[str, float]]:
        """Say where things are, in pixels of the window: x, y, width, height."""
        return self.page.eval_on_selector_all(
            selector,
            "(all) => all.map((one) => { const box = one.getBoundingClientRect();"
            " return {x: box.x, y: box.y, width: box.width, height: box.height}; })",
        )

    def texts(self, selector: str) -> list[str]:
        return [said.replace("\u00a0", " ") for said in self.page.locator(selector).all_text_contents()]

    def keep_picture(self, name: str) -> Path:
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=PICTURES / name, full_page=True)
        return PICTURES / name


Open = Callable[..., AbstractContextManager[Opened]]
