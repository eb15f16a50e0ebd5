"""What a request's fields do on a simulated server; `tests/vllm` compares the text with vLLM's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollout_sched.simulators.fake_instance.tokens import CHARACTERS, spelled
from tests.simulators.fake_instance.served import SPEC, Client, served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "Tell me", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


class Asking:
    """`await asking(stop=["a"])`: the only choice of the answer."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def __call__(self, path: str = COMPLETIONS, **fields: Any) -> Any:
        return (await self.answer(path, **fields))["choices"][0]

    async def answer(self, path: str = COMPLETIONS, **fields: Any) -> Any:
        body = {**BODY, "return_token_ids": True, **fields}
        if path == CHAT:
            body.setdefault("messages", [{"role": "user", "content": body.pop("prompt")}])
        status, answer = await self.client.post(path, body)
        assert status == 200, answer
        return answer


@pytest.fixture
@asynccontextmanager
async def asking() -> AsyncIterator[Asking]:
    async with served(vocabulary=CHARACTERS) as client:
        yield Asking(client)


async def test_a_stop_string_ends_a_response_and_a_request_looks_for_it_anew(asking) -> None:
    whole = await asking()
    ids, text = whole["token_ids"], whole["text"]
    stop = text[4:7]
    stopped = await asking(stop=stop)
    assert stopped["text"] == text[: text.index(stop)]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert (await asking(stop=stop, include_stop_str_in_output=True))["text"].endswith(stop)
    assert (await asking(stop=stop, min_tokens=24))["finish_reason"] == "length"
    cut = len(stopped["token_ids"]) - 1
    prompt = [*whole["prompt_token_ids"], *ids[:cut]]
    assert (await asking(prompt=prompt, stop=stop, max_tokens=24 - cut))["stop_reason"] != stop


async def test_a_stop_token_ends_a_response_after_its_least_length(asking) -> None:
    ids = (await asking())["token_ids"]
    stopped = await asking(stop_token_ids=[ids[9]])
    assert (stopped["token_ids"], stopped["stop_reason"]) == (ids[:10], ids[9])
    later = await asking(stop_token_ids=[ids[9]], min_tokens=10)
    assert ids[9] not in later["token_ids"][:10]


async def test_a_response_that_goes_on_has_the_least_length_of_its_request(asking) -> None:
    least = {"ignore_eos": False, "max_tokens": 2000}
    whole = await asking(**least, min_tokens=1500)
    assert len(whole["token_ids"]) == 1500
    prompt = [*whole["prompt_token_ids"], *whole["token_ids"][:1000]]
    rest = await asking(prompt=prompt, **least, min_tokens=500)
    assert rest["token_ids"] == whole["token_ids"][1000:]


async def test_a_seed_begins_again_with_each_request(asking) -> None:
    seeded = {"temperature": 1.0, "seed": 7}
    whole = await asking(**seeded)
    assert await asking(**seeded) == whole
    prompt = [*whole["prompt_token_ids"], *whole["token_ids"][:12]]
    again = await asking(prompt=prompt, **seeded)
    assert again["token_ids"][:20] == whole["token_ids"][1:21]


async def test_a_grammar_and_an_image(asking) -> None:
    choices = {"choice": ["positive", "negative"]}
    assert (await asking(structured_outputs=choices))["text"] in choices["choice"]
    answer = await asking.answer(CHAT, messages=[{"role": "user", "content": [IMAGE]}])
    (seen,) = answer["choices"]
    blind = await asking(prompt=[*answer["prompt_token_ids"], seen["token_ids"][0]])
    assert blind["token_ids"][:8] != seen["token_ids"][1:9]


async def test_reasoning_is_parsed_from_chats_only() -> None:
    async with served(vocabulary=CHARACTERS._replace(thinks=True)) as client:
        asking = Asking(client)
        message = (await asking(CHAT))["message"]
        assert message["reasoning"]
        assert message["content"]
        assert "</think>" not in "".join(message.values())
        assert "</think>" in (await asking())["text"]


async def test_a_prompt_is_echoed_truncated_and_measured(asking) -> None:
    silent = await asking.answer(echo=True, max_tokens=0, logprobs=0, return_token_ids=False)
    (choice,) = silent["choices"]
    assert choice["text"] == BODY["prompt"] == "".join(choice["logprobs"]["tokens"])
    assert choice["logprobs"]["token_logprobs"][0] is None
    short = await asking.answer(truncate_prompt_tokens=2, prompt_logprobs=1)
    assert short["usage"]["prompt_tokens"] == len(short["choices"][0]["prompt_logprobs"]) == 2
    status, _ = await asking.client.post(
        COMPLETIONS, {**BODY, "stream": True, "prompt_logprobs": 1}
    )
    assert status == 400


async def test_a_stream_holds_back_what_may_begin_a_stop_string(asking) -> None:
    whole = await asking()
    events = await asking.client.stream(COMPLETIONS, {**BODY, "stop": ["12345"], "logprobs": 0})
    texts, seen = [event["choices"][0]["text"] for event in events], 0
    for number, event in enumerate(events[:-1]):
        seen += sum(map(len, event["choices"][0]["logprobs"]["tokens"]))
        assert len("".join(texts[: number + 1])) == max(0, seen - 4)
    assert "".join(texts) == whole["text"]


@pytest.mark.parametrize("wrong", [{"min_tokens": 25}, {"min_tokens": -1}, {"stop": [""]}])
async def test_invalid_limits_are_refused(wrong: dict[str, Any], asking) -> None:
    assert (await asking.client.post(COMPLETIONS, {**BODY, **wrong}))[0] == 400


@pytest.mark.parametrize("bad", ["€", "中", "b"])
async def test_a_request_looks_for_bad_words_in_its_own_tokens(bad: str) -> None:
    few = CHARACTERS._replace(words=36)
    async with served(vocabulary=few) as client:
        asking, ids = Asking(client), spelled(bad, few)
        free = (await asking(max_tokens=200))["token_ids"]
        last = next(n for n in range(200) if free[n + 1 - len(ids) : n + 1] == ids)
        answer = await asking(max_tokens=200, bad_words=[f" {bad}"])
        assert answer["token_ids"][:last] == free[:last]
        assert answer["token_ids"][last] != ids[-1]
        prompt = [*answer["prompt_token_ids"], *free[:last]]
        (first, *_) = (await asking(prompt=prompt, bad_words=[bad]))["token_ids"]
        assert (first == ids[-1]) == (len(ids) > 1)
        status, _ = await client.post(COMPLETIONS, {**BODY, "bad_words": [" "]})
        assert status == 400


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/inference/v1/generate"])
async def test_cached_tokens_are_those_of_the_first_admission(path: str) -> None:
    async with served(vocabulary=CHARACTERS, prompt_details=True) as client:
        body = {**BODY, "stream_options": {"include_usage": True}}
        if path == CHAT:
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        elif path != COMPLETIONS:
            options = {"stream_options": body.pop("stream_options")}
            body = {"token_ids": [*b"Tell me"], "sampling_params": body, **options}
        usage = [(await client.post(path, body))[1]["usage"] for _ in range(2)]
        usage.append((await client.stream(path, body))[-1]["usage"])
        found = [one["prompt_tokens_details"]["cached_tokens"] for one in usage]
        blocks = (usage[0]["prompt_tokens"] - 1) // SPEC.block_size
        assert found == [0, blocks * SPEC.block_size, blocks * SPEC.block_size]
