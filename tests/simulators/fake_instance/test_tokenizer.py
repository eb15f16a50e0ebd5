"""Text to tokens and back, over HTTP."""

from __future__ import annotations

from tests.simulators.fake_instance.served import SPEC, play, served


def test_tokens_and_text() -> None:
    async def scene() -> None:
        async with served() as client:
            _, told = await client.post("/tokenize", {"prompt": "w5 w623"})
            assert told["tokens"] == [5, 623]
            assert (told["count"], told["max_model_len"]) == (2, SPEC.max_model_len)
            assert (await client.post("/detokenize", {"tokens": [5, 623]}))[1] == {
                "prompt": "w5 w623 "
            }
            assert (await client.post("/tokenize", {}))[0] == 400
            assert (await client.post("/detokenize", {"tokens": ["x"]}))[0] == 400

    play(scene)


def test_a_chat_is_rendered_as_it_would_be_asked() -> None:
    async def scene() -> None:
        async with served(model="m") as client:
            messages = [{"role": "user", "content": "one two"}]
            status, told = await client.post("/v1/chat/completions/render", {"messages": messages})
            _, tokens = await client.post("/tokenize", {"messages": messages})
            assert (status, told["model"], told["token_ids"]) == (200, "m", tokens["tokens"])

    play(scene)
