"""/v1/completions as vLLM 0.32 words it."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.simulators.fake_instance import tokens as text
from tests.simulators.fake_instance.served import play, served

PATH = "/v1/completions"


def test_text_and_token_ids_are_the_same_prompt() -> None:
    async def scene() -> None:
        async with served() as client:
            body = {"max_tokens": 4, "temperature": 0, "return_token_ids": True, "logprobs": 1}
            _, by_text = await client.post(PATH, {"prompt": "w5 w6", **body})
            _, by_ids = await client.post(PATH, {"prompt": [5, 6], **body})
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
            _, answer = await client.post(PATH, {"prompt": [5, 6], **body})
            expected = [f"token_id:{token}" for token in choice["token_ids"]]
            assert answer["choices"][0]["logprobs"]["tokens"] == expected

    play(scene)


def test_prompts_times_n_come_back_flat() -> None:
    async def scene() -> None:
        async with served() as client:
            body = {"prompt": [[5, 6], [7]], "n": 2, "max_tokens": 3, "return_token_ids": True}
            _, answer = await client.post(PATH, body)
            choices = answer["choices"]
            assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
            assert [c["prompt_token_ids"] for c in choices] == [[5, 6], [5, 6], [7], [7]]
            assert len({choice["text"] for choice in choices}) == 4
            assert answer["usage"]["prompt_tokens"] == 3
            assert answer["usage"]["completion_tokens"] == 12

    play(scene)


def test_each_prompt_is_aborted_by_its_own_id() -> None:
    async def scene() -> None:
        async with served(speed=100.0) as client:
            body = {"prompt": ["a", "b"], "request_id": "x", "max_tokens": 3000, "ignore_eos": True}
            task = asyncio.create_task(client.post(PATH, body))
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

    play(scene)


def test_streams_of_several_choices_are_whole() -> None:
    async def scene() -> None:
        async with served(speed=100.0, stream_interval=3) as client:
            body = {
                "prompt": ["a", "b"],
                "max_tokens": 8,
                "temperature": 0,
                "logprobs": 0,
                "return_token_ids": True,
            }
            chunks = await client.stream(PATH, body)
            _, whole = await client.post(PATH, body)
            for choice in whole["choices"]:
                parts = [
                    c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]
                ]
                assert "".join(part["text"] for part in parts) == choice["text"]
                assert [t for part in parts for t in part["token_ids"]] == choice["token_ids"]
                offsets = [at for part in parts for at in part["logprobs"]["text_offset"]]
                assert offsets == choice["logprobs"]["text_offset"]
                assert [part["finish_reason"] for part in parts] == [None, None, None, "length"]
                assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]

    play(scene)


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [1, "a"], ["a", ""], "x " * 3990], ids=lambda p: str(p)[:9]
)
def test_bad_prompts(prompt: object) -> None:
    async def scene() -> None:
        async with served() as client:
            status, answer = await client.post(PATH, {"prompt": prompt})
            assert status == 400
            assert answer["error"]["type"] == "BadRequestError"

    play(scene)
