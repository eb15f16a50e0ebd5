"""A fleet of two real vLLM servers: interruption, new weights and death change no greedy output.

Every test starts a scheduler of its own on the same two servers, with the version they have. Texts
are compared with what a server makes of the same prompt when nobody disturbs it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import psutil
import pytest

from rollout_sched.client import Prompt, Reload, RolloutScheduler, Sample
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.integrations.vllm.http_instance import HttpInstance
from rollout_sched.live.ports import Order, Output
from rollout_sched.live.settings import Settings
from tests.vllm import servers

GREEDY = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0}
DICE = random.Random(7)
PROMPTS = [[DICE.randrange(3, 2000) for _ in range(100)] for _ in range(4)]
TOKENS = 400
LIMIT_S = 120
POLICY = """
[batching]
use = "fully_async"
[freshness]
use = "unbounded"
[interruption]
use = "partial"
kv = "{kv}"
at_update = "{at_update}"
"""
HOW = [("retain", "in_place"), ("retain", "resubmit"), ("recompute", "resubmit")]
#: What `vllm bench serve` runs.
BENCH = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
ways = pytest.mark.parametrize(("kv", "at_update"), HOW)


class Fleet:
    """Both servers, and the newest version they have; `models[version % 2]` are its weights."""

    def __init__(self, models: list[Path], logs: Path, stack: ExitStack) -> None:
        self._models = models
        self._logs = logs
        self._stack = stack
        self.version = 0
        self.servers = [self.start(core) for core in range(2)]
        self.urls = [server.wait() for server in self.servers]

    def start(self, core: int, port: int = 0) -> servers.Server:
        return self._stack.enter_context(
            servers.serving(
                self._models[0],
                self._logs,
                "--enable-scale-out",
                dev_mode=True,
                core=core,
                port=port,
            )
        )

    def revive(self, core: int) -> None:
        """A new server in the place of one that has died."""
        port = urlsplit(self.urls[core]).port
        assert port is not None
        self.servers[core] = self.start(core, port)
        self.servers[core].wait()

    def weights(self, number: int) -> str:
        return str(self._models[number])


@pytest.fixture(scope="module")
def fleet(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(models, tmp_path_factory.mktemp("logs"), stack)


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> list[Output]:
    """What the first weights make of each prompt."""
    orders = [Order(f"alone{n}", ids, TOKENS, "alone", GREEDY) for n, ids in enumerate(PROMPTS)]
    return asyncio.run(on(fleet.urls[0], *orders))


async def on(url: str, *orders: Order) -> list[Output]:
    async with instance(url) as server:
        return await asyncio.gather(*(server.generate(order) for order in orders))


@asynccontextmanager
async def instance(url: str) -> AsyncIterator[HttpInstance]:
    client = HttpInstance(url)
    try:
        await client.describe()
        yield client
    finally:
        await client.close()


async def until_all_have_made(fleet: Fleet, tokens: int) -> None:
    """Wait until each server has generated so many more tokens."""

    async def has_made(url: str) -> None:
        async with instance(url) as server:
            start = (await server.gauges()).generated_tokens
            while (await server.gauges()).generated_tokens < start + tokens:
                await asyncio.sleep(0.01)

    await asyncio.gather(*(has_made(url) for url in fleet.urls))


def policy(folder: Path, kv: str, at_update: str) -> Path:
    path = folder / "policy.toml"
    path.write_text(POLICY.format(kv=kv, at_update=at_update))
    return path


def assert_equal(sample: Sample, expected: Output) -> None:
    """Token for token; log-probs as near as other batches of the same sums allow."""
    assert sample.response_ids == expected.token_ids
    assert sample.rollout_log_probs == pytest.approx(expected.logprobs, abs=1e-4)
    assert len(sample.versions) == TOKENS


def play(scene: Any, limit_s: float = LIMIT_S) -> None:
    asyncio.run(asyncio.wait_for(scene, limit_s))


class TestTrainer:
    async def trained(
        self, fleet: Fleet, path: Path, weights: int, groups: int = len(PROMPTS)
    ) -> list[Sample]:
        """One batch, with new weights in the middle of it."""
        async with RolloutScheduler.from_toml(
            path, fleet.urls, prompts_per_step=groups, version=fleet.version
        ) as rollouts:
            await rollouts.submit(
                Prompt(f"g{n}", ids, 1, TOKENS, GREEDY) for n, ids in enumerate(PROMPTS)
            )
            await rollouts.close_submissions()
            batch = asyncio.create_task(rollouts.next_batch())
            await until_all_have_made(fleet, 60)
            assert not batch.done()
            fleet.version += 1
            new = Reload(fleet.weights(weights))
            await rollouts.publish_weights(fleet.version, new, wait=True)
            whole = await batch
            assert whole is not None
            assert (await rollouts.state())["anomalies"] == {}
            return sorted(whole.samples, key=lambda sample: sample.uid)

    @pytest.mark.real_time(LIMIT_S)
    @ways
    async def test_an_interruption_changes_nothing(
        self, fleet: Fleet, undisturbed: list[Output], tmp_path: Path, kv: str, at_update: str
    ) -> None:
        samples = await self.trained(fleet, policy(tmp_path, kv, at_update), 0)
        assert len(samples) == len(PROMPTS)
        for sample, expected in zip(samples, undisturbed, strict=True):
            assert_equal(sample, expected)
            # Spans are vLLM's own, or there would have been an anomaly.
            assert [span.version for span in sample.segments] == [
                fleet.version - 1,
                fleet.version,
            ]
            assert sample.num_interruptions == int(at_update == "resubmit")

    def test_new_weights_go_on_as_on_a_fresh_server(
        self, fleet: Fleet, undisturbed: list[Output], tmp_path: Path
    ) -> None:
        async def scene() -> None:
            samples = await self.trained(fleet, policy(tmp_path, "recompute", "resubmit"), 1)
            for sample, old in zip(samples, undisturbed, strict=True):
                before, after = sample.segments
                made = before.end
                assert sample.response_ids[:made] == old.token_ids[:made]
                assert sample.response_ids != old.token_ids
                context = [*sample.prompt_ids, *sample.response_ids[:made]]
                # A salt of its own finds nothing in the cache.
                order = Order(f"fresh{sample.uid}", context, TOKENS - made, "fresh", GREEDY)
                other = next(url for url in fleet.urls if url != after.instance)
                (fresh,) = await on(other, order)
                assert sample.response_ids[made:] == fresh.token_ids
                assert sample.rollout_log_probs is not None
                assert sample.rollout_log_probs[made:] == pytest.approx(fresh.logprobs, abs=1e-4)

        try:
            play(scene())
        finally:
            play(self.first_weights(fleet))

    async def first_weights(self, fleet: Fleet) -> None:
        fleet.version += 1
        async with RolloutScheduler.from_toml(
            "partial_rollout", fleet.urls, version=fleet.version - 1
        ) as rollouts:
            await rollouts.publish_weights(fleet.version, Reload(fleet.weights(0)), wait=True)


@asynccontextmanager
async def gateway(
    fleet: Fleet, path: Path, **options: Any
) -> AsyncIterator[tuple[Service, openai.AsyncOpenAI]]:
    """`serve` in front of both, and OpenAI's own client."""
    service = Service(
        Options(
            policy=str(path),
            instances=fleet.urls,
            port=0,
            start_version=fleet.version,
            grace_s=1.0,
            **options,
        ),
        lambda line: None,
    )
    try:
        await service.open()
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none") as client:
            yield service, client
    finally:
        await service.close()


class TestGateway:
    @pytest.mark.real_time(LIMIT_S)
    @ways
    async def test_an_interruption_is_invisible(
        self, fleet: Fleet, undisturbed: list[Output], tmp_path: Path, kv: str, at_update: str
    ) -> None:
        async with (
            gateway(fleet, policy(tmp_path, kv, at_update)) as (service, client),
            aiohttp.ClientSession(service.url) as session,
        ):
            asking = [
                asyncio.create_task(_completion(client, PROMPTS[0])),
                asyncio.create_task(_streamed_completion(client, PROMPTS[1])),
                asyncio.create_task(_generated(session, PROMPTS[2])),
                asyncio.create_task(_completion(client, PROMPTS[3])),
            ]
            await until_all_have_made(fleet, 60)
            assert not any(task.done() for task in asking)
            fleet.version += 1
            body = {"version": fleet.version, "reload": {"path": fleet.weights(0)}}
            async with session.post("/admin/weights", json=body) as response:
                assert response.status == 202, await response.text()
            answers = await asyncio.gather(*asking)
            assert answers == [output.token_ids for output in undisturbed]
            assert not service.live.driver.pump.scheduler.state.anomalies

    @pytest.mark.real_time(LIMIT_S)
    async def test_the_openai_client(self, fleet: Fleet, tmp_path: Path) -> None:
        """Through the gateway as from the server itself."""
        path = policy(tmp_path, "recompute", "resubmit")
        direct = openai.AsyncOpenAI(base_url=f"{fleet.urls[0]}/v1", api_key="none")
        async with gateway(fleet, path) as (_, client), direct:
            assert [model.id async for model in client.models.list()] == ["tiny"]
            for use in (_texts, _chats):
                expected = await use(direct)
                assert await use(client) == expected
                assert all(expected)

    @pytest.mark.real_time(LIMIT_S)
    async def test_refusals_are_vllms_own(self, fleet: Fleet, tmp_path: Path) -> None:
        path = policy(tmp_path, "recompute", "resubmit")
        async with gateway(fleet, path) as (_, client):
            with pytest.raises(openai.BadRequestError, match="temperature"):
                await client.completions.create(model="tiny", prompt="a", temperature=-1.0)
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="no such model", prompt="a")

    @pytest.mark.real_time(LIMIT_S)
    async def test_vllms_own_benchmark(self, fleet: Fleet, tmp_path: Path) -> None:
        """`vllm bench serve`, started by its module: the CPU build lacks the command's metadata."""
        path = policy(tmp_path, "recompute", "resubmit")
        async with gateway(fleet, path) as (service, _):
            options = {
                "base-url": service.url,
                "model": fleet.weights(0),
                "served-model-name": "tiny",
                "dataset-name": "random",
                "random-input-len": "32",
                "random-output-len": "16",
                "num-prompts": "40",
                "result-dir": str(tmp_path),
                "result-filename": "result.json",
            }
            told = [word for name, value in options.items() for word in (f"--{name}", value)]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", BENCH, "--ignore-eos", "--save-result", *told),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            said, _ = await process.communicate()
            assert process.returncode == 0, said.decode()[-2000:]
            result = json.loads((tmp_path / "result.json").read_text())
            assert (result["completed"], result["failed"]) == (40, 0)
            assert result["total_output_tokens"] == 40 * 16


async def _completion(client: openai.AsyncOpenAI, prompt: list[int]) -> list[int]:
    answer = await client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0.0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == TOKENS
    return list(answer.choices[0].token_ids)  # type: ignore[attr-defined]


async def _streamed_completion(client: openai.AsyncOpenAI, prompt: list[int]) -> list[int]:
    stream = await client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0.0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    made: list[int] = []
    finishes = []
    async for chunk in stream:
        for choice in chunk.choices:
            made += choice.token_ids or []  # type: ignore[attr-defined]
            finishes += [choice.finish_reason] if choice.finish_reason else []
    assert finishes == ["length"]
    return made


async def _generated(session: aiohttp.ClientSession, prompt: list[int]) -> list[int]:
    body = {"token_ids": prompt, "sampling_params": {**GREEDY, "max_tokens": TOKENS}}
    async with session.post("/inference/v1/generate", json=body) as response:
        answer = await response.json()
    (choice,) = answer["choices"]
    named = [(one["token_id"], one["token"]) for one in choice["logprobs"]["content"]]
    assert named == [(token, f"token_id:{token}") for token in choice["token_ids"]]
    assert len(named) == TOKENS
    return list(choice["token_ids"])


#: As good as greedy, which vLLM refuses where two samples are asked for.
_SHORT: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "extra_body": {"top_k": 1}}


async def _texts(client: openai.AsyncOpenAI) -> list[str]:
    whole = await client.completions.create(prompt="one two", n=2, logprobs=1, **_SHORT)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert all(c.logprobs and c.logprobs.tokens for c in whole.choices)
    texts = ["", ""]
    async for chunk in await client.completions.create(
        prompt="one two", n=2, stream=True, **_SHORT
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    return texts


async def _chats(client: openai.AsyncOpenAI) -> list[str]:
    messages: Any = [{"role": "user", "content": "one two"}]
    whole = await client.chat.completions.create(messages=messages, n=2, logprobs=True, **_SHORT)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert all(c.logprobs and c.logprobs.content for c in whole.choices)
    texts = ["", ""]
    async for chunk in await client.chat.completions.create(
        messages=messages, n=2, stream=True, **_SHORT
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    return texts


async def until_both_serve(rollouts: RolloutScheduler) -> None:
    """Joined, and with the newest weights: one that is still loaded gets nothing to do."""
    while (state := await rollouts.state())["joined"] < 2 or not state["loaded"]:
        await asyncio.sleep(0.1)


def test_a_killed_server_comes_back(
    fleet: Fleet, undisturbed: list[Output], tmp_path: Path
) -> None:
    """kill -9 of an engine in the middle of a batch, then a new server at its address, then
    kill -9 of that server's front."""

    async def scene() -> None:
        async with RolloutScheduler.from_toml(
            policy(tmp_path, "recompute", "resubmit"),
            fleet.urls,
            prompts_per_step=len(PROMPTS),
            version=fleet.version,
            stream_every=8,
            settings=Settings(poll_s=0.5, control_timeout_s=5.0),
        ) as rollouts:

            async def batch(name: str, *, kill: int | None) -> list[Sample]:
                await rollouts.submit(
                    Prompt(f"{name}{n}", ids, 2, TOKENS, GREEDY) for n, ids in enumerate(PROMPTS)
                )
                coming = asyncio.create_task(rollouts.next_batch())
                await until_all_have_made(fleet, 200)
                assert not coming.done()
                if kill is not None:
                    os.kill(kill, signal.SIGKILL)
                whole = await coming
                assert whole is not None
                return sorted(whole.samples, key=lambda sample: (sample.uid, sample.index))

            def check(name: str, samples: list[Sample]) -> None:
                keys = [(sample.uid, sample.index) for sample in samples]
                assert keys == [(f"{name}{n}", i) for n in range(len(PROMPTS)) for i in range(2)]
                for sample in samples:
                    assert_equal(sample, undisturbed[int(sample.uid[1:])])

            front = psutil.Process(fleet.servers[1].process.pid)
            (engine,) = [
                child
                for child in front.children(recursive=True)
                if child.cmdline()[0].startswith("VLLM::EngineCore")
            ]
            # A new server has the weights of its start: it is brought these before it serves.
            fleet.version += 1
            weights = Reload(fleet.weights(0))
            await rollouts.publish_weights(fleet.version, weights, wait=True)
            first = await batch("a", kill=engine.pid)
            check("a", first)
            moved = [sample for sample in first if len(sample.segments) == 2]
            assert moved
            assert all(sample.segments[0].instance == fleet.urls[1] for sample in moved)
            assert all(sample.segments[1].instance == fleet.urls[0] for sample in moved)

            fleet.servers[1].process.wait(30)
            await asyncio.to_thread(fleet.revive, 1)
            await until_both_serve(rollouts)
            check("b", await batch("b", kill=None))

            front = psutil.Process(fleet.servers[1].process.pid)
            rest = front.children(recursive=True)
            try:
                check("c", await batch("c", kill=front.pid))
            finally:
                for process in rest:
                    if process.is_running():
                        process.kill()

    if fleet.servers[1].process.poll() is not None:
        fleet.revive(1)  # this test has failed before, and is run again
    play(scene(), 2 * LIMIT_S)  # one server starts anew meanwhile
