"""Debian's Chromium for tests of the web page, driven by Playwright, and what such tests look at.

Nothing is downloaded: `./run test-doors` installs the package `chromium`. Where it is absent the tests fail,
with the words that say so.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",  # tests may run as root, for whom there is none
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_MS = 30_000
PICTURES = "PENSTOCK_PICTURES"  # names a folder: tests leave their pictures of the page there


def chromium() -> str:
    """Return the browser's program. Fails the test where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.fail("the web page is tested in Chromium, and there is none: apt-get install chromium")
    return found


@contextmanager
def started_browser() -> Iterator[Any]:
    """Start a browser of one's own, and end it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A tab of the page, and what it has complained of. Use as a context manager.

    Args:
        url: of the server.
        options: of the browser's context.
    """

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}} | options)
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def __enter__(self) -> Visit:
        self.page.goto(self.url + "/")
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def await_text(self, selector: str, text: str) -> None:
        """Wait until an element has a text in it."""
        self.await_true(f"document.querySelector({selector!r}).textContent.includes({text!r})")

    def await_true(self, expression: str) -> None:
        """Wait until JavaScript that the page's own policy allows is true."""
        self.page.wait_for_function(f"() => {expression}")

    def picture(self, name: str, *, whole: bool = False) -> None:
        """Take a picture of what is seen, or of the whole page, where pictures are wanted."""
        folder = os.environ.get(PICTURES)
        if folder:
            self.page.screenshot(path=Path(folder) / f"{name}.png", full_page=whole)

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)
