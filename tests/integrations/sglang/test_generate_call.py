"""SGLang's `/generate` on a gateway, in front of simulated servers of either engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollout_sched.client import Reload, RolloutScheduler
from rollout_sched.simulators.fake_instance.server import EngineName
from tests import virtual_net
from tests.integrations.faults.fleet import House, house, logprobs, response
from tests.integrations.gateway.test_fleet import checkpoint

PROMPT = [1, 2, 3]

#: slime's sampling parameters, beside those of `body`; miles' body has two flags besides.
OF_SLIME = {
    "top_p": 1.0,
    "top_k": -1,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": True,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}


def body(prompt: Any = PROMPT, tokens: int = 40, **more: Any) -> dict[str, Any]:
    told = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    sampling = {**told, **more.pop("sampling", {})}
    name = "text" if isinstance(prompt, str) else "input_ids"
    return {name: prompt, "sampling_params": sampling, "return_logprob": True, **more}


async def generate(the: House, asked: dict[str, Any], url: str = "") -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(url or the.url) as session,
        session.post("/generate", json=asked) as answer,
    ):
        return answer.status, await answer.json()


def spans(answer: Any) -> list[tuple[int, int]]:
    told = answer["meta_info"]["weight_versions"]
    return [(int(span["version"]), span["end"] - span["start"]) for span in told]


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_responses_that_are_cut_by_weights_are_one(tmp_path: Path, dialect: EngineName) -> None:
    """New weights come from disk in the middle: they are cut, or moved, and go on."""

    async def scene() -> list[tuple[list[int], Any]]:
        checkpoint(folder := tmp_path / "weights")
        prompts = [[n + 1, n + 2, n + 3] for n in range(6)]
        async with house(tmp_path, dialect=dialect, stream_every=4, speed=200.0) as the:
            calls = [asyncio.ensure_future(generate(the, body(p, 200))) for p in prompts]
            await asyncio.sleep(0.3)  # of 200 tokens, some 60
            async with RolloutScheduler.connect(the.url) as trainer:
                await trainer.publish_weights(1, Reload(str(folder)))
            return list(zip(prompts, await asyncio.gather(*calls), strict=True))

    cut = 0
    for prompt, (status, answer) in virtual_net.run(scene()):
        meta = answer["meta_info"]
        assert status == 200, answer
        assert answer["output_ids"] == response(prompt, spans(answer))
        told = [(token, value) for value, token, _ in meta["output_token_logprobs"]]
        assert told == list(zip(answer["output_ids"], logprobs(prompt, 200), strict=True))
        assert meta["completion_tokens"] == meta["finish_reason"]["length"] == 200
        assert meta["weight_version"] == str(spans(answer)[-1][0])
        cut += len(spans(answer)) > 1
    assert cut


def test_an_answer_equals_a_sglang_servers(tmp_path: Path) -> None:
    """Whole and streamed, of ids and of text, at its limit and at a stop string: the same text,
    tokens and reasons in front of either engine as from such a server itself."""

    async def scene(dialect: EngineName, direct: bool) -> list[Any]:
        folder = tmp_path / f"{dialect}{direct}"
        folder.mkdir()
        async with house(folder, 1, dialect=dialect) as the:
            url = the.name(0) if direct else ""
            _, first = await generate(the, body(), url)
            stop = first["text"].split()[12]
            asked = [
                body("a b c"),
                body(sampling={"stop": [stop], "ignore_eos": False}),
                body(sampling={"stop": stop, "no_stop_trim": True}),
                body(sampling={"stop_token_ids": [first["output_ids"][5]]}, rid="own"),
                body(sampling=OF_SLIME, return_routed_experts=False, return_indexer_topk=False),
            ]
            answers = [first] + [(await generate(the, each, url))[1] for each in asked]
            return [shape(answer) for answer in answers]

    own = virtual_net.run(scene("sglang", True))
    assert virtual_net.run(scene("sglang", False)) == own
    assert virtual_net.run(scene("vllm", False)) == own


def shape(answer: Any) -> Any:
    told = answer["meta_info"]
    names = ("finish_reason", "prompt_tokens", "completion_tokens", "output_token_logprobs")
    return answer["text"], answer["output_ids"], {name: told[name] for name in names}


def test_a_stream_has_one_event_and_ends_as_sglangs(tmp_path: Path) -> None:
    async def scene() -> tuple[Any, bytes]:
        async with house(tmp_path, 1, dialect="sglang") as the:
            _, whole = await generate(the, body())
            async with (
                aiohttp.ClientSession(the.url) as session,
                session.post("/generate", json=body(stream=True)) as answer,
            ):
                return whole, await answer.read()

    whole, stream = virtual_net.run(scene())
    event, done, rest = stream.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert f'"text":"{whole["text"]}"'.encode() in event


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"input_ids": None}, "either input_ids or text"),
        ({"input_ids": [[1], [2]]}, "Expected `int`"),
        ({"sampling_params": {"n": 2}}, "'n' is not supported"),
        ({"sampling_params": {"max_new_tokens": 0}}, "Expected `int` >= 1"),
        ({"image_data": ["x"]}, "unknown field `image_data`"),
        ({"session_id": "x" * 1000}, "`session_id` is longer"),
    ],
)
def test_what_has_no_meaning_here_is_refused(tmp_path: Path, wrong: Any, told: str) -> None:
    async def scene() -> tuple[int, Any]:
        async with house(tmp_path, 1) as the:
            return await generate(the, {**body(), **wrong})

    status, answer = virtual_net.run(scene())
    assert status == 400
    assert told in answer["error"]["message"]


def test_openais_calls_are_refused_by_name_in_front_of_sglang(tmp_path: Path) -> None:
    async def scene() -> tuple[int, Any]:
        async with (
            house(tmp_path, 1, dialect="sglang") as the,
            aiohttp.ClientSession(the.url) as session,
            session.post("/v1/completions", json={"prompt": [1], "max_tokens": 4}) as answer,
        ):
            return answer.status, await answer.json()

    status, answer = virtual_net.run(scene())
    assert status == 400
    assert "SGLang servers: POST /generate" in answer["error"]["message"]
