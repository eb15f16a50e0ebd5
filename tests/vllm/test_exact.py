"""A response that is cut every five tokens, and resumed on the other of two real vLLM servers,
equals what one of them makes of the same request without the gateway, field by field, or its stream
ends in the error that says that it cannot.

The tiny model writes bytes at random, so that many cuts fall within a character.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

from rollout_sched.client import Prompt, RolloutScheduler
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.simulators.fake_instance import fields
from rollout_sched.simulators.fake_instance.fields import OutputText, Sampler
from rollout_sched.simulators.fake_instance.tokens import CHARACTERS
from tests.vllm import servers

POLICY = servers.chunked(5)
BODY = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 32, "temperature": 0.0}
IDS = {"ignore_eos": True, "return_token_ids": True, "logprobs": 0}
FIELDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "ids": IDS,
    "least length": {"min_tokens": 20, **IDS},
    "least length beyond a segment": {"min_tokens": 32, **IDS},
    "stop string": {"stop": ["@w"]},
    "stop string that is kept": {"stop": ["@w"], "include_stop_str_in_output": True},
    "stop tokens": {"stop_token_ids": list(range(300, 2000, 7)), **IDS},
    "bad words": {"bad_words": ["w7", "a"]},
    "presence": {"presence_penalty": 1.5, **IDS},
    "frequency": {"frequency_penalty": 1.5, **IDS},
    "repetition": {"repetition_penalty": 1.5, **IDS},
    "bias": {"logit_bias": {"50": 5.0, "60": 5.0}, **IDS},
    "allowed": {"allowed_token_ids": list(range(60, 90)), **IDS},
    "prompt's log-probs": {"prompt_logprobs": 1, **IDS},
    "echo": {"echo": True, "ignore_eos": True},
    "truncated prompt": {"truncate_prompt_tokens": 5, **IDS},
    "log-probs": {"logprobs": 3, "ignore_eos": True},
    "repetitions": {"repetition_detection": {"max_pattern_size": 3, "min_count": 3}, **IDS},
    "special tokens": {"skip_special_tokens": False},
    "one of the likeliest": {"temperature": 1.0, "top_k": 1, "seed": 7, **IDS},
    "object": {"response_format": {"type": "json_object"}},
    "choice": {"structured_outputs": {"choice": ["positive", "negative"]}},
}
#: Of a choice: what must be equal.
EQUAL = ("text", "token_ids", "finish_reason", "stop_reason", "prompt_token_ids")


#: Servers: one sends each token as it comes, the other joins tokens, as a busy one does.
SERVERS = {
    "each": ("--enable-scale-out", "--enable-prompt-tokens-details"),
    "joined": ("--enable-scale-out", "--enable-prompt-tokens-details", "--stream-interval", "4"),
}


@pytest.fixture(scope="module")
def urls(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    logs = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(
                servers.serving(models[0], logs, *flags, dev_mode=True, core=core)
            )
            for core, (name, flags) in enumerate(SERVERS.items())
        }
        yield {name: server.wait() for name, server in started.items()}


async def answers(
    urls: dict[str, str], policy: Path, body: dict[str, Any], path: str = "/v1/completions"
) -> tuple[Any, Any]:
    """Of a server, and of a gateway before both that cuts."""
    options = Options(
        policy=str(policy), instances=[*urls.values()], port=0, start_version="auto", grace_s=1
    )
    service = Service(options, lambda line: None)
    await service.open()
    try:
        ours = await said(service.url, body, path)
        return (await said(urls["each"], body, path), ours)
    finally:
        await service.close()


def events(text: str) -> list[Any]:
    data = [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data")]
    return [json.loads(one) if one != "[DONE]" else one for one in data]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "chunks.toml"
    path.write_text(POLICY)
    return path


@pytest.mark.parametrize("field", FIELDS)
def test_a_whole_answer_equals_the_servers_own(
    field: str, urls: dict[str, str], policy: Path
) -> None:
    body = {**BODY, **FIELDS[field]}
    own, ours = asyncio.run(answers(urls, policy, body))
    if field == "nothing":
        assert len({one["instance"] for one in ours["rollout_sched"]["segments"]}) == 2
    (own_choice,), (our_choice,) = own["choices"], ours["choices"]
    assert {k: our_choice.get(k) for k in EQUAL} == {k: own_choice.get(k) for k in EQUAL}
    assert ours["usage"] == own["usage"]
    assert (our_choice.get("prompt_logprobs") is None) == (
        own_choice.get("prompt_logprobs") is None
    )
    if own_choice["logprobs"]:
        for name in ("tokens", "text_offset"):
            assert our_choice["logprobs"][name] == own_choice["logprobs"][name]
        assert our_choice["logprobs"]["token_logprobs"] == pytest.approx(
            own_choice["logprobs"]["token_logprobs"], abs=1e-3
        )


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("field", ["nothing", "ids", "stop string", "frequency", "object"])
def test_a_chat_equals_the_servers_own_or_says_that_it_cannot(
    field: str, streamed: bool, urls: dict[str, str], policy: Path
) -> None:
    asked = {**BODY, **FIELDS[field], "logprobs": True, "top_logprobs": 2, "stream": streamed}
    asked["messages"] = [{"role": "user", "content": asked.pop("prompt")}]
    own, ours = asyncio.run(answers(urls, policy, asked, "/v1/chat/completions"))
    if not streamed:
        (own,), (ours,) = own["choices"], ours["choices"]
        assert (ours["finish_reason"], ours["stop_reason"]) == (
            own["finish_reason"],
            own["stop_reason"],
        )
        assert ours["message"]["content"] == own["message"]["content"]
        names = [[item["token"] for item in one["logprobs"]["content"]] for one in (own, ours)]
        assert names[0] == names[1]
    elif "error" in ours[-1]:
        assert "cannot be resumed" in ours[-1]["error"]["message"]
    else:
        texts = [
            "".join([choice["delta"].get("content") or "" for choice in all_choices(found)])
            for found in (own, ours)
        ]
        assert texts[0] == texts[1]


def all_choices(found: list[Any]) -> list[Any]:
    assert found[-1] == "[DONE]"
    return [choice for event in found[:-1] for choice in event["choices"]]


@pytest.mark.parametrize("mode", ["text", "derender"])
def test_text_of_generate_equals_the_servers_own(
    mode: str, urls: dict[str, str], policy: Path
) -> None:
    if mode not in str(GenerateRequest.model_fields["output_mode"].annotation):
        pytest.skip("this vLLM does not have it")
    sampling = {"temperature": 0.0, "max_tokens": 32, "logprobs": 0, "ignore_eos": True}
    body = {"token_ids": list(range(60, 70)), "sampling_params": sampling, "output_mode": mode}
    own, ours = asyncio.run(answers(urls, policy, body, "/inference/v1/generate"))
    assert {**ours["choices"][0], "weight_versions": None} == {
        **own["choices"][0],
        "weight_versions": None,
    }
    assert ours["output_mode"] == mode


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("cut", range(5, 32, 5))
def test_a_stop_string_over_a_cut_ends_the_response(
    cut: int, kept: bool, urls: dict[str, str], policy: Path
) -> None:
    body = {**BODY, "logprobs": 0, "include_stop_str_in_output": kept}
    free = asyncio.run(said(urls["each"], body, "/v1/completions"))
    names = free["choices"][0]["logprobs"]["tokens"]
    body["stop"] = [f"not {names[cut]}", names[cut - 1][-2:] + names[cut][:2]]
    own, ours = asyncio.run(answers(urls, policy, body))
    assert len(ours["rollout_sched"]["segments"]) == (own["usage"]["completion_tokens"] + 4) // 5
    (own_choice,), (our_choice,) = own["choices"], ours["choices"]
    for name in ("text", "finish_reason", "stop_reason"):
        assert our_choice[name] == own_choice[name]
    assert our_choice["logprobs"]["tokens"] == own_choice["logprobs"]["tokens"]
    assert ours["usage"] == own["usage"]


def test_a_trainers_samples_end_at_a_stop_string_over_a_cut(
    urls: dict[str, str], policy: Path
) -> None:
    async def scene() -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        own = []
        body = {**BODY, "logprobs": 0, "return_token_ids": True}
        free = (await said(urls["each"], body, "/v1/completions"))["choices"][0]
        names = free["logprobs"]["tokens"]
        stops = [[names[cut - 1][-2:] + names[cut][:3], "not there"] for cut in range(5, 32, 5)]
        for stop in stops:
            answer = await said(urls["each"], {**body, "stop": stop}, "/v1/completions")
            own.append(answer["choices"][0]["token_ids"])
        sampling = {"temperature": 0.0, "logprobs": 0}
        prompt = free["prompt_token_ids"]
        async with RolloutScheduler.from_toml(
            policy, [*urls.values()], prompts_per_step=len(stops), version="auto"
        ) as rollouts:
            await rollouts.submit(
                Prompt(stop[0], prompt, 1, 32, {**sampling, "stop": stop}) for stop in stops
            )
            await rollouts.close_submissions()
            batch = await rollouts.next_batch()
        assert batch is not None
        assert sum(len(sample.versions) for sample in batch.samples) == sum(map(len, own))
        ours = {sample.uid: sample.response_ids for sample in batch.samples}
        return {stop[0]: ids for stop, ids in zip(stops, own, strict=True)}, ours

    own, ours = asyncio.run(asyncio.wait_for(scene(), 120))
    assert ours == own


@pytest.mark.parametrize("field", sorted(FIELDS.keys() - {"prompt's log-probs"}))  # vLLM refuses it
def test_a_stream_equals_the_servers_own_or_says_that_it_cannot(
    field: str, urls: dict[str, str], policy: Path
) -> None:
    body = {**BODY, **FIELDS[field], "stream": True, "stream_options": {"include_usage": True}}
    own, ours = asyncio.run(answers(urls, policy, body))
    if "error" in ours[-1]:
        assert "cannot be resumed" in ours[-1]["error"]["message"]
        return
    assert joined(ours, ids="return_token_ids" in body) == joined(own, ids=True)


def joined(found: list[Any], *, ids: bool) -> dict[str, Any]:
    """`ids`: with token ids, which a gateway also sends to clients that did not ask for them."""
    choices = all_choices(found)
    tokens = [token for choice in choices for token in choice.get("token_ids") or () if ids]
    usage = found[-2]["usage"]
    return {
        "text": "".join([choice["text"] for choice in choices]),
        "ids": tokens,
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "stop": [choice.get("stop_reason") for choice in choices][-1],
        "usage": {name: usage[name] for name in ("prompt_tokens", "completion_tokens")},
    }


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("field", sorted(FIELDS.keys() - {"prompt's log-probs"}))
def test_a_simulated_server_would_say_the_same_with_these_tokens(
    field: str,
    streamed: bool,
    server: str,
    urls: dict[str, str],
    models: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The text of each event, what it holds back, why it stopped, and the place of each token."""
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    monkeypatch.setattr(
        fields.text, "decode", lambda ids, _: tokenizer.decode(ids, skip_special_tokens=True)
    )
    body = {**BODY, "logprobs": 0, **FIELDS[field], "stream": streamed, "return_token_ids": True}
    found = asyncio.run(said(urls[server], body, "/v1/completions"))
    events = [event for event in found if event != "[DONE]"] if streamed else [found]
    output = OutputText(body, events[0]["choices"][0]["prompt_token_ids"], CHARACTERS)
    prompt, offset = body.get("echo", False), 0
    for event in events:
        (choice,) = event["choices"]
        ids, told = choice["token_ids"], choice["logprobs"]
        ours = output.read(ids, choice["finish_reason"])
        assert ours.text == choice["text"]
        assert ours.stop == choice.get("stop_reason")
        names = output.names(ids)
        if not prompt and "</s>" not in told["tokens"]:  # the end, which a simulated one lacks
            assert told["tokens"] == names
            assert told["text_offset"] == [
                offset + len("".join(names[:n])) for n in range(len(ids))
            ]
        offset += len("".join(names))


def test_a_simulated_server_bans_the_same_tokens(
    urls: dict[str, str], models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token that a bad word of one to three tokens changes."""
    tokenizer = AutoTokenizer.from_pretrained(models[0])

    def spelled(text: str, _: object) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    monkeypatch.setattr(fields.text, "spelled", spelled)
    body = {**BODY, **FIELDS["allowed"]}

    async def made(**further: Any) -> list[int]:
        answer = await said(urls["each"], {**body, **further}, "/v1/completions")
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    free, lengths = asyncio.run(made()), set()
    for length in range(1, 4):
        for at in range(len(free) - length):
            word = tokenizer.decode(free[at : at + length])
            if spelled(word.lstrip(), None) != free[at : at + length]:
                continue
            ours = Sampler({"bad_words": [word]}, free[:1], CHARACTERS, fresh=False).drawn(free)
            own = asyncio.run(made(bad_words=[word]))
            changed = next(n for n, token in enumerate(free) if ours[n] != token)
            assert own[:changed] == free[:changed]
            assert own[changed] != free[changed]
            lengths.add(length)
            break
    assert lengths == {1, 2, 3}


async def said(url: str, body: dict[str, Any], path: str) -> Any:
    async with aiohttp.ClientSession() as session, session.post(f"{url}{path}", json=body) as got:
        text = await got.text()
        assert got.status == 200, text
        return events(text) if body.get("stream") else json.loads(text)
