"""Both spellings of a token in log-probs, and nothing else changed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout_sched.integrations.gateway.data_plane.answers import both_spellings


def sampled(token: int, *, by: str) -> dict[str, Any]:
    named = {"token_id": token} if by == "id" else {"token": f"token_id:{token}"}
    return {**named, "logprob": -0.5, "rank": 1, "top_logprobs": [{**named, "logprob": -0.5}]}


def answer(content: list[Any], **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": [5, 60], "logprobs": {"content": content}}
    return {"request_id": "x", "choices": [choice], **fields}


@pytest.mark.parametrize("separators", [(",", ":"), (" , ", " : ")])
@pytest.mark.parametrize("by", ["id", "name"])
def test_what_is_missing_is_written_beside_what_is_there(
    by: str, separators: tuple[str, str]
) -> None:
    said = answer([sampled(5, by=by), sampled(60, by=by)])
    told = json.loads(both_spellings(json.dumps(said, separators=separators).encode()))
    for token, item in zip([5, 60], told["choices"][0]["logprobs"]["content"], strict=True):
        for one in (item, *item["top_logprobs"]):
            assert (one.pop("token_id"), one.pop("token")) == (token, f"token_id:{token}")
    bare = answer([{"logprob": -0.5, "rank": 1, "top_logprobs": [{"logprob": -0.5}]}] * 2)
    assert told == bare


@pytest.mark.parametrize(
    "said",
    [
        answer([{**sampled(5, by="id"), **sampled(5, by="name")}]),
        answer([{"token": "five", "token_id": 5}]),
        answer([{"token": "five"}]),
        answer([{"token_id": None}]),
        {"choices": [{"token_ids": [5], "logprobs": None}]},
        {"choices": [], "usage": {"completion_tokens": 1}},
        {"text": 'it says "token_id":5 and "token":"token_id:5"'},
    ],
)
def test_what_has_both_or_none_stays_as_it_is(said: dict[str, Any]) -> None:
    raw = json.dumps(said, separators=(",", ":")).encode()
    assert both_spellings(raw) is raw


def test_events_of_a_stream_are_changed_each() -> None:
    events = [answer([sampled(5, by="id")]), answer([sampled(60, by="id")])]
    raw = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
    told = both_spellings(raw).split(b"\n\n")
    names = [
        json.loads(one[6:])["choices"][0]["logprobs"]["content"][0]["token"] for one in told[:2]
    ]
    assert (names, told[2]) == (["token_id:5", "token_id:60"], b"")
