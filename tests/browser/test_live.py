"""The live page, at `/` of a gateway at work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from rollout_sched.page.live_page import live_page
from tests.browser.conftest import PATIENCE, until
from tests.browser.live_world import KEY, live_world
from tests.top.made_up import instance, said

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
        expect(page.locator(".product")).to_contain_text("rollout_sched")
        expect(page.locator(".figure")).to_have_count(6)
        until(page, "document.querySelectorAll('.figure polyline').length === 6")
        titles = page.locator("h2").all_inner_texts()
        assert titles[0] == "The fleet over time"
        assert titles[-1] == "Latest changes"
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
        expect(page.locator("#step")).to_contain_text("of 4 groups whole")
    page.close()
    assert not any(KEY in url for url in asked[1:])


def shown(browser: Browser, *documents: dict[str, object], width: int = 1280) -> Page:
    """The page of a gateway that has said this."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.set_default_timeout(PATIENCE)
    told = "".join(f"event: state\ndata: {json.dumps(each)}\n\n" for each in documents)
    page.route("http://gateway/", lambda route: route.fulfill(body=live_page()))
    answer = {"content_type": "text/event-stream", "body": told}
    page.route("http://gateway/admin/live", lambda route: route.fulfill(**answer))
    page.goto(f"http://gateway/#key={KEY}")
    until(page, f"{UPDATES} >= {len(documents)}")
    return page


def look(now: float, **changes: object) -> dict[str, object]:
    one = instance(1, generated_tokens=round(100 * now), draft_acceptance=None)
    spent = {"busy": 8 * now, "idle": 1.5 * now, "updating": 0.5 * now}
    stream = {"anew": now == 0, "attempts": []}
    return said(now=now, instances=[one], instance_s=spent, **stream, **changes)


def test_the_figures_are_of_what_the_gateway_says(browser: Browser) -> None:
    page = shown(browser, *(look(36.0 * n) for n in range(11)))
    values = page.locator(".figure .value").all_inner_texts()
    assert values == ["100", "20 %", "381 of 512", "12", "100 %", "0.20"]
    assert page.locator(".figure .about").nth(2).inner_text().endswith("t50 235 s, t99 1,200 s")
    page.close()


def test_what_is_not_known_is_not_said(browser: Browser) -> None:
    page = shown(browser, look(0.0, steps=[], staleness={}, groups={}, trainer_waiting=False))
    assert page.locator(".figure .value").all_inner_texts() == ["\u2013"] * 5 + ["0.00"]
    assert page.locator(".figure polyline").count() == 0
    expect(page.locator("#step p").first).to_contain_text("no trainer asks for a batch now")
    page.close()


def test_more_groups_than_a_batch_has_are_for_later(browser: Browser) -> None:
    step = {"number": 3, "elapsed_s": 2.0, "finished": 9, "in_batch": 0, "complete": 530}
    last = said()["steps"][-1] | {"t50_s": None, "t90_s": None, "t99_s": None}
    page = shown(browser, look(0.0, step=step, steps=[last]), width=420)
    expect(page.locator("#step p").first).to_contain_text(
        "512 of 512 groups whole and 18 for later"
    )
    assert page.locator(".figure .value").nth(2).inner_text() == "0 of 512"
    assert page.locator("#step td").all_inner_texts()[1:4] == ["-"] * 3
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    page.close()


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
