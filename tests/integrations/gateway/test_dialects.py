"""Dialects: what an answer says is found in its bytes, and lies are the instance's fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout_sched.integrations.gateway import dialects
from rollout_sched.integrations.gateway.dialects import Part
from rollout_sched.live.ports import InstanceError
from tests.integrations.gateway.scripted import completion

DECOY = 'a text: "finish_reason":"abort", "completion_tokens": 99'


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_finish_and_tokens_are_found_whatever_the_text_says(separators: tuple[str, str]) -> None:
    answer = completion([1, 2, 3], "length")
    answer["choices"][0]["text"] = DECOY
    body = json.dumps(answer, separators=separators).encode()
    assert dialects.finish_of(body) == "length"
    assert dialects.tokens_of(body) == 3


@pytest.mark.parametrize("body", [b"", b"{}", b'{"choices":[{"finish_reason":null}]}'])
def test_an_answer_without_an_end_is_no_answer(body: bytes) -> None:
    with pytest.raises(InstanceError):
        dialects.finish_of(body)
    with pytest.raises(InstanceError):
        dialects.tokens_of(body)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[1]}'])
def test_what_is_no_answer_is_not_decoded(body: bytes) -> None:
    with pytest.raises(InstanceError):
        dialects.decode(body)


@pytest.mark.parametrize("ids", [None, "1,2", [1, "2"], [1.5], [True]])
def test_token_ids_that_are_none(ids: Any) -> None:
    assert dialects.part_of({"choices": [{"token_ids": ids}]}) is None


@pytest.mark.parametrize(
    ("spans", "read"),
    [
        ([{"version": "3", "start": 0, "end": 4}], ((3, 4),)),
        (
            [{"version": "3", "start": 0, "end": 4}, {"version": "4", "start": 4, "end": 5}],
            ((3, 4), (4, 1)),
        ),
        ([{"version": "default", "start": 0, "end": 4}], ()),
        ([{"start": 0}], ()),
        (None, ()),
        ([], ()),
    ],
)
def test_spans(spans: Any, read: Any) -> None:
    assert dialects.spans_of({"choices": [{"weight_versions": spans}]}) == read


def test_a_chat_goes_on_without_what_only_chat_knows() -> None:
    body = {
        "model": "m",
        "messages": [],
        "tools": [{}],
        "logprobs": True,
        "top_logprobs": 2,
        "temperature": 0.3,
        "made_up": 1,
    }
    fields = dialects.resume("chat", json.dumps(body).encode(), [1, 2], [Part([3])], 7, "v1")
    assert fields == {
        "model": "m",
        "temperature": 0.3,
        "made_up": 1,
        "logprobs": 2,
        "add_special_tokens": False,
        "prompt": [1, 2, 3],
        "max_tokens": 7,
        "n": 1,
        "cache_salt": "v1",
        "return_token_ids": True,
    }


def test_an_echo_is_not_repeated() -> None:
    fields = dialects.resume("completions", b'{"prompt":"a","echo":true}', [1], [], 7, "v1")
    assert "echo" not in fields


def test_joined_usage_counts_the_whole() -> None:
    parts = [Part([4, 5], "w4 w5 ", None, [1, 2, 3]), Part([6], "w6 ", None, [1, 2, 3, 4, 5])]
    joined = dialects.join("completions", parts, completion([6], "abort"), "length")
    assert joined["usage"]["total_tokens"] == 6
    assert joined["choices"][0]["finish_reason"] == "length"
    assert joined["choices"][0]["text"] == "w4 w5 w6 "
