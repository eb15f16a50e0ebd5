"""The live page, at `/` of a gateway at work."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import PATIENCE, until
from tests.browser.live_world import KEY, live_world

DRAWN = "Number(document.querySelector('.timeline').dataset.spans)"

UPDATES = "Number(document.getElementById('page').dataset.updates)"


def signed_in(page: Page, key: str) -> None:
    page.get_by_label("administrator").fill(key)
    page.keyboard.press("Enter")


@pytest.mark.parametrize(("width", "scheme"), [(1600, "light"), (400, "dark")])
def test_who_has_the_key_sees_the_run_move(
    browser: Browser, tmp_path: Path, width: int, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    failed: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    with live_world(tmp_path) as world:
        page.goto(world.url + "/")
        signed_in(page, "no key")
        expect(page.get_by_role("alert")).to_contain_text("administrator's key")
        signed_in(page, KEY)
        expect(page.locator("#instances tbody tr")).to_have_count(2)
        until(page, f"{DRAWN} > 0")
        before = page.evaluate(DRAWN)
        until(page, f"{DRAWN} > {before}")
        expect(page.locator("#changes")).to_contain_text("delivered")
        expect(page.locator("#step tbody tr").first).to_contain_text("16")
        assert page.locator("#waste tbody tr").count() > 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        world.lose_one()
        expect(page.locator("#instances tbody tr")).to_have_count(1)
        assert page.evaluate("sessionStorage.length") == 1
        page.get_by_role("button", name="sign out").click()
        page.get_by_label("administrator").wait_for()
        assert page.evaluate("sessionStorage.length") == 0
    context.close()
    assert failed == []
    assert not any(KEY in url for url in asked)


def test_the_key_after_the_address_opens_it(browser: Browser, tmp_path: Path) -> None:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    with live_world(tmp_path) as world:
        page.goto(f"{world.url}/#key={KEY}")
        expect(page.locator("#instances tbody tr")).to_have_count(2)
        assert page.evaluate("location.hash") == "", "nor is it left in the history"
        expect(page.locator("#step")).to_contain_text("groups are whole, 4 make a batch")
    page.close()
    assert not any(KEY in url for url in asked[1:])


def test_who_is_cut_off_comes_back(browser: Browser, tmp_path: Path) -> None:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    said = page.locator("p.error")
    with live_world(tmp_path) as world:
        page.goto(world.url + "/")
        signed_in(page, KEY)
        page.locator(".timeline").wait_for()
        port = int(world.url.rpartition(":")[2])
    expect(said).not_to_be_empty()
    before = page.evaluate(UPDATES)
    with live_world(tmp_path, port):
        expect(said).to_be_empty()
        until(page, f"{UPDATES} > {before}")
        page.close()
