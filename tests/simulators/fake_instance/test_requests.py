"""How requests are understood."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request

from rollout_sched.live.ports import Order, Output
from rollout_sched.simulators.fake_instance import tokens as text
from rollout_sched.simulators.fake_instance.requests import (
    Function,
    Message,
    OfFunction,
    Refusal,
    RequestLimits,
    call_text,
    called,
    decode,
    demanded,
    flag,
    output_limit,
    prompt_text,
    prompts_of,
    reply,
    siblings,
    versions,
)
from rollout_sched.simulators.fake_instance.tokens import Vocabulary
from tests.simulators.fake_instance.served import served

LIMITS = RequestLimits("m", 100, 1)


def test_prompts_are_texts_or_ids_or_lists_of_such() -> None:
    assert prompts_of("w1 w2") == [[1, 2]]
    assert prompts_of([1, 2]) == [[1, 2]]
    assert prompts_of([[1], [2, 3]]) == [[1], [2, 3]]
    assert prompts_of(["w1", [2]]) == [[1], [2]]
    with pytest.raises(Refusal, match="list of such"):
        prompts_of([1, [2]])


def test_a_next_turn_begins_with_the_last_one() -> None:
    hello = Message("user", "Hello")
    first = text.encode(prompt_text([hello]))
    answer = text.decode([text.LARGEST.first_name, text.LARGEST.first_word])
    turn = text.encode(prompt_text([hello, Message("assistant", answer), Message("user", None)]))
    assert turn[: len(first) + 2] == [*first, text.LARGEST.first_name, text.LARGEST.first_word]


def test_an_output_limit_is_clamped_or_refused() -> None:
    assert output_limit(LIMITS, [1] * 90, None, clamp=False) == 10
    assert output_limit(LIMITS, [1] * 90, 5, clamp=False) == 5
    assert output_limit(LIMITS, [1] * 90, 50, clamp=True) == 10
    for max_tokens, clamp in ((50, False), (0, True), ("5", True)):
        with pytest.raises(Refusal):
            output_limit(LIMITS, [1] * 90, max_tokens, clamp=clamp)
    with pytest.raises(Refusal):
        output_limit(LIMITS, [1] * 100, None, clamp=True)


def test_seeds_of_siblings_count_up() -> None:
    order = Order("a", [1], 5, "s", {"seed": 7, "logprobs": 0})
    made = siblings(order, 2)
    assert [one.sampling for one in made] == [
        {"seed": 7, "logprobs": 0},
        {"seed": 8, "logprobs": 0},
    ]
    assert made[0] == order
    unseeded = Order("a", [1], 5, "s", {})
    assert siblings(unseeded, 2) == [unseeded, unseeded]


def test_spans_follow_each_other_under_their_labels():
    output = Output([1, 2, 3], None, "stop", ((4, 2), (5, 1)))
    assert versions(output, lambda version: f"v{version}") == [
        {"version": "v4", "start": 0, "end": 2},
        {"version": "v5", "start": 2, "end": 3},
    ]


PATH = "/v1/chat/completions"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TOOLS = [OfFunction(Function("add")), OfFunction(Function("look"))]
SUM = 'Please call add {"a": 1, "b": 2} and then call look {"at":"it"}.'
ANSWERED = Message("tool", "3")


def user(text: str) -> Message:
    return Message("user", text)


def test_a_message_says_which_calls_and_gets_one_after_the_other() -> None:
    conversation = [Message("system", "Help."), user(SUM)]
    first = demanded(conversation, TOOLS, "auto")
    assert first == Function("add", '{"a": 1, "b": 2}')
    conversation += [Message("assistant", None, [OfFunction(first)]), ANSWERED]
    second = demanded(conversation, TOOLS, None)
    assert second == Function("look", '{"at": "it"}')
    conversation += [Message("assistant", None, [OfFunction(second)]), ANSWERED]
    assert demanded(conversation, TOOLS, None) is None
    assert called(conversation) == [first, second]
    assert demanded([*conversation, user("Thanks.")], TOOLS, None) is None


@pytest.mark.parametrize(
    ("choice", "call"),
    [
        ("required", Function("add")),
        (OfFunction(Function("look")), Function("look")),
        ("auto", None),
        ("none", None),
        (None, None),
    ],
)
def test_a_choice_may_demand_a_call_that_no_message_says(choice: Any, call: Any) -> None:
    assert demanded([user("Hello")], TOOLS, choice) == call


@pytest.mark.parametrize(
    ("text", "tools"),
    [(SUM, []), ("call sub {}", TOOLS), ("call add {1}", TOOLS), ("recall add {}", TOOLS)],
)
def test_nothing_else_is_a_call(text: str, tools: list[OfFunction]) -> None:
    assert demanded([user(text)], tools, None) is None


def test_the_words_of_a_call_are_part_of_its_message() -> None:
    call = Function("add", '{"a": 1}')
    parts = [{"type": "text", "text": "I"}, {"type": "text", "text": "will"}]
    message = Message("assistant", parts, [OfFunction(call)])
    assert message.text == f"I will {call_text(call)}"


@pytest.mark.parametrize("vocabulary", [Vocabulary(), Vocabulary.of_size(512)])
async def test_a_conversation_with_a_tool(vocabulary: Vocabulary) -> None:
    async with served(vocabulary=vocabulary) as client:
        messages: list[Any] = [{"role": "user", "content": SUM}]
        body = {"messages": messages, "tools": [ADD, LOOK], "max_tokens": 40}
        body |= {"return_token_ids": True, "logprobs": True}
        for name in ("add", "look"):
            _, answer = await client.post(PATH, body)
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "tool_calls"
            message = choice["message"]
            assert message["content"] is None
            (call,) = message["tool_calls"]
            assert (call["type"], call["function"]["name"]) == ("function", name)
            made = len(choice["token_ids"])
            assert made == len(choice["logprobs"]["content"])
            assert made == answer["usage"]["completion_tokens"]
            before = answer["prompt_token_ids"] + choice["token_ids"]
            messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
            _, told = await client.post("/tokenize", {"messages": messages})
            assert told["tokens"][: len(before)] == before
        _, answer = await client.post(PATH, body)
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")
        assert answer["choices"][0]["message"]["content"]


async def test_a_call_is_streamed_by_name_and_arguments() -> None:
    async with served(stream_interval=1) as client:
        body = {"messages": [{"role": "user", "content": SUM}], "tools": [ADD]}
        events = await client.stream(PATH, body)
        role, *rest = [event["choices"][0] for event in events]
        assert role["delta"] == {"role": "assistant", "content": ""}
        calls = [c for one in rest for c in one["delta"].get("tool_calls", ())]
        assert {call["index"] for call in calls} == {0}
        assert [c["function"]["name"] for c in calls if "name" in c["function"]] == ["add"]
        arguments = "".join(call["function"]["arguments"] for call in calls)
        assert json.loads(arguments) == {"a": 1, "b": 2}
        assert calls[0]["id"]
        assert rest[-1]["finish_reason"] == "tool_calls"


async def test_a_call_that_does_not_fit_is_text() -> None:
    async with served() as client:
        body = {"messages": [{"role": "user", "content": SUM}], "tools": [ADD]}
        _, answer = await client.post(PATH, {**body, "max_tokens": 2})
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"].keys() == {"role", "content"}


async def test_a_response_by_ids_resumes_anywhere() -> None:
    async with served() as client:
        ids = [[7, 8, 9, 10], [7, 8, 11]]
        sampling = {"extra_args": {"fake_response_ids": ids}, "max_tokens": 50}
        prompt = [1, 2, 3]
        for made in range(4):
            context = prompt + ids[0][:made]
            choice = await client.generate(context, sampling=sampling)
            assert (choice["token_ids"], choice["finish_reason"]) == (ids[0][made:], "stop")
        second = await client.generate([*prompt, *ids[0], 4], sampling=sampling)
        assert second["token_ids"] == ids[1]
        drawn = await client.generate([*prompt, *ids[0], 4, *ids[1], 5], sampling=sampling)
        assert drawn["token_ids"][0] > 1000
        bad = {"extra_args": {"fake_response_ids": [7]}}
        body = {"token_ids": prompt, "sampling_params": bad}
        status, told = await client.post("/inference/v1/generate", body)
        assert status == 400
        assert "fake_response_ids" in msgspec.json.encode(told).decode()


# ------------------------------------------------------------------------------------------
# What is read of a call.


@pytest.mark.parametrize(
    ("query", "meant"), [("", True), ("?x=False", False), ("?x=1", True), ("?x=0", False)]
)
def test_a_flag(query: str, meant: bool) -> None:
    assert flag(make_mocked_request("POST", f"/pause{query}"), "x", True) is meant


def test_an_unknown_flag_is_refused_by_name() -> None:
    with pytest.raises(Refusal, match="x must be true or false, got 'perhaps'") as refused:
        flag(make_mocked_request("POST", "/pause?x=perhaps"), "x", True)
    assert (refused.value.status, refused.value.param) == (400, "x")


def test_a_body_of_another_shape_is_the_callers_fault() -> None:
    with pytest.raises(Refusal) as refused:
        decode(b'["x"]', dict[str, int])
    assert refused.value.status == 400


def test_a_reply_is_json() -> None:
    response = reply({"a": 1}, 503)
    assert (response.status, response.content_type, response.body) == (
        503,
        "application/json",
        b'{"a":1}',
    )
