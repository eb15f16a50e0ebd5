"""The page of a replay or a journal, opened from the disk."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from rollout_sched.page.run_page import DrawnRun
from tests.browser.conftest import Open, until
from tests.page.runs import folded, many, page_of, small

MAX_BYTES = 10 * 2**20
FIRST_PAINT_MS = 3000


def shown(page: Page, name: str, which: int = 0) -> float:
    """A figure that a timeline tells of what it has drawn."""
    return float(page.locator(".timeline").nth(which).get_attribute(f"data-{name}") or "nan")


def details(page: Page) -> str:
    return page.locator(".details").first.inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_it_is_drawn_whole_at_any_width(open_page: Open, width: int, scheme: str) -> None:
    page = open_page(
        page_of(small(), small(policy="other"), verdict=["Fastest: fcfs."], warnings=["few steps"]),
        width=width,
        scheme=scheme,
    )
    titles = page.locator("h2").all_inner_texts()
    assert titles == [
        "Answer",
        "Figures",
        "The fleet over time",
        "The tail",
        "Idle time and empty slots",
        "Staleness",
        "Length bias",
        "KV memory and queues over time",
    ]
    assert page.locator(".timeline").count() == 2
    assert page.locator(".plot canvas").count() == 2 * 6
    assert (shown(page, "spans"), shown(page, "drawn")) == (3, 3)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")


@pytest.mark.parametrize("width", [420, 1280])
def test_the_answer_is_a_chart_and_many_policies_are_drawn_only_in_part(
    open_page: Open, width: int
) -> None:
    names = [f"policy_{number} freshness.max_staleness={number}" for number in range(32)]
    points = [
        {"name": name, "frontier": n % 8 == 0, "speed": 1 + n / 8, "low": 1, "high": 2 + n / 8}
        | {"stale": n / 4, "said": [name]}
        for n, name in enumerate(names)
    ]
    rows = [{"name": name, "cells": ["1.00x"]} for name in names]
    columns = [{"label": "speed-up", "means": ""}]
    answer = {"columns": columns, "rows": rows, "points": points, "speed": "s", "axes": ["stale"]}
    runs = [small(policy=name) for name in names]
    command = "rollout-sched serve --policy x --instance=http://gpu-1:8000"
    made = ["rollout-sched replay t", "rollout_sched 1"]
    said = {"verdict": ["Fastest."], "answer": answer, "serve": command, "made": made}
    page = open_page(page_of(*runs, **said), width=width)
    assert page.locator("#answer tbody tr").count() == page.locator("#answer circle").count() == 32
    assert page.locator("#answer .interval").count() == 32
    assert page.locator(".command").all_text_contents() == [made[0], command]
    drawn = [box.is_checked() for box in page.get_by_role("checkbox").all()]
    assert [n for n, checked in enumerate(drawn) if checked] == [0, 8, 16, 24]
    assert page.locator(".timeline:visible").count() == 4
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_click_on_a_bar_shows_its_request(open_page: Open) -> None:
    page = open_page(page_of(small()))
    canvas = page.locator(".timeline")
    box = canvas.bounding_box()
    assert box is not None
    canvas.click(position={"x": box["width"] - 20, "y": 60})  # the first place, near the end
    said = details(page)
    for text in ("g/0", "i, place 1", "version\n4", "tokens\n30", "ended\nfinished"):
        assert text in said
    canvas.click(position={"x": 110 + (box["width"] - 110) * 0.6, "y": 250})  # the second place
    assert "g/1" in details(page)
    assert "4.0 s since it was submitted; places were free" in details(page)
    page.keyboard.press("Escape")
    assert details(page) == ""


def test_what_the_mouse_is_over_is_told(open_page: Open) -> None:
    page = open_page(page_of(small()))
    page.locator(".timeline").hover(position={"x": 400, "y": 60})
    expect(page.locator("#tooltip")).to_contain_text("request: g/0")
    page.mouse.move(2, 2)
    expect(page.locator("#tooltip")).to_be_hidden()


def test_keys_zoom_pan_and_walk(open_page: Open) -> None:
    page = open_page(page_of(small(), small(policy="other")))
    page.locator(".timeline").first.focus()
    assert (shown(page, "from"), shown(page, "to")) == (0, 10)
    page.keyboard.press("+")
    until(page, "document.querySelector('.timeline').dataset.from > 0")
    assert shown(page, "to") < 10
    assert shown(page, "from", 1) == shown(page, "from"), "they share an axis of time"
    before = shown(page, "from")
    page.keyboard.press("ArrowRight")
    until(page, f"document.querySelector('.timeline').dataset.from > {before}")
    page.keyboard.press("0")
    until(page, "document.querySelector('.timeline').dataset.from == 0")
    page.keyboard.press("n")
    assert "g/0" in details(page)
    assert "version\n3" in details(page)
    page.keyboard.press("n")
    assert "version\n4" in details(page)


def test_a_request_is_found_by_its_name(open_page: Open) -> None:
    page = open_page(page_of(small()))
    page.get_by_label("find").fill("g/1")
    page.keyboard.press("Enter")
    assert "g/1" in details(page)
    until(page, "document.querySelector('.timeline').dataset.from > 0")
    page.get_by_label("find").fill("nobody")
    page.keyboard.press("Enter")
    expect(page.locator("output")).to_have_text("no request or group of that name ran")


def test_a_policy_can_be_left_out(open_page: Open) -> None:
    page = open_page(page_of(small(), small(policy="other")))
    page.get_by_label("other", exact=True).uncheck()
    assert page.locator(".panel:visible").count() == page.locator(".panel").count() / 2


def test_a_name_cannot_break_out(open_page: Open) -> None:
    evil = "</script><img src=x onerror=document.title='broken'><b>&amp;"
    page = open_page(page_of(small(evil, evil, evil), verdict=[evil], warnings=[evil]))
    page.locator(".timeline").focus()
    page.keyboard.press("n")
    assert f"{evil}/0" in details(page)
    assert page.locator(".answer").inner_text() == evil
    assert page.locator("img").count() == 0
    assert page.title() == "a run"


def test_a_run_in_which_nothing_happened(open_page: Open) -> None:
    page = open_page(page_of(DrawnRun("idle", folded([]), [], {}, {}, {})))
    assert shown(page, "spans") == 0
    page.locator(".timeline").hover(position={"x": 400, "y": 60})
    page.locator(".timeline").focus()
    for key in ("n", "p", "o", "+", "Escape"):
        page.keyboard.press(key)


def test_a_hundred_thousand_requests(open_page: Open) -> None:
    whole = page_of(many(100_000))
    assert len(whole) < MAX_BYTES
    took_ms = []
    for _ in range(3):  # the fastest counts: others may be at work here
        page = open_page(whole)
        mark = "performance.getEntriesByName('drawn')[0].startTime"
        took_ms.append(page.evaluate(mark))
        assert shown(page, "spans") == 166_666
        assert 1000 < shown(page, "drawn") < 166_666, "thinned"
    print(f"{len(whole) / 2**20:.1f} MiB, drawn after {min(took_ms):.0f} ms")
    assert min(took_ms) < FIRST_PAINT_MS
