"""The page of a sweep."""

from __future__ import annotations

from playwright.sync_api import expect

from rollout_sched.simulators.replay.sweep import sweep_page
from tests.browser.conftest import Open
from tests.simulators.replay.test_sweep import sweep


def test_a_point_for_each_replay_that_tells_its_name(open_page: Open) -> None:
    page = open_page(sweep_page(sweep()))
    assert page.locator("#answer tbody tr").count() == 4
    assert page.locator("svg").count() >= 2
    assert page.locator("svg").first.locator("circle").count() == 4
    assert page.locator("circle[fill='#d55e00']").count() % 4 == 0
    page.locator("circle").first.focus()
    expect(page.locator("#tooltip")).to_contain_text("tokens/s: ")


def test_it_fits_a_telephone(open_page: Open) -> None:
    page = open_page(sweep_page(sweep()), width=400, scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
