"""/inference/v1/generate as vLLM 0.32 words it."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.simulators.fake_instance import tokens as text
from tests.simulators.fake_instance.served import FOREVER, play, served

PATH = "/inference/v1/generate"


def test_token_ids_in_token_ids_out() -> None:
    async def scene() -> None:
        async with served() as client:
            body = {
                "token_ids": [1, 2, 3],
                "request_id": "mine",
                "return_token_ids": True,
                "sampling_params": {"max_tokens": 3, "logprobs": 0, "temperature": 0},
            }
            status, answer = await client.post(PATH, body)
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
            _, answer = await client.post(PATH, body, X_Request_Id="header")
            assert answer["request_id"] == "generate-tokens-header"

    play(scene)


def test_lengths_are_asked_for_or_drawn() -> None:
    async def scene() -> None:
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

    play(scene)


def test_a_stream_brings_one_token_and_then_so_many() -> None:
    async def scene() -> None:
        async with served(speed=100.0) as client:
            sampling = {"max_tokens": 10, "stream_interval": 4, "logprobs": 1, "temperature": 0}
            body = {
                "token_ids": [1, 2],
                "sampling_params": sampling,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
            *chunks, told = await client.stream(PATH, body)
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

    play(scene)


@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/v1/chat/completions"])
def test_each_event_tells_the_usage_where_that_is_asked_for(path: str) -> None:
    async def scene() -> None:
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

    play(scene)


def test_a_disconnect_frees_the_slot() -> None:
    async def scene() -> None:
        async with served(speed=10.0) as client:
            tasks = [
                asyncio.create_task(client.generate([1, n], sampling=FOREVER)) for n in range(3)
            ]
            await client.until_running(3)
            for task in tasks:
                task.cancel()
            await client.until_running(0)
            assert (await client.get("/load"))[1] == {"server_load": 0}

    play(scene)


def test_siblings_share_the_id_but_not_the_text() -> None:
    async def scene() -> None:
        async with served(speed=100.0) as client:
            body = {
                "token_ids": [1, 2],
                "request_id": "many",
                "sampling_params": {"n": 3, "ignore_eos": True},
            }
            task = asyncio.create_task(client.post(PATH, body))
            await client.until_generated(6)
            await client.post("/abort_requests", {"request_ids": ["generate-tokens-many"]})
            _, answer = await task
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
            assert {choice["finish_reason"] for choice in answer["choices"]} == {"abort"}
            assert len({choice["token_ids"][0] for choice in answer["choices"]}) == 3
            seeded = {**body, "sampling_params": {"n": 2, "seed": 5, "max_tokens": 2}}
            first, second = (
                (await client.post(PATH, seeded))[1],
                (await client.post(PATH, seeded))[1],
            )
            assert first["choices"] == second["choices"]
            streamed = await client.stream(PATH, seeded)
            ids: dict[int, list[int]] = {0: [], 1: []}
            for chunk in streamed:
                ids[chunk["choices"][0]["index"]] += chunk["choices"][0]["token_ids"]
            assert [ids[0], ids[1]] == [choice["token_ids"] for choice in first["choices"]]

    play(scene)


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
def test_refusals(body: dict[str, object], status: int, message: str, stream: bool) -> None:
    async def scene() -> None:
        async with served() as client:
            told, answer = await client.post(PATH, {**body, "stream": stream})
            assert told == status
            assert answer["error"]["code"] == status
            assert message in answer["error"]["message"]

    play(scene)


def test_only_json_is_read() -> None:
    async def scene() -> None:
        async with served() as client, client.session.post(PATH, data=b"{}") as response:
            assert response.status == 400
            assert "application/json" in await response.text()

    play(scene)


def test_skyrl_s_own_path_tells_the_experts_of_each_token() -> None:
    async def scene() -> None:
        async with served() as client:
            body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "logprobs": 0}}
            status, answer = await client.post("/skyrl/v1/generate", body)
            assert status == 200
            (choice,) = answer["choices"]
            assert len(choice["token_ids"]) == len(choice["routed_experts"]) == 3

    play(scene)
