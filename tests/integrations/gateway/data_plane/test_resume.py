"""Dialects: what an answer says is found in its bytes, and lies are the instance's fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout_sched.integrations.gateway.data_plane import resume as dialects
from rollout_sched.integrations.gateway.data_plane.resume import ResponsePart
from rollout_sched.live.ports import AnswerUntrue
from tests.integrations.gateway.scripted import completion


def test_an_answer_without_its_tokens_is_nothing_to_go_on_from() -> None:
    assert dialects.part_of("completions", {"choices": [{"token_ids": None}]}) is None


@pytest.mark.parametrize("place", ["answer", "choice"])
def test_an_empty_prompt_is_not_believed(place: str) -> None:
    """Else the response would go on without its prompt."""
    answer = completion([4], "abort")
    (answer if place == "answer" else answer["choices"][0])["prompt_token_ids"] = []
    part = dialects.part_of("completions", answer)
    assert part is not None
    assert part.prompt_ids is None


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize(
    "lie",
    [
        {"logprobs": {"tokens": 7, "token_logprobs": [1]}},
        {"logprobs": [7]},
        {"logprobs": "x"},
        {"prompt_token_ids": ["x"]},
        {"text": ["x"]},
    ],
)
def test_a_malformed_answer_cannot_be_joined(endpoint: Any, lie: dict[str, Any]) -> None:
    """It would be found out when nobody can make it elsewhere any more."""
    answer = completion([4], "abort")
    answer["choices"][0] |= lie
    with pytest.raises(AnswerUntrue):
        dialects.part_of(endpoint, answer)


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
    fields = dialects.resume(
        "chat", json.dumps(body).encode(), [1, 2], [ResponsePart([3])], 7, "v1"
    )
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


def test_fields_about_the_prompt_are_not_repeated() -> None:
    body = b'{"prompt":"a","prompt_logprobs":1,"truncate_prompt_tokens":9}'
    fields = dialects.resume("completions", body, [1], [ResponsePart([2])], 7, "v1")
    assert fields.keys().isdisjoint(("prompt_logprobs", "truncate_prompt_tokens"))


def test_joined_usage_counts_the_whole() -> None:
    parts = [
        ResponsePart([4, 5], "w4 w5 ", None, [1, 2, 3]),
        ResponsePart([6], "w6 ", None, [1, 2, 3, 4, 5]),
    ]
    joined = dialects.join("completions", parts, completion([6], "abort"), "length")
    assert joined["usage"]["total_tokens"] == 6
    assert joined["choices"][0]["finish_reason"] == "length"
    assert joined["choices"][0]["text"] == "w4 w5 w6 "


@pytest.mark.parametrize("endpoint", ["completions", "chat", "generate"])
def test_a_response_without_answers_is_empty(endpoint: Any) -> None:
    joined = dialects.join(endpoint, [], None, "length")
    (choice,) = joined["choices"]
    assert (choice["finish_reason"], choice["token_ids"]) == ("length", [])
    assert joined["usage"]["total_tokens"] == 0


def test_the_last_answer_may_not_know_why_the_whole_ended() -> None:
    for said, finish, told in [
        ("abort", "length", "length"),
        ("length", "stop", "stop"),
        ("tool_calls", "stop", "tool_calls"),
    ]:
        joined = dialects.join("completions", [ResponsePart([4])], completion([4], said), finish)
        assert joined["choices"][0]["finish_reason"] == told


def test_a_chat_keeps_its_id() -> None:
    last = {**completion([4], "abort"), "id": "chatcmpl-1"}
    assert dialects.join("chat", [ResponsePart([4])], last, "stop")["id"] == "chatcmpl-1"
