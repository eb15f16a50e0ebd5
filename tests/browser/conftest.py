"""A real browser without a window. It is the distribution's own, driven by playwright."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REMEDY = (
    "no Chromium is here: `apt-get install chromium` (Debian, Ubuntu), or say where one is by "
    "CHROMIUM=/path/of/it"
)

#: Milliseconds for what should be there at once, on a machine that is busy.
PATIENCE = 30_000


def chromium() -> str:
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.exit(REMEDY, returncode=2)
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Its sandbox cannot be set up by root, as CI runs; what is opened here is ours.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium(), args=flags)
        yield browser
        browser.close()


Open = Callable[..., Page]


def until(page: Page, expression: str) -> None:
    """Waits for what it says of the page. Playwright's own waiting is by `eval`, which our pages
    do not allow."""
    deadline = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(20)


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens a page, from bytes or an address; at the end none has said anything on its console,
    and none that came from a file has asked for anything else."""
    said: list[str] = []
    asked: list[str] = []
    contexts = []

    def opened(what: bytes | str, *, width: int = 1600, scheme: str = "light") -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        if isinstance(what, bytes):
            path = tmp_path / f"{len(contexts)}.html"
            path.write_bytes(what)
            page.on("request", lambda request: asked.append(request.url))
            page.goto(path.as_uri())
            until(page, "performance.getEntriesByName('drawn').length > 0")
            assert asked.pop(0) == path.as_uri()
        else:
            page.goto(what)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []
    assert asked == []
