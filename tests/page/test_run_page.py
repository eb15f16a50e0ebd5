"""The page of runs: small enough, and honest about what it leaves out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rollout_sched.page import run_page
from tests.page.runs import many, page_of, small
from tests.page.test_packed import unpacked


def data_of(page: bytes) -> Any:
    found = re.search(r'<script id="data" type="text/plain">([^<]*)</script>', page.decode())
    assert found is not None
    return unpacked(found[1])


def test_what_is_given_is_there() -> None:
    data = data_of(page_of(small(), small(policy="other"), verdict=["v"], about=["a"]))
    assert [policy["name"] for policy in data["policies"]] == ["fcfs", "other"]
    assert (data["verdict"], data["about"], data["note"]) == (["v"], ["a"], "")
    assert data["policies"][0]["record"]["spans"]["tokens"] == [20, 10, 30]


def test_it_is_small() -> None:
    assert len(page_of(many(10_000))) < 2**20


def test_too_many_attempts_are_thinned_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_page, "MAX_RECORDS", 500)
    data = data_of(page_of(many(1200)))
    assert len(data["policies"][0]["record"]["attempts"]["request"]) == 400
    assert "One request in 3 is drawn" in data["note"]


def test_a_prompt_s_name_cannot_end_the_script() -> None:
    page = page_of(small("</script><script>alert(1)</script>"))
    assert b"alert(1)" not in page
