"""The live page holds nothing until somebody signs in."""

from __future__ import annotations

from rollout_sched.page.live_page import live_page
from tests.page.test_run_page import data_of


def test_it_has_the_words_and_no_data() -> None:
    page = live_page()
    assert set(data_of(page)) == {"words"}
    assert b"connect-src 'self'" in page


def test_the_key_is_never_in_an_address() -> None:
    page = live_page().decode()
    assert "localStorage" not in page
    assert "EventSource" not in page.replace("because EventSource cannot", "")
    assert "Authorization: `Bearer ${key}`" in page
