"""A gateway before two simulated servers, at work for a trainer and for clients who err."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from rollout_sched.client import Prompt, Reload, RolloutScheduler
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from rollout_sched.simulators.replay.scenario import load_scenario

UP_S = 60.0

#: Calls of a client, in turn: two that are answered, one of its own fault.
ASKED = ({"max_tokens": 40}, {"max_tokens": 10}, {"max_tokens": "many"})


async def _train(url: str, folder: Path) -> None:
    """Steps of four groups, each with new weights, without an end."""
    async with RolloutScheduler.connect(url) as rollouts:
        for step in itertools.count():
            await rollouts.submit(
                [Prompt(f"{step}-{n}", [1] * 50, samples=4, max_tokens=400) for n in range(4)]
            )
            if step:
                batch = await anext(rollouts.batches())
                (folder / str(batch.version + 1)).mkdir()
                weights = Reload(f"{folder}/{{version}}", visible_here=False)
                await rollouts.publish_weights(batch.version + 1, weights)


async def _ask(url: str) -> None:
    """One call after the other, in two sessions."""
    async with aiohttp.ClientSession(url) as client:
        for number in itertools.count():
            body = {"prompt": [1, 2, 3], **ASKED[number % len(ASKED)]}
            headers = {"X-Session-ID": f"session-{number % 2}"}
            async with client.post("/v1/completions", json=body, headers=headers) as answer:
                await answer.read()
            await asyncio.sleep(0.05)


async def _work(folder: Path, up: asyncio.Future[str], stop: asyncio.Event) -> None:
    spec = load_scenario("qwen7b-8xh100").instance
    servers = [FakeServer(EngineSettings(spec, speed=20.0, seed=seed)) for seed in range(2)]
    ports = [await server.start("127.0.0.1", 0) for server in servers]
    instances = [f"http://127.0.0.1:{port}" for port in ports]
    options = Options(
        policy="partial_rollout", instances=instances, port=0, prompts_per_step=3, grace_s=0.5
    )
    service = Service(options, lambda said: None)
    await service.open()
    work = (_train(service.url, folder), _ask(service.url))
    working = [asyncio.create_task(each) for each in work]
    up.set_result(service.url)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({*working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (*working, stopping):
            task.cancel()
        results = await asyncio.gather(*working, return_exceptions=True)
        await service.close()
        for server in servers:
            await server.close()
    for result in results:
        if not isinstance(result, asyncio.CancelledError):
            raise RuntimeError(f"its work ended by itself: {result!r}")


@contextmanager
def gateway_at_work(folder: Path) -> Iterator[str]:
    """Its URL; weights are in the `folder`. In a thread of its own; what went wrong there is raised
    at the end."""
    loop = asyncio.new_event_loop()
    up: asyncio.Future[str] = loop.create_future()
    stop, is_up = asyncio.Event(), threading.Event()
    up.add_done_callback(lambda _: is_up.set())
    failed: list[BaseException] = []

    def run() -> None:
        try:
            loop.run_until_complete(_work(folder, up, stop))
        except BaseException as error:
            failed.append(error)
        finally:
            is_up.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert is_up.wait(UP_S)
    assert up.done(), failed
    try:
        yield up.result()
    finally:
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            loop.call_soon_threadsafe(stop.set)
        thread.join(UP_S)
        assert not failed, failed
