"""A client's call that is aborted at the gateway is answered with what it has, as by an engine; an
abort at an instance, for which nobody has asked here, is one more cut that is joined."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rollout_sched.client import Prompt, RolloutScheduler
from rollout_sched.simulators.fake_instance.server import EngineName
from tests import virtual_net
from tests.integrations.faults.fleet import GREEDY, SPEC, House, answered, house, response

SLOW = 200.0  # tokens of a request in a second
LONG = 400
TWO_SLOTS = msgspec.structs.replace(SPEC, max_num_seqs=2)
PROMPTS = [[n + 1, n + 2, n + 3] for n in range(6)]


def generate(prompt: list[int], **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": LONG, "temperature": 0.0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **more}


async def post(url: str, path: str, body: Any) -> Any:
    async with aiohttp.ClientSession(url) as session, session.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return msgspec.json.decode(await answer.read() or b"null")


async def abort_until_idle(url: str) -> None:
    """As slime does it at every server that is listed (2026-08: server_control.py)."""
    while True:
        await post(url, "/abort_request", {"abort_all": True})
        async with aiohttp.ClientSession(url) as session:
            loads = await (await session.get("/v1/loads?include=core")).json()
        if not sum(each["num_running_reqs"] for each in loads.get("loads", ())):
            return
        await asyncio.sleep(3)


async def end_the_step(the: House, *, list_itself: bool) -> None:
    async with aiohttp.ClientSession(the.url) as session:
        listed = (await (await session.get("/workers")).json())["workers"]
        urls = (await (await session.get("/list_workers")).json())["urls"]
    assert urls == [each["url"] for each in listed]
    assert urls == [the.name(0), the.name(1), *([the.url] if list_itself else [])]
    await asyncio.gather(*(abort_until_idle(url) for url in urls))


def test_slime_takes_back_what_was_made_and_goes_on_from_it(tmp_path: Path) -> None:
    """Its partial rollout: it aborts at every listed server, running responses and those that still
    wait here, and gives the tokens with the next step's prompts. Without the gateway in the list,
    the responses go on."""

    async def scene(*, list_itself: bool) -> tuple[list[Any], float]:
        folder = tmp_path / str(list_itself)
        folder.mkdir()
        loop = asyncio.get_running_loop()
        async with house(
            folder, dialect="sglang", speed=SLOW, spec=TWO_SLOTS, list_itself=list_itself
        ) as the:
            calls = [
                asyncio.ensure_future(post(the.url, "/generate", generate(p))) for p in PROMPTS
            ]
            await asyncio.sleep(0.5)
            began = loop.time()
            ending = asyncio.ensure_future(end_the_step(the, list_itself=list_itself))
            answers, seconds = await asyncio.gather(*calls), loop.time() - began
            await ending
            return list(answers), seconds

    answers, seconds = virtual_net.run(scene(list_itself=True))
    assert seconds < LONG / SLOW / 4
    lengths = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        made, meta = answer["output_ids"], answer["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert made == response(prompt, [(0, LONG)])[: len(made)]
        assert bool(answer["text"]) == bool(made)
        assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) == len(made)
        lengths.append(len(made))
    assert sum(length > 0 for length in lengths) == 4  # two instances of two slots
    answers, seconds = virtual_net.run(scene(list_itself=False))
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"length"}
    assert seconds > LONG / SLOW / 2


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_only_those_of_one_id_are_aborted_at_either_engine(
    tmp_path: Path, dialect: EngineName
) -> None:
    """An id of SGLang stands for all that begin with it."""

    async def scene() -> list[str]:
        async with house(tmp_path, dialect=dialect, speed=SLOW) as the:
            named = [generate(PROMPTS[0], rid=rid) for rid in ("a-1", "a-2", "b-1")]
            calls = [asyncio.ensure_future(post(the.url, "/generate", body)) for body in named]
            await asyncio.sleep(0.5)
            told = await post(the.url, "/abort_request", {"rid": "a-"})
            assert told == {"status": "aborted", "aborted": 2}
            assert (await post(the.url, "/abort_request", {}))["aborted"] == 0
            answers = await asyncio.gather(*calls)
            return [answer["meta_info"]["finish_reason"]["type"] for answer in answers]

    assert virtual_net.run(scene()) == ["abort", "abort", "length"]


COMPLETION = {"prompt": PROMPTS[0], "max_tokens": LONG, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"presence_penalty": 0.5}])
def test_openais_calls_end_with_abort(tmp_path: Path, more: dict[str, Any], stream: bool) -> None:
    """Also those whose response could not go on; the trainer's batch is not touched."""
    body = {**COMPLETION, **GREEDY, "return_token_ids": True, "stream": stream, **more}

    async def scene() -> tuple[list[int], list[Any]]:
        async with (
            house(tmp_path, speed=SLOW, prompts_per_step=1) as the,
            aiohttp.ClientSession(the.url) as session,
            RolloutScheduler.connect(the.url) as rollouts,
        ):
            await rollouts.submit([Prompt("g", PROMPTS[1], 1, LONG, GREEDY)])
            batch = asyncio.ensure_future(rollouts.next_batch())
            call = asyncio.ensure_future(answered(session, "/v1/completions", body))
            await asyncio.sleep(0.5)
            assert (await post(the.url, "/abort_requests", {}))["aborted"] == 1
            ids, spans, choices = await call
            assert spans == [(0, len(ids))]
            (sample,) = (await batch).samples
            assert sample.response_ids == response(PROMPTS[1], [(0, LONG)])
            assert the.anomalies == {}
            return ids, choices

    ids, choices = virtual_net.run(scene())
    assert 0 < len(ids) < LONG
    assert [c["finish_reason"] for c in choices if c.get("finish_reason")] == ["abort"]
    if not more:
        assert ids == response(PROMPTS[0], [(0, LONG)])[: len(ids)]


def test_a_call_is_named_by_its_request_id(tmp_path: Path) -> None:
    """By the client's own, or as vLLM makes an id of it; several responses end together."""

    async def scene(given: str) -> list[str]:
        folder = tmp_path / given
        folder.mkdir()
        async with house(folder, speed=SLOW) as the, aiohttp.ClientSession(the.url) as session:

            async def ask(name: str) -> Any:
                body, head = {**COMPLETION, "n": 2}, {"X-Request-Id": name}
                async with session.post("/v1/completions", json=body, headers=head) as answer:
                    return await answer.json()

            calls = [asyncio.ensure_future(ask(name)) for name in ("mine", "other")]
            await asyncio.sleep(0.5)
            ids = {"request_ids": [given]}
            assert (await post(the.url, "/inference/v1/abort_requests", ids))["aborted"] == 2
            answers = await asyncio.gather(*calls)
            return [c["finish_reason"] for answer in answers for c in answer["choices"]]

    for given in ("mine", "cmpl-mine-0"):
        assert virtual_net.run(scene(given)) == ["abort", "abort", "length", "length"]
