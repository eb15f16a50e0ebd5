"""The official client, unchanged."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.simulators.fake_instance.served import served

HELLO = [{"role": "user", "content": "Hello there"}]


def test_completions_and_chats_whole_and_streamed() -> None:
    async def scene() -> None:
        settings = {"model": "m", "stream_interval": 4}
        async with served(speed=100.0, api_key="secret", **settings) as served_client:
            base = f"http://127.0.0.1:{served_client.port}/v1"
            client = openai.AsyncOpenAI(base_url=base, api_key="secret", max_retries=0)
            async with client:
                assert [model.id async for model in client.models.list()] == ["m"]
                asked = {"model": "m", "max_tokens": 9, "temperature": 0, "seed": 1}

                whole = await client.completions.create(prompt="Hello", logprobs=1, **asked)
                stream = await client.completions.create(prompt="Hello", stream=True, **asked)
                parts = [chunk.choices[0].text async for chunk in stream]
                assert len(parts) > 1
                assert "".join(parts) == whole.choices[0].text
                assert whole.choices[0].finish_reason == "length"
                assert len(whole.choices[0].logprobs.token_logprobs) == 9
                assert whole.usage.completion_tokens == 9

                extra = {"vllm_xargs": {"fake_response_tokens": 5}}
                chat = await client.chat.completions.create(
                    messages=HELLO, extra_body=extra, logprobs=True, **asked
                )
                assert chat.choices[0].finish_reason == "stop"
                assert len(chat.choices[0].logprobs.content) == 5
                stream = await client.chat.completions.create(
                    messages=HELLO,
                    extra_body=extra,
                    stream=True,
                    stream_options={"include_usage": True},
                    **asked,
                )
                chunks = [chunk async for chunk in stream]
                assert chunks[-1].usage.completion_tokens == 5
                content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
                assert content == chat.choices[0].message.content

                with pytest.raises(openai.NotFoundError, match="does not exist"):
                    await client.completions.create(model="other", prompt="x")
                with pytest.raises(openai.BadRequestError, match="greedy"):
                    await client.completions.create(prompt="x", n=2, **asked)
            wrong = openai.AsyncOpenAI(base_url=base, api_key="wrong", max_retries=0)
            async with wrong:
                with pytest.raises(openai.AuthenticationError):
                    await wrong.chat.completions.create(model="m", messages=HELLO)

    asyncio.run(scene())
