"""/inference/v1/generate as vLLM 0.32 words it."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.simulators.fake_instance import dialects
from rollout_sched.simulators.fake_instance import tokens as text
from rollout_sched.simulators.fake_instance.requests import ChoiceChunk, ParsedRequest
from tests.simulators.fake_instance.served import FOREVER, served

GENERATE = "/inference/v1/generate"


async def test_token_ids_in_token_ids_out() -> None:
    async with served() as client:
        body = {
            "token_ids": [1, 2, 3],
            "request_id": "mine",
            "return_token_ids": True,
            "sampling_params": {"max_tokens": 3, "logprobs": 0, "temperature": 0},
        }
        status, answer = await client.post(GENERATE, body)
        assert status == 200
        assert answer["request_id"] == "generate-tokens-mine"
        assert answer["prompt_token_ids"] == [1, 2, 3]
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["usage"]["prompt_tokens"] == 3
        (choice,) = answer["choices"]
        ids = text.tokens(text.name(text.read([1, 2, 3])), 0, [(0, 3)])
        assert choice["token_ids"] == ids
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]
        for token, told in zip(ids, choice["logprobs"]["content"], strict=True):
            value = told["logprob"]
            candidate = {"token_id": token, "logprob": value, "rank": 1}
            assert told == {**candidate, "top_logprobs": [candidate]}
        _, answer = await client.post(GENERATE, body, X_Request_Id="header")
        assert answer["request_id"] == "generate-tokens-header"


async def test_lengths_are_asked_for_or_drawn() -> None:
    async with served(speed=1e6, median_tokens=50) as client:
        asked = await client.generate([1], sampling={"extra_args": {"fake_response_tokens": 9}})
        assert (len(asked["token_ids"]), asked["finish_reason"]) == (9, "stop")
        drawn = [await client.generate([1, prompt]) for prompt in range(20)]
        assert {choice["finish_reason"] for choice in drawn} == {"stop"}
        lengths = sorted(len(choice["token_ids"]) for choice in drawn)
        assert len(set(lengths)) > 10
        assert 25 < lengths[10] < 100
        whole = max(drawn, key=lambda choice: len(choice["token_ids"]))["token_ids"]
        prompt = next(p for p in range(20) if drawn[p]["token_ids"] == whole)
        rest = await client.generate([1, prompt, *whole[:7]])
        assert whole[:7] + rest["token_ids"] == whole
        endless = await client.generate([1], sampling={"ignore_eos": True})
        assert (len(endless["token_ids"]), endless["finish_reason"]) == (3999, "length")


async def test_a_stream_brings_one_token_and_then_so_many() -> None:
    async with served(speed=100.0) as client:
        sampling = {"max_tokens": 10, "stream_interval": 4, "logprobs": 1, "temperature": 0}
        body = {
            "token_ids": [1, 2],
            "sampling_params": sampling,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        *chunks, told = await client.stream(GENERATE, body)
        assert told["choices"] == []
        assert told["usage"]["completion_tokens"] == 10
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [len(choice["token_ids"]) for choice in choices] == [1, 4, 4, 1]
        assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
        assert [choice["weight_versions"] for choice in choices[:3]] == [None] * 3
        assert choices[3]["weight_versions"] == [{"version": "default", "start": 0, "end": 10}]
        assert chunks[0]["prompt_token_ids"] == [1, 2]
        whole = await client.generate([1, 2], sampling={**sampling, "temperature": 0})
        assert [t for choice in choices for t in choice["token_ids"]] == whole["token_ids"]
        content = [one for choice in choices for one in choice["logprobs"]["content"]]
        assert content == whole["logprobs"]["content"]


@pytest.mark.parametrize("path", [GENERATE, "/v1/completions", "/v1/chat/completions"])
async def test_each_event_tells_the_usage_where_that_is_asked_for(path: str) -> None:
    async with served() as client:
        body = {
            "token_ids": [1, 2],
            "sampling_params": {"max_tokens": 10, "n": 2, "stream_interval": 4},
            "prompt": [1, 2],
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 10,
            "n": 2,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
        }
        *chunks, told = await client.stream(path, body)
        assert told["usage"]["completion_tokens"] == 20
        made = [0, 0]
        for chunk in chunks:
            choice = chunk["choices"][0]
            made[choice["index"]] += len(choice.get("token_ids", ()))
            assert chunk["usage"]["completion_tokens"] == made[choice["index"]]


async def test_a_disconnect_frees_the_slot() -> None:
    async with served(speed=10.0) as client:
        tasks = [asyncio.create_task(client.generate([1, n], sampling=FOREVER)) for n in range(3)]
        await client.until_running(3)
        for task in tasks:
            task.cancel()
        await client.until_running(0)
        assert (await client.get("/load"))[1] == {"server_load": 0}


async def test_siblings_share_the_id_but_not_the_text() -> None:
    async with served(speed=100.0) as client:
        body = {
            "token_ids": [1, 2],
            "request_id": "many",
            "sampling_params": {"n": 3, "ignore_eos": True},
        }
        task = asyncio.create_task(client.post(GENERATE, body))
        await client.until_generated(6)
        await client.post("/abort_requests", {"request_ids": ["generate-tokens-many"]})
        _, answer = await task
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"abort"}
        assert len({choice["token_ids"][0] for choice in answer["choices"]}) == 3
        seeded = {**body, "sampling_params": {"n": 2, "seed": 5, "max_tokens": 2}}
        first, second = (
            (await client.post(GENERATE, seeded))[1],
            (await client.post(GENERATE, seeded))[1],
        )
        assert first["choices"] == second["choices"]
        streamed = await client.stream(GENERATE, seeded)
        ids: dict[int, list[int]] = {0: [], 1: []}
        for chunk in streamed:
            ids[chunk["choices"][0]["index"]] += chunk["choices"][0]["token_ids"]
        assert [ids[0], ids[1]] == [choice["token_ids"] for choice in first["choices"]]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "token_ids"),
        ({"token_ids": [], "sampling_params": {}}, 400, "length"),
        ({"token_ids": [1 << 31], "sampling_params": {}}, 400, "out of vocabulary"),
        ({"token_ids": [-1], "sampling_params": {}}, 400, "out of vocabulary"),
        ({"token_ids": [1] * 4000, "sampling_params": {}}, 400, "maximum context length"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, 400, "max_tokens"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, 400, "temperature"),
        ({"token_ids": [1], "sampling_params": {"n": 2, "temperature": 0}}, 400, "greedy"),
        ({"token_ids": [1], "sampling_params": {"n": 0}}, 400, "at least 1"),
        ({"token_ids": [1], "sampling_params": {}, "cache_salt": ""}, 400, "cache_salt"),
        ({"token_ids": [1], "sampling_params": {}, "model": "other"}, 404, "does not exist"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(body: dict[str, object], status: int, message: str, stream: bool) -> None:
    async with served() as client:
        told, answer = await client.post(GENERATE, {**body, "stream": stream})
        assert told == status
        assert answer["error"]["code"] == status
        assert message in answer["error"]["message"]


async def test_only_json_is_read() -> None:
    async with served() as client, client.session.post(GENERATE, data=b"{}") as response:
        assert response.status == 400
        assert "application/json" in await response.text()


async def test_skyrl_s_own_path_tells_the_experts_of_each_token() -> None:
    async with served() as client:
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "logprobs": 0}}
        status, answer = await client.post("/skyrl/v1/generate", body)
        assert status == 200
        (choice,) = answer["choices"]
        assert len(choice["token_ids"]) == len(choice["routed_experts"]) == 3


# ------------------------------------------------------------------------------------------
# /v1/completions as vLLM 0.32 words it.


COMPLETIONS = "/v1/completions"


async def test_text_and_token_ids_are_the_same_prompt() -> None:
    async with served() as client:
        body = {"max_tokens": 4, "temperature": 0, "return_token_ids": True, "logprobs": 1}
        _, by_text = await client.post(COMPLETIONS, {"prompt": "w5 w6", **body})
        _, by_ids = await client.post(COMPLETIONS, {"prompt": [5, 6], **body})
        assert by_text["choices"] == by_ids["choices"]
        (choice,) = by_ids["choices"]
        assert choice["prompt_token_ids"] == [5, 6]
        assert choice["text"] == text.decode(choice["token_ids"])
        assert "weight_versions" not in choice
        told = choice["logprobs"]
        assert "".join(told["tokens"]) == choice["text"]
        offsets = [choice["text"].index(word) for word in told["tokens"]]
        assert told["text_offset"] == offsets
        assert told["top_logprobs"] == [
            {word: value}
            for word, value in zip(told["tokens"], told["token_logprobs"], strict=True)
        ]
        body["return_tokens_as_token_ids"] = True
        _, answer = await client.post(COMPLETIONS, {"prompt": [5, 6], **body})
        expected = [f"token_id:{token}" for token in choice["token_ids"]]
        assert answer["choices"][0]["logprobs"]["tokens"] == expected


async def test_prompts_times_n_come_back_flat() -> None:
    async with served() as client:
        body = {"prompt": [[5, 6], [7]], "n": 2, "max_tokens": 3, "return_token_ids": True}
        _, answer = await client.post(COMPLETIONS, body)
        choices = answer["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert [c["prompt_token_ids"] for c in choices] == [[5, 6], [5, 6], [7], [7]]
        assert len({choice["text"] for choice in choices}) == 4
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["usage"]["completion_tokens"] == 12


async def test_each_prompt_is_aborted_by_its_own_id() -> None:
    async with served(speed=100.0) as client:
        body = {"prompt": ["a", "b"], "request_id": "x", "max_tokens": 3000, "ignore_eos": True}
        task = asyncio.create_task(client.post(COMPLETIONS, body))
        await client.until_running(2)
        for ids in (["x", "cmpl-x"], ["cmpl-x-1"]):
            _, told = await client.post("/abort_requests", {"request_ids": ids})
            assert told == {"status": "aborted", "aborted": len(ids)}
        await client.until_running(1)
        assert not task.done()
        await client.post("/abort_requests", {"request_ids": ["cmpl-x-0"]})
        _, answer = await task
        assert answer["id"] == "cmpl-x"
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort", "abort"]
        assert len(answer["choices"][0]["text"]) > len(answer["choices"][1]["text"])


async def test_streams_of_several_choices_are_whole() -> None:
    async with served(speed=100.0, stream_interval=3) as client:
        body = {
            "prompt": ["a", "b"],
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": 0,
            "return_token_ids": True,
        }
        chunks = await client.stream(COMPLETIONS, body)
        _, whole = await client.post(COMPLETIONS, body)
        for choice in whole["choices"]:
            parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert [t for part in parts for t in part["token_ids"]] == choice["token_ids"]
            offsets = [at for part in parts for at in part["logprobs"]["text_offset"]]
            assert offsets == choice["logprobs"]["text_offset"]
            assert [part["finish_reason"] for part in parts] == [None, None, None, "length"]
            assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [1, "a"], ["a", ""], "x " * 3990], ids=lambda p: str(p)[:9]
)
async def test_bad_prompts(prompt: object) -> None:
    async with served() as client:
        status, answer = await client.post(COMPLETIONS, {"prompt": prompt})
        assert status == 400
        assert answer["error"]["type"] == "BadRequestError"


# ------------------------------------------------------------------------------------------
# /v1/chat/completions as vLLM 0.32 words it.


CHAT = "/v1/chat/completions"
HELLO = {"role": "user", "content": "Hello there"}


async def test_a_message_is_answered_by_a_message() -> None:
    async with served() as client:
        body = {"messages": [HELLO], "max_tokens": 3, "temperature": 0, "logprobs": True}
        _, answer = await client.post(CHAT, {**body, "return_token_ids": True})
        assert answer["object"] == "chat.completion"
        assert answer["id"].startswith("chatcmpl-")
        (choice,) = answer["choices"]
        assert choice["message"]["role"] == "assistant"
        content = choice["message"]["content"]
        assert content == "".join(f"w{token} " for token in choice["token_ids"])
        told = choice["logprobs"]["content"]
        assert "".join(one["token"] for one in told) == content
        assert bytes(told[0]["bytes"]).decode() == told[0]["token"]
        _, tokens = await client.post("/tokenize", {"messages": [HELLO]})
        assert answer["prompt_token_ids"] == tokens["tokens"]


async def test_the_next_turn_finds_the_kv_of_the_last() -> None:
    async with served() as client:
        messages = [HELLO]
        _, answer = await client.post(CHAT, {"messages": messages, "max_tokens": 40})
        messages.append(answer["choices"][0]["message"])
        messages.append({"role": "user", "content": [{"type": "text", "text": "And now?"}]})
        await client.post(CHAT, {"messages": messages, "max_completion_tokens": 3})
        assert await client.metric("vllm:prefix_cache_hits_total") == 40


async def test_a_stream_opens_with_the_role() -> None:
    async with served(stream_interval=2) as client:
        body = {
            "messages": [HELLO],
            "max_tokens": 5,
            "n": 2,
            "seed": 1,
            "stream_options": {"include_usage": True},
        }
        *chunks, told = await client.stream(CHAT, body)
        _, whole = await client.post(CHAT, body)
        assert told["usage"]["completion_tokens"] == 10
        for choice in whole["choices"]:
            mine = [c["choices"][0] for c in chunks]
            parts = [part for part in mine if part["index"] == choice["index"]]
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
            content = "".join(part["delta"]["content"] for part in parts)
            assert content == choice["message"]["content"]
            assert parts[-1]["finish_reason"] == "length"


async def test_messages_are_needed() -> None:
    async with served() as client:
        for body in ({}, {"messages": []}, {"messages": [{"content": "x"}]}):
            assert (await client.post(CHAT, body))[0] == 400


# ------------------------------------------------------------------------------------------
# What chats and completions have in common.


CHUNK = ChoiceChunk(1, [5, 6], None, "length", None, first=True)


def asked(*, ids: bool = False, ids_for_words: bool = False) -> ParsedRequest:
    return ParsedRequest("cmpl-x", "m", [[1]], 2, [], False, False, ids, False, ids_for_words)


def test_an_answer_bears_the_id_of_its_request() -> None:
    answer = dialects.CompletionsDialect().answer(asked(), [], {"total_tokens": 3})
    assert (answer["id"], answer["model"], answer["object"]) == ("cmpl-x", "m", "text_completion")
    assert answer["usage"] == {"total_tokens": 3}


@pytest.mark.parametrize("ids", [False, True])
def test_a_choice_has_its_ids_if_they_were_asked_for(ids: bool) -> None:
    choice = dialects.CompletionsDialect().choice(asked(ids=ids), CHUNK)
    assert (choice["index"], choice["finish_reason"]) == (1, "length")
    assert choice.get("token_ids") == ([5, 6] if ids else None)


def test_log_probs_name_words_or_ids() -> None:
    assert dialects.token_name(asked(), 5, "w5 ") == "w5 "
    assert dialects.token_name(asked(ids_for_words=True), 5, "w5 ") == "token_id:5"
