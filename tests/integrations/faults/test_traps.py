"""What routers get wrong with rollouts, end to end over sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.integrations.faults.fleet import GREEDY, SETTINGS, House, house

PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


def body(path: str, prompt: list[int], **more: Any) -> dict[str, Any]:
    sampling = {**GREEDY, "max_tokens": 40}
    if path == "/v1/completions":
        return {"prompt": prompt, **sampling, **more}
    if path == "/v1/chat/completions":
        words = " ".join(f"w{token}" for token in prompt)
        return {"messages": [{"role": "user", "content": words}], **sampling, **more}
    return {"token_ids": prompt, "sampling_params": sampling, **more}


async def ask(session: aiohttp.ClientSession, path: str, asked: Any, **headers: str) -> str:
    """Whose the answer is."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with session.post(path, json=asked, headers=named) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
        return answer.headers["X-Rollout-Sched-Instance"]


@pytest.mark.parametrize("path", PATHS)
async def test_prompts_of_one_length_are_spread(tmp_path: Path, path: str) -> None:
    async with house(tmp_path, 4) as the, aiohttp.ClientSession(the.url) as session:
        prompts = [[n, n + 1, n + 2] for n in range(10, 42)]
        asking = [ask(session, path, body(path, prompt)) for prompt in prompts]
        answered = await asyncio.gather(*asking)
        assert sorted(answered.count(the.name(n)) for n in range(4)) == [8, 8, 8, 8]


async def test_sessions_stay_and_do_not_avalanche(tmp_path: Path) -> None:
    """When an instance goes, its conversations spread over the others and stay there."""
    # The margin: contexts are so short that one behind two others would rather leave.
    routing = '[routing]\nuse = "session_affinity"\nmargin = 16\n'
    policy = routing + '[batching]\nuse = "fully_async"\n'
    async with (
        house(tmp_path, 4, policy=policy) as the,
        aiohttp.ClientSession(the.url) as session,
    ):
        names = [f"s{n}" for n in range(16)]

        async def turn(number: int) -> list[str]:
            """Everybody asks at once."""
            return await asyncio.gather(
                *(
                    ask(session, PATHS[0], body(PATHS[0], [number, n]), X_Session_ID=name)
                    for n, name in enumerate(names)
                )
            )

        first = await turn(1)
        assert sorted(first.count(the.name(n)) for n in range(4)) == [4, 4, 4, 4]
        assert await turn(2) == first
        await the.servers[0].close()
        await the.until(3)
        moved = await turn(3)
        for was, now in zip(first, moved, strict=True):
            assert was in (now, the.name(0))
        spread = sorted(moved.count(the.name(n)) for n in range(4))
        assert spread[0] == 0
        assert spread[-1] <= 6  # two more at most, by what runs just then
        assert await turn(4) == moved


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_goes_is_aborted(
    tmp_path: Path, path: str, stream: bool, begun: bool
) -> None:
    """Before the first token as well as later."""
    # A token takes a hundredth of a second, or half of one; an abort waits for its end.
    patient = msgspec.structs.replace(SETTINGS, stall_s=60.0)
    async with (
        house(tmp_path, 1, speed=100.0 if begun else 2.0, settings=patient) as the,
        aiohttp.ClientSession(the.url) as session,
    ):
        asked = body(path, [1, 2, 3], stream=stream)
        asking = asyncio.create_task(session.post(path, json=asked))
        (client,) = the.clients
        await client.until_running(1)
        if begun:
            await client.until_generated(5)
        assert not stream or asking.done() == begun
        if asking.done():
            asking.result().close()
        asking.cancel()
        await client.until_running(0)
        assert await client.metric("vllm:generation_tokens_total") < 40
        await idle(the)
        outcomes = the.service.gateway.figures.counters.outcomes
        assert outcomes == {"withdrawn": 1}


async def idle(the: House) -> None:
    while the.driver.pump.scheduler.parts.requests:
        await asyncio.sleep(0.005)
