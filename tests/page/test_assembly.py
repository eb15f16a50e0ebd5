"""One file, in which only our own scripts can run."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

from rollout_sched.page.assembly import packed, page, script

STARTS = ("report", "live")
DECLARED = re.compile(r"^(?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)


@pytest.mark.parametrize("start", STARTS)
def test_scripts_define_each_name_once(start: str) -> None:
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


NUMPY = {"Uint8Array": "u1", "Uint32Array": "<u4", "Float32Array": "<f4"}


def unpacked(text: str) -> Any:
    raw = gzip.decompress(base64.b64decode(text))
    length = int.from_bytes(raw[:4], "little")
    head = json.loads(raw[4 : 4 + length])
    columns = [
        np.frombuffer(raw, NUMPY[each["type"]], each["length"], 4 + length + each["offset"])
        for each in head["columns"]
    ]

    def restored(tree: Any) -> Any:
        if isinstance(tree, dict):
            if "$" in tree:
                return columns[tree["$"]].tolist()
            return {key: restored(value) for key, value in tree.items()}
        return [restored(value) for value in tree] if isinstance(tree, list) else tree

    return restored(head["data"])


def test_columns_round_trip() -> None:
    data = {
        "a": np.array([1, 2, 3], "u1"),
        "list": [{"b": np.array([2**32 - 1], "u4")}, {"c": [1.5, "x"]}],
        "d": np.array([0.5, -1.0], "f4"),
        "none": None,
    }
    assert unpacked(packed(data)) == {
        "a": [1, 2, 3],
        "list": [{"b": [2**32 - 1]}, {"c": [1.5, "x"]}],
        "d": [0.5, -1.0],
        "none": None,
    }


def test_a_column_begins_where_a_browser_can_read_it() -> None:
    raw = gzip.decompress(
        base64.b64decode(packed([{"a": np.zeros(3, "u1"), "b": np.ones(2, "f4")}]))
    )
    length = int.from_bytes(raw[:4], "little")
    assert length % 4 == 0
    assert all(each["offset"] % 4 == 0 for each in json.loads(raw[4 : 4 + length])["columns"])


def test_the_same_data_is_the_same_text_and_no_markup() -> None:
    text = packed({"evil": "</script><script>"})
    assert text == packed({"evil": "</script><script>"})
    assert "<" not in text
