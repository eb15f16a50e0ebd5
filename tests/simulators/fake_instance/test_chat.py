"""/v1/chat/completions as vLLM 0.32 words it."""

from __future__ import annotations

from tests.simulators.fake_instance.served import play, served

PATH = "/v1/chat/completions"
HELLO = {"role": "user", "content": "Hello there"}


def test_a_message_is_answered_by_a_message() -> None:
    async def scene() -> None:
        async with served() as client:
            body = {"messages": [HELLO], "max_tokens": 3, "temperature": 0, "logprobs": True}
            _, answer = await client.post(PATH, {**body, "return_token_ids": True})
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

    play(scene)


def test_the_next_turn_finds_the_kv_of_the_last() -> None:
    async def scene() -> None:
        async with served() as client:
            messages = [HELLO]
            _, answer = await client.post(PATH, {"messages": messages, "max_tokens": 40})
            messages.append(answer["choices"][0]["message"])
            messages.append({"role": "user", "content": [{"type": "text", "text": "And now?"}]})
            await client.post(PATH, {"messages": messages, "max_completion_tokens": 3})
            assert await client.metric("vllm:prefix_cache_hits_total") == 40

    play(scene)


def test_a_stream_opens_with_the_role() -> None:
    async def scene() -> None:
        async with served(stream_interval=2) as client:
            body = {
                "messages": [HELLO],
                "max_tokens": 5,
                "n": 2,
                "seed": 1,
                "stream_options": {"include_usage": True},
            }
            *chunks, told = await client.stream(PATH, body)
            _, whole = await client.post(PATH, body)
            assert told["usage"]["completion_tokens"] == 10
            for choice in whole["choices"]:
                mine = [c["choices"][0] for c in chunks]
                parts = [part for part in mine if part["index"] == choice["index"]]
                assert parts[0]["delta"] == {"role": "assistant", "content": ""}
                content = "".join(part["delta"]["content"] for part in parts)
                assert content == choice["message"]["content"]
                assert parts[-1]["finish_reason"] == "length"

    play(scene)


def test_messages_are_needed() -> None:
    async def scene() -> None:
        async with served() as client:
            for body in ({}, {"messages": []}, {"messages": [{"content": "x"}]}):
                assert (await client.post(PATH, body))[0] == 400

    play(scene)
