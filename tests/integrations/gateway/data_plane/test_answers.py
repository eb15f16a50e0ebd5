"""Answers are believed as a whole or not at all; whose they are is in their id."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock, patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.integrations.gateway.data_plane import answers
from rollout_sched.integrations.gateway.data_plane.answers import (
    both_spellings,
    read_answer,
    read_event,
    read_object,
)
from rollout_sched.live.ports import AnswerUntrue, InstanceError, WeightsUnknown
from tests.integrations.gateway.scripted import chunk, completion
from tests.native import answer_scan

DECOY = 'a text: "finish_reason":"abort", "completion_tokens": 99'


def told(**changes: Any) -> bytes:
    """An answer of two tokens with fields of it, its choice or its usage changed."""
    answer = completion([1, 2])
    (choice,), usage = answer["choices"], answer["usage"]
    for name, value in changes.items():
        holder = answer if name in answer else usage if name in usage else choice
        holder[name] = value
    return json.dumps(answer).encode()


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_finish_and_tokens_are_found_whatever_the_text_says(separators: tuple[str, str]) -> None:
    answer = completion([1, 2, 3], "length")
    answer["choices"][0]["text"] = DECOY
    whole = read_answer(json.dumps(answer, separators=separators).encode(), "completions")
    assert (whole.tokens, whole.finish, whole.spans, whole.id) == (3, "length", (), "cmpl-1")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        told()[:-1],
        told() + b"}",
        told(text="?").replace(b'"?"', b'"\xff"'),
        told(object="?").replace(b'"?"', b'"\xff"'),
        told(object="?").replace(b'"?"', b"[" * 100_000 + b"]" * 100_000),
        told(choices=[]),
        told(choices=None),
        told(choices=[1]),
        told(choices=[{"finish_reason": "stop", "text": ""}] * 2),
        told(finish_reason=None),
        told(finish_reason=7),
        told(finish_reason="error"),
        told(text=None),
        told(text=7),
        told(usage=None),
        told(completion_tokens=None),
        told(completion_tokens=-2),
        told(completion_tokens=2.5),
        told(completion_tokens="2"),
        told(completion_tokens=3),
        told(completion_tokens=3 * 10**12),  # more than there is memory for
        told(token_ids=[1]),
        told(token_ids=[], completion_tokens=1),
        told(token_ids=["1", "2"]),
        told(token_ids=[1.0, 2.0]),
        told(token_ids=[[1], 2]),
        told(token_ids={"1": 2}),
        told(token_ids=[True, 2]),
        told(id=7),
    ],
    ids=lambda body: f"{body[-40:]!r}" if len(body) < 1000 else "deep",
)
def test_truncated_answers_are_refused(body: bytes) -> None:
    with pytest.raises(InstanceError):
        read_answer(body, "completions")


def test_other_writing_and_other_alphabets_are_as_good() -> None:
    spaced = told(text="½ 字").replace(b"[1, 2]", b"[ 1 ,\n 2 ]")
    assert read_answer(spaced, "completions").tokens == 2
    raw = json.dumps(completion([1, 2]), ensure_ascii=False).replace("w1", "字").encode()
    assert read_answer(raw, "completions").tokens == 2
    assert read_answer(told(token_ids=[], completion_tokens=0), "completions").tokens == 0
    assert read_answer(told(token_ids=None), "completions").tokens == 2


#: Fields of a message that no client expects.
WRONG = [
    (field, value)
    for field in ("content", "reasoning", "reasoning_content", "tool_calls")
    for value in (5, True, {"a": 1}, "text" if field == "tool_calls" else ["text"])
]


@pytest.mark.parametrize("above", [0.01, 5, 1e300])
@pytest.mark.parametrize(
    "logprobs",
    [
        {"content": [{"logprob": -1.5}, {"logprob": None}]},
        {"content": [{"logprob": -1.5, "top_logprobs": [{"logprob": None}]}]},
        {"token_logprobs": [-1.5, None]},
        {"token_logprobs": [-1.5], "top_logprobs": [{"a": -1.5, "b": None}]},
    ],
)
def test_no_probability_is_above_one(logprobs: Any, above: float) -> None:
    """Another `None` is one of the prompt's first token."""
    text = json.dumps({"choices": [{"logprobs": logprobs}]})
    likely = json.loads(text.replace("null", "0.0"))["choices"][0]
    lying = json.loads(text.replace("null", str(above)))["choices"][0]
    assert read_answer(told(**likely), "completions").tokens == 2
    assert read_event(json.dumps({"choices": [likely]}).encode()).choices
    with pytest.raises(AnswerUntrue):
        read_answer(told(**lying), "completions")
    with pytest.raises(AnswerUntrue):
        read_event(json.dumps({"choices": [lying]}).encode())


#: Items of a list of log-probs as vLLM writes them, as others may, and such as are none.
PLAIN = ["-1.5", "-0.0", "0.0", "null", "-1.19e-07", "-9999.0", "-12", "-1.5 "]
ODD = ["0", "1e-4", "-1E-3", "-1e2", "0.00", " -1.5"]
NO_LOGPROBS = ["5", "0.01", "1.0", "-1e39", "-1E39", "-1e400", '"-1"', '",n"', "[]", "[-1]", "{}"]


@given(st.lists(st.sampled_from([*PLAIN * 3, *ODD, *NO_LOGPROBS]), max_size=4))
def test_log_probs_are_refused_if_their_decoding_fails_and_decoded_only_if_odd(
    items: list[str],
) -> None:
    body = told(logprobs={"token_logprobs": "?"}).replace(b'"?"', f"[{','.join(items)}]".encode())
    with patch.object(answers, "_token_logprobs", Mock(wraps=answers._token_logprobs)) as decoder:
        if any(item in NO_LOGPROBS for item in items):
            with pytest.raises(AnswerUntrue):
                read_answer(body, "completions")
        else:
            assert read_answer(body, "completions").tokens == 2
    assert decoder.decode.called == (not items or any(item not in PLAIN for item in items))


def test_each_endpoint_has_its_shape() -> None:
    chat = told(message={"role": "assistant", "content": None, "tool_calls": [{}]})
    assert read_answer(chat, "chat").tokens == 2
    assert read_answer(told(), "generate").tokens == 2
    with pytest.raises(AnswerUntrue, match="'message' is missing"):
        read_answer(told(), "chat")
    for field, value in WRONG:
        with pytest.raises(AnswerUntrue, match="'message' is missing or has the wrong type"):
            read_answer(told(message={"role": "assistant", field: value}), "chat")
        with pytest.raises(AnswerUntrue, match="delta has fields of the wrong type"):
            read_event(json.dumps({"choices": [{"delta": {field: value}}]}).encode())
    with pytest.raises(AnswerUntrue, match="'token_ids' is missing"):
        read_answer(told(token_ids=None), "generate")


@pytest.mark.parametrize(
    ("spans", "read"),
    [
        ([{"version": "3", "start": 0, "end": 2}], ((3, 2),)),
        (
            [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
            ((3, 1), (4, 1)),
        ),
        ([{"version": "default", "start": 0, "end": 2}], ()),
        (None, ()),
        ([], ()),
    ],
)
def test_version_spans_are_read(spans: Any, read: Any) -> None:
    assert read_answer(told(weight_versions=spans), "generate").spans == read


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "3", "start": 0, "end": 3}],
        [{"version": "3", "start": 1, "end": 2}],
        [{"version": 3, "start": 0, "end": 2}],
        [{"start": 0}],
        "3",
    ],
)
def test_spans_that_do_not_cover_the_tokens_cannot_be_true(spans: Any) -> None:
    """By the same rule as the trainer's answers."""
    with pytest.raises(AnswerUntrue):
        read_answer(told(weight_versions=spans), "generate")


def test_the_label_of_a_start_is_not_believed_where_we_label_the_tokens() -> None:
    body = told(weight_versions=[{"version": "default", "start": 0, "end": 2}])
    with pytest.raises(WeightsUnknown):
        read_answer(body, "generate", labelled=True)
    assert read_answer(told(), "generate", labelled=True).spans == ()  # it says nothing


@pytest.mark.parametrize(
    "event",
    [
        b"",
        b"7",
        b"[]",
        b"null",
        b'{"choices":',
        b'{"choices":{}}',
        b'{"choices":[null]}',
        b'{"choices":[{"finish_reason":1}]}',
        b'{"choices":[{"finish_reason":"error"}]}',
        b'{"choices":[{},{}]}',
        b'{"choices":[{"text":[]}]}',
        b'{"choices":[{"delta":"x"}]}',
        b'{"usage":7}',
        b'{"usage":{"prompt_tokens":"x"}}',
        b'{"id":7}',
        b'{"x":"\xff"}',
        b'{ "error" : { "message" : "it died" } }',
        b'{"id":"a","error":"it died"}',
    ],
)
def test_malformed_events_are_refused(event: bytes) -> None:
    with pytest.raises(InstanceError):
        read_event(event)


@pytest.mark.parametrize("ids", [["1"], [1.5], 7, "1,2", [[1]], [-1]])
def test_malformed_token_ids_are_refused(ids: Any) -> None:
    event = {"choices": [{"token_ids": ids, "finish_reason": None}]}
    (choice,) = read_event(msgspec.json.encode(event)).choices or ()
    with pytest.raises(InstanceError):
        print(choice.ids)


def test_an_event_yields_tokens_and_finish_reason() -> None:
    (choice,) = read_event(json.dumps(chunk([4, 5])).encode()).choices or ()
    assert (choice.ids, choice.speaks, choice.finish_reason) == (b"4,5", True, None)
    opening = {"choices": [{"delta": {"role": "assistant", "content": ""}}], "error": None}
    (choice,) = read_event(json.dumps(opening).encode()).choices or ()
    assert (choice.ids, choice.speaks) == (b"", False)
    for nothing in (b'{"choices":null}', b'{"choices":[]}', b"{}"):
        assert not read_event(nothing).choices


def test_only_an_object_is_an_object() -> None:
    assert read_object(b'{"a":1}') == {"a": 1}
    for other in (b"", b"[]", b"7", b'{"a":"\xff"}'):
        with pytest.raises(AnswerUntrue):
            read_object(other)


def sampled(token: int, *, by: str) -> dict[str, Any]:
    named = {"token_id": token} if by == "id" else {"token": f"token_id:{token}"}
    return {**named, "logprob": -0.5, "rank": 1, "top_logprobs": [{**named, "logprob": -0.5}]}


def answer(content: list[Any], **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": [5, 60], "logprobs": {"content": content}}
    return {"request_id": "x", "choices": [choice], **fields}


@pytest.mark.parametrize("separators", [(",", ":"), (" , ", " : ")])
@pytest.mark.parametrize("by", ["id", "name"])
def test_missing_fields_are_added_beside_present_ones(by: str, separators: tuple[str, str]) -> None:
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
def test_answers_with_both_fields_or_none_stay_unchanged(said: dict[str, Any]) -> None:
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


LOGPROBS = [None, -0.25, 0.0, -1.5e-07, -9999.0] + [-0.0123456789 * each for each in range(1, 200)]
LISTED = [{"token": "a", "logprob": each, "bytes": [97]} for each in LOGPROBS[1:]]


@pytest.mark.parametrize(
    ("endpoint", "changes"),
    [
        ("completions", {"logprobs": {"token_logprobs": LOGPROBS, "top_logprobs": [None]}}),
        ("completions", {"logprobs": {"token_logprobs": None, "top_logprobs": [{"a": -1.0}]}}),
        ("completions", {"weight_versions": [{"version": "7", "start": 0, "end": 2}]}),
        ("chat", {"message": {"role": "assistant", "content": "x", "tool_calls": []}}),
        ("chat", {"message": {"content": None}, "logprobs": {"content": LISTED}}),
        ("generate", {"logprobs": {"content": [{**LISTED[0], "top_logprobs": LISTED}]}}),
    ],
)
def test_what_vllm_writes_is_read_by_the_scanner(endpoint: Any, changes: dict[str, Any]) -> None:
    body = json.dumps(json.loads(told(**changes)), separators=(",", ":")).encode()
    scanned = answer_scan().scan(body)
    assert scanned is not None
    told_by_both = answers.from_scan(scanned, endpoint, labelled=False)
    assert told_by_both == answers.read_by_msgspec(body, endpoint)


@pytest.mark.parametrize("item", ["1", "0.5", "-01", "-1.2.3", "-1e5", "--1", "-", "NaN", "-.5"])
@pytest.mark.parametrize("place", [0, 1, 62, 63, 64, 65, 127, 128, 129])
def test_what_the_scanner_does_not_know_is_left_to_msgspec(item: str, place: int) -> None:
    """At each place of the blocks in which it reads."""
    numbers = ["-1"] * 100
    numbers[place // 3] = "-" + "1" * (place % 3 + 1)  # shifts what follows
    numbers[place // 3 + 1] = item
    logprobs = f'{{"token_logprobs":[{",".join(numbers)}]}}'
    body = b'{"usage":{"completion_tokens":0},"choices":[{"finish_reason":"stop","logprobs":%b}]}'
    assert answer_scan().scan(body % logprobs.encode()) is None
    numbers[place // 3 + 1] = "-0.1"
    logprobs = f'{{"token_logprobs":[{",".join(numbers)}]}}'
    assert answer_scan().scan(body % logprobs.encode()) is not None
