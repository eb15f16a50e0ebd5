"""How an interrupted response goes on: what `tests/laws/test_exact.py` does not show."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollout_sched.integrations.gateway.data_plane.resume import (
    ResponsePart,
    end_over_the_cut,
    text_of_parts,
)
from rollout_sched.live.requests.continuation import StopStrings
from rollout_sched.live.requests.token_payload import StopSearch
from tests.integrations.gateway.data_plane.stage import BODY, PARTIAL, PROMPT
from tests.integrations.gateway.scripted import chunk, completion
from tests.live.scripted import until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
pytestmark = pytest.mark.scene(interruption={**PARTIAL, "unresumable": "start_over"})


def chat(message: dict[str, Any], finish: str, tokens: list[int]) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{**choice, "token_ids": tokens}],
        "prompt_token_ids": PROMPT,
        "usage": {"prompt_tokens": 3, "completion_tokens": len(tokens)},
    }


async def interrupted(stage: Any, instance: Any, body: Any, first: Any, target: str) -> Any:
    """The call and the body of its second attempt, after `first` came as the answer to an abort."""
    call = stage.call(body, target)
    await instance.asked()
    await stage.update(1, instance)
    await until(lambda: instance.calls)
    await instance.answer(0, first)
    order = await instance.asked(1)
    return call, order.body


async def test_the_least_length_and_the_seed_go_on(stage, instance) -> None:
    body = {**BODY, "min_tokens": 8, "seed": 7, "prompt_logprobs": 0}
    partial = {**completion([4, 5], "abort", prompt=PROMPT), "prompt_logprobs": ["the prompt's"]}
    call, again = await interrupted(stage, instance, body, partial, "/v1/completions")
    assert again["prompt"] == [*PROMPT, 4, 5]
    assert (again["min_tokens"], again["max_tokens"]) == (6, 8)
    assert again["seed"] != 7
    assert "prompt_logprobs" not in again
    await instance.answer(1, completion([6]))
    answer = await call.json()
    assert answer["choices"][0]["text"] == "w4 w5 w6 "
    assert answer["prompt_logprobs"] == ["the prompt's"]


@pytest.mark.parametrize(
    "message",
    [
        {"reasoning": "I think", "content": None},
        {"reasoning_content": "I thought", "content": "So"},
        {"tool_calls": [{"function": {"name": "f"}}], "content": "So"},
        {"content": None},
    ],
)
async def test_a_message_that_was_parsed_starts_over(
    message: dict[str, Any], stage, instance
) -> None:
    partial = chat(message, "abort", [4, 5])
    call, again = await interrupted(stage, instance, CHAT, partial, "/v1/chat/completions")
    assert again["messages"] == CHAT["messages"]
    await instance.answer(1, chat({"reasoning": "all", "content": "said"}, "stop", [6]))
    answer = await call.json()
    assert answer["choices"][0]["message"]["reasoning"] == "all"
    assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("prompt", "before", "after", "repeats"),
    [
        ("<|user|>Count the words", "w4 ", "user Count the words w4 w5 w6 ", True),
        ("<|user|>Count the words", "w4 ", "Again w4 ", False),
        ("<|user|>Count the words", "w4 ", "So: Count the words ", False),
        (
            PROMPT,
            "one two three four five six ",
            "the prompt one two three four five six w6 ",
            True,
        ),
        (PROMPT, "one two three four five six ", "seven one two three ", False),
        (PROMPT, "w4 ", "w6 w4 ", False),
    ],
)
async def test_text_of_the_prompt_within_an_answer_is_not_passed_on(
    prompt: Any, before: str, after: str, repeats: bool, stage, instance
) -> None:
    """As vLLM answers a prompt that ends within a character (vLLM 48853)."""
    partial = completion([4, 5], "abort", prompt=PROMPT)
    partial["choices"][0]["text"] = before  # token 5 is a part of a character
    body = {**BODY, "prompt": prompt}
    call, again = await interrupted(stage, instance, body, partial, "/v1/completions")
    assert again["prompt"] == [*PROMPT, 4, 5]
    resumed = completion([6])
    resumed["choices"][0]["text"] = after
    await instance.answer(1, resumed)
    if repeats:
        await instance.asked(2)
        await instance.answer(2, completion([7]))
    assert (await call.json())["choices"][0]["text"] == ("w7 " if repeats else before + after)
    stage.settled()


def until_a_stop(words: list[str], stops: StopStrings, made: int) -> tuple[int, str, str | None]:
    """(tokens, text, stop string) of an engine that draws these words after `made` others."""
    text = ""
    for count, word in enumerate(words, 1):
        new, text = len(word), text + word
        ends = [
            (at + len(stop), place)
            for place, stop in enumerate(stops.strings)
            if (at := text.find(stop, max(0, len(text) - new - len(stop) + 1))) >= 0
        ]
        if ends and made + count > stops.min_tokens:
            end, place = min(ends)
            stop = stops.strings[place]
            return count, text[: end if stops.included else end - len(stop)], stop
    return len(words), text, None


class Tokens(NamedTuple):
    """Tokens by their bytes, of which some are a part of a character; `ids` are their places."""

    all: list[bytes]

    async def detokenize(self, ids: Sequence[int]) -> str:
        return b"".join([self.all[token] for token in ids]).decode(errors="replace")

    @property
    def words(self) -> list[str]:
        """A character is the text of its last token."""
        words = [token.decode(errors="ignore") for token in self.all]
        return [
            "é" if token == b"\xa9" else word for token, word in zip(self.all, words, strict=True)
        ]


TOKENS = st.lists(st.sampled_from([[b"a"], [b"b"], [b"ab"], [b"\xc3", b"\xa9"]]), max_size=9).map(
    lambda pieces: Tokens([token for piece in pieces for token in piece])
)


@pytest.mark.parametrize("judge", ["names of tokens", "text of ids"])
@given(
    tokens=TOKENS,
    strings=st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=3),
    least=st.integers(0, 8),
    kept=st.booleans(),
    lengths=st.lists(st.integers(1, 4), min_size=18, max_size=18),
)
@example(Tokens([b"b", b"a"]), ["ba", "a"], 0, False, [1] * 18)
def test_a_response_of_several_parts_ends_at_the_stop_string_that_comes_first(
    judge: str, tokens: Tokens, strings: list[str], least: int, kept: bool, lengths: list[int]
) -> None:
    """A server's log-probs name the tokens, or it is asked for the text of their ids."""
    stops, words = StopStrings(strings, least, kept), tokens.words
    parts: list[ResponsePart] = []
    end: str | None = None
    made: list[int] = []
    while end is None and len(made) < len(words):
        drawn = words[len(made) :][: lengths[len(parts)]]
        count, text, end = until_a_stop(drawn, stops, len(made))
        ids, names = [*range(len(made), len(made) + count)], {"tokens": drawn[:count]}
        part, choice = ResponsePart(ids, text, names), {"stop_reason": end}
        if judge == "text of ids":
            sampling = {"stop": strings, "min_tokens": least}
            found = until_the_cut(sampling, made, tokens, part)
            if found is None:
                return  # it starts over
            end = "one of them" if found else end
        elif parts and end_over_the_cut(stops, parts, part, choice) is not None:
            nameless = ResponsePart(ids, text)
            assert end_over_the_cut(stops, parts, nameless, {"stop_reason": end}) == 0
            end = choice["stop_reason"]
        parts.append(part)
        made += part.token_ids
    true = until_a_stop(words, stops, 0)
    if judge == "names of tokens":
        assert (len(made), text_of_parts(parts), end) == true
    else:
        assert (len(made), end is None) == (true[0], true[2] is None)


def until_the_cut(sampling: Any, made: list[int], tokens: Any, part: ResponsePart) -> bool | None:
    """Cut off what comes after a stop string over the cut; whether there is one. None if a server
    may find another in a repetition (vLLM 48853)."""

    async def scene() -> int | None:
        search = await StopSearch.of(sampling, made, len(made), tokens)
        return None if search is None else await search.end(part.token_ids)

    kept = asyncio.run(scene())
    if kept == 0:
        last = tokens.all[made[-1]]
        assert last == b"\xc3"
        assert any(stop in "".join(tokens.words[: len(made)]) for stop in sampling["stop"])
        return None
    del part.token_ids[len(part.token_ids) if kept is None else kept :]
    return kept is not None


async def test_a_first_part_that_quotes_the_prompt_goes_on(stage, instance) -> None:
    partial = completion([4, 5], "abort", prompt=PROMPT)
    partial["choices"][0]["text"] = "So: Count the words "
    body = {**BODY, "prompt": "Count the words"}
    call, again = await interrupted(stage, instance, body, partial, "/v1/completions")
    assert again["prompt"] == [*PROMPT, 4, 5]
    await instance.answer(1, completion([6]))
    assert (await call.json())["choices"][0]["text"] == "So: Count the words w6 "
    stage.settled()


# -- streams -------------------------------------------------------------------------------


async def cut(stage: Any, first: Any, body: Any, *events: Any, target: str = "") -> Any:
    """A stream that has brought these events when its instance is lost."""
    call = stage.call({**body, "stream": True}, target or "/v1/completions")
    await first.event(0, *events)
    stage.driver.fleet.lose("i0", "it is gone")
    return call


def ids_of(call: Any) -> list[int]:
    parts = [part.removeprefix(b"data: ") for part in call.data.split(b"\n\n")]
    told = [json.loads(part) for part in parts if part.startswith(b"{")]
    return [token for e in told for c in e.get("choices", ()) for token in c.get("token_ids", ())]


def texts(events: list[Any]) -> str:
    told = [event for event in events if event != b"[DONE]"]
    return "".join([choice.get("text", "") for e in told for choice in e.get("choices", ())])


async def test_a_stream_of_which_nothing_came_starts_over(stage, first, second) -> None:
    call = stage.call({**BODY, "stop": ["</q>"], "stream": True})
    await first.asked()
    stage.driver.fleet.lose("i0", "it is gone")
    await second.event(0, chunk([5], "stop", prompt_token_ids=PROMPT), end=True)
    assert texts(await call.events()) == "w5 "


@pytest.mark.parametrize("before", [[], [4]])
async def test_text_that_an_abort_gives_out_may_begin_a_stop_string(
    before: list[int], stage, instance
) -> None:
    call = stage.call({**BODY, "stop": ["</q>"], "stream": True})
    await instance.asked()
    events = [chunk([token], prompt_token_ids=PROMPT) for token in before]
    await stage.update(1, instance)
    await until(lambda: instance.calls)
    await instance.event(0, *events, chunk([5], "abort", text="</"), end=True)
    if before:
        *told, last = await call.events()
        assert "cannot be resumed" in last["error"]["message"]
        assert texts(told) == "w4 "
    else:
        await instance.event(1, chunk([6], "stop", prompt_token_ids=PROMPT), end=True)
        assert texts(await call.events()) == "w6 "


@pytest.mark.parametrize(
    ("body", "target", "text", "rest"),
    [
        ({**BODY, "prompt": "Count the words"}, "/v1/completions", "Count the words w4 w5e", "e"),
        ({**BODY, "prompt": "Count the words"}, "/v1/completions", "Count w5 w6", "Count w5 w6"),
        (
            {**CHAT, "messages": [{"role": "user", "content": "Count the words"}]},
            "/v1/chat/completions",
            "system You are. user Count the words assistant w4 w5e",
            "e",
        ),
        (BODY, "/v1/completions", "a b c d e f g h i j k l m n w4 w5e", "e"),
        (BODY, "/v1/completions", "w5 w5 ", "w5 w5 "),
        (
            {**BODY, "prompt": "Count the words"},
            "/v1/completions",
            "Count the words w4 w5€w5",
            "€w5",
        ),
    ],
)
async def test_what_a_continued_stream_repeats_is_left_out(
    body: Any, target: str, text: str, rest: str, stage, first, second
) -> None:
    """A busy server joins tokens to an event, of which the last may be a part of a character. A
    server repeats prompt and response after it (vLLM 48853)."""
    events = [chunk([4], prompt_token_ids=PROMPT), chunk([5, 6], text="w5")]
    if "chat" in target:
        for event in events:
            event["object"] = "chat.completion.chunk"
            for choice in event["choices"]:
                choice["delta"] = {"content": choice.pop("text")}
    call = await cut(stage, first, body, *events, target=target)
    order = await second.asked()
    assert order.body["prompt"] == [*PROMPT, 4, 5, 6]
    await second.event(0, chunk([7], text=""), chunk([8], text=text))
    await second.event(0, chunk([9], "stop"), end=True)
    told = [e["choices"][0] for e in await call.events() if e != b"[DONE]"]
    texts = [choice.get("text", choice.get("delta", {}).get("content")) for choice in told]
    assert "".join(texts) == "w4 w5" + rest + "w9 "
    stage.settled()


async def test_many_tokens_without_text_are_no_part_of_a_character(stage, instance) -> None:
    call = stage.call({**BODY, "stream": True})
    mute = [chunk([token], text="") for token in range(5, 10)]
    await instance.event(0, chunk([4], prompt_token_ids=PROMPT), *mute)
    assert len(ids_of(call)) >= 3
    await instance.event(0, chunk([10], "stop", text=""), end=True)
    await call.events()
    assert ids_of(call) == [4, *range(5, 11)]


@pytest.mark.scene(interruption={**PARTIAL, "segment_tokens": 3, "segment": "chunk"})
async def test_chats_of_a_model_that_reasons_are_cut_once(stage, instance) -> None:
    """From the first answer on, the gateway knows that its servers parse them."""
    calls = [stage.call({**CHAT, "stream": True}, "/v1/chat/completions")]
    for finish in ("length", "stop"):
        order = await instance.asked(len(calls) - 1)
        choice = {"index": 0, "delta": {"reasoning": "I"}, "finish_reason": None}
        event = {
            **chunk([4], prompt_token_ids=PROMPT),
            "choices": [{**choice, "token_ids": [4, 5]}],
        }
        last = {"delta": {}, "token_ids": [6], "finish_reason": finish}
        end = {**event, "choices": [{**choice, **last}]}
        await instance.event(len(calls) - 1, event, end, end=True)
        *_, last = await calls[-1].events()
        if finish == "length":
            assert order.body["max_tokens"] == 3
            assert "'reasoning'" in last["error"]["message"]
            calls.append(stage.call({**CHAT, "stream": True}, "/v1/chat/completions"))
        else:
            assert order.body["max_tokens"] == 10
            assert last == b"[DONE]"
    stage.settled()


@pytest.mark.scene(interruption={**PARTIAL, "segment_tokens": 3, "segment": "chunk"})
@pytest.mark.parametrize(("least", "sent"), [("5", 3), (2, 2), (None, None)])
async def test_the_least_length_of_a_segment_fits_it(
    least: Any, sent: int | None, stage, instance
) -> None:
    stage.call({**BODY, "min_tokens": least})
    order = await instance.asked()
    assert (order.body["min_tokens"], order.body["max_tokens"]) == (sent, 3)


@pytest.mark.scene(interruption={**PARTIAL, "segment_tokens": 3, "segment": "chunk"})
@pytest.mark.parametrize(
    ("target", "body"),
    [
        ("/v1/completions", {**BODY, "max_tokens": 10**6, "min_tokens": 10**5}),
        ("/inference/v1/generate", {"model": "tiny", "token_ids": PROMPT}),
    ],
)
async def test_what_the_server_refuses_is_not_changed_by_a_segment(
    target: str, body: dict[str, Any], stage, instance
) -> None:
    call = stage.call(body, target)
    order = await instance.asked()
    assert body.items() <= order.body.items()
    assert order.body.keys() - body.keys() <= {"cache_salt", "return_token_ids"}
    refusal = {"error": {"message": "too many", "code": 400}}
    await instance.answer(0, refusal, 400)
    await call.over.wait()
    assert (call.status, json.loads(call.data)) == (400, refusal)


@pytest.mark.scene(interruption={**PARTIAL, "segment_tokens": 3, "segment": "chunk"})
async def test_a_least_length_that_is_no_number_is_refused(stage) -> None:
    call = stage.call({**BODY, "min_tokens": "many"})
    await call.over.wait()
    assert call.status == 400


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
async def test_tokens_without_text_are_known_in_any_spelling(
    separators: tuple[str, str], stage, first, second
) -> None:
    def spelled(event: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(event, separators=separators).encode()

    events = [chunk([4], prompt_token_ids=PROMPT), chunk([5], text="")]
    await cut(stage, first, BODY, *[spelled(event) for event in events])
    order = await second.asked()
    assert order.body["prompt"] == [*PROMPT, 4]


async def test_an_echo_is_not_asked_for_ids_whatever_else_hinders(stage, instance) -> None:
    """vLLM leaves the prompt's text out of an answer with token ids."""
    stage.call({**BODY, "stop": ["</q>"], "echo": True})
    assert "return_token_ids" not in (await instance.asked()).body


@pytest.mark.scene(interruption={**PARTIAL, "segment_tokens": 2, "segment": "chunk"})
async def test_a_segment_of_nothing_but_parts_of_a_character_goes_on(stage, instance) -> None:
    """It began again without end, as it always made the same tokens."""
    stage.call({**BODY, "stream": True})
    parts = [chunk([4], text="", prompt_token_ids=PROMPT), chunk([5], "length", text="")]
    await instance.event(0, *parts, end=True)
    assert (await instance.asked(1)).body["prompt"] == [*PROMPT, 4, 5]
