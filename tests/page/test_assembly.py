"""One file, in which only our own scripts can run."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

import pytest

from rollout_sched.page.assembly import page, script

STARTS = ("report", "sweep", "live")
DECLARED = re.compile(r"^(?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)


@pytest.mark.parametrize("start", STARTS)
def test_a_script_is_whole_and_no_name_is_there_twice(start: str) -> None:
    text = script(start)
    assert not re.search(r"^(import|export) ", text, re.MULTILINE)
    names = DECLARED.findall(text)
    assert sorted(names) == sorted(set(names))
    assert "make" in names


@pytest.mark.parametrize("start", STARTS)
def test_only_our_scripts_run(start: str) -> None:
    text = page("t", start, {}).decode()
    scripts = re.findall(r"<script(?: type=\"module\")?>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 2
    for each in scripts:
        digest = base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in text
    assert "default-src 'none'" in text
    assert "unsafe-inline' " not in text.partition("style-src")[0]


def test_nothing_is_fetched() -> None:
    text = page("t", "report", {}).decode()
    assert not re.search(r"<(script|img|link|iframe)[^>]+(src|href)=", text)
    assert "connect-src" not in text
    assert "connect-src 'self'" in page("t", "live", {}, connects=True).decode()


def test_a_title_is_text() -> None:
    assert (
        "<title>&lt;/title&gt;&lt;script&gt;</title>" in page("</title><script>", "live").decode()
    )


def test_no_script_writes_markup() -> None:
    folder = files("rollout_sched.page") / "assets/js"
    for each in folder.iterdir():
        text = each.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, each.name
