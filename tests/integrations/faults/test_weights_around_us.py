"""A trainer that pauses, loads, labels and resumes the instances by itself, beside the gateway.

The text of a simulated server tells which version made each token, so labels are held against the
tokens themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rollout_sched.client import Prompt, Reload, RolloutScheduler
from rollout_sched.core.model.events import WeightsUpdated
from rollout_sched.live.instances.versions import AROUND_US, US
from tests.integrations.faults.fleet import (
    GREEDY,
    SETTINGS,
    House,
    answered,
    events,
    house,
    response,
)
from tests.integrations.gateway.test_fleet import checkpoint
from tests.live.scripted import until

#: Patient with tokens that stand still: on a busy machine they do.
PATIENT = msgspec.structs.replace(SETTINGS, stall_s=30.0, forgotten_s=20.0, abort_timeout_s=20.0)
PROMPTS = [[n + 1, n + 2, n + 3] for n in range(6)]
TOKENS = 400
#: Tokens of a request in a second: so slow that what is to happen in the middle of a response does,
#: however busy the machine is; and then as fast as can be.
SLOW = 20.0
FAST = 1000.0
GENERATE = "/inference/v1/generate"


async def load_around_us(the: House, version: int, mode: str, *numbers: int) -> None:
    """As a trainer does it with the instances' own calls."""
    clients = [the.clients[number] for number in numbers or range(len(the.clients))]
    for client in clients:
        assert (await client.post(f"/pause?mode={mode}&clear_cache=true"))[0] == 200
    for client in clients:
        await label(client, version)
    for client in clients:
        assert (await client.post("/resume"))[0] == 200


async def label(client: Any, version: int) -> None:
    status, _ = await client.post("/update_weight_version", {"new_version": str(version)})
    assert status == 200


async def until_made(the: House, tokens: int) -> None:
    """Wherever: who was aborted may all go on on one of them."""

    async def made() -> float:
        metric = "vllm:generation_tokens_total"
        return sum([await client.metric(metric) for client in the.clients])

    before = await made()
    async with asyncio.timeout(30):
        while await made() < before + tokens:
            await asyncio.sleep(0.01)


async def until_all_have_begun(the: House) -> None:
    """Of a fleet of one: every response has tokens."""
    (client,) = the.clients
    await client.until_running(len(PROMPTS))
    await until_made(the, 2 * len(PROMPTS))


def versions(the: House) -> list[int]:
    return [instance.version for instance in the.driver.view.instances]


Ask = Callable[[House], Awaitable[list[list[int]]]]


def as_clients(*, stream: bool) -> Ask:
    """Everybody at once; the versions of each response, as labelled."""

    async def one(session: aiohttp.ClientSession, prompt: list[int]) -> list[int]:
        sampling = {**GREEDY, "max_tokens": TOKENS}
        body = {"token_ids": prompt, "sampling_params": sampling, "stream": stream}
        ids, spans, choices = await answered(session, GENERATE, body)
        assert ids == response(prompt, spans), spans
        assert len(ids) == TOKENS
        told = [choice["weight_versions"] for choice in choices if choice["finish_reason"]]
        assert told == [merged(spans)], "as the server would word it"
        return [version for version, _ in spans]

    async def ask(the: House) -> list[list[int]]:
        async with aiohttp.ClientSession(the.url) as session:
            return await asyncio.gather(*(one(session, prompt) for prompt in PROMPTS))

    return ask


def merged(spans: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """vLLM's wording of (version, tokens)."""
    worded: list[dict[str, Any]] = []
    end = 0
    for version, tokens in spans:
        start, end = end, end + tokens
        if worded and worded[-1]["version"] == str(version):
            worded[-1]["end"] = end
        else:
            worded.append({"version": str(version), "start": start, "end": end})
    return worded


async def as_trainer(the: House) -> list[list[int]]:
    async with RolloutScheduler.connect(the.url) as rollouts:
        await rollouts.submit(
            Prompt(f"g{n}", ids, 2, TOKENS, GREEDY) for n, ids in enumerate(PROMPTS)
        )
        await rollouts.close_submissions()
        samples = [s async for batch in rollouts.batches() for s in batch.samples]
    assert len(samples) == 2 * len(PROMPTS)
    for sample in samples:
        spans = [(span.version, span.end - span.start) for span in sample.segments]
        assert sample.response_ids == response(PROMPTS[int(sample.uid[1:])], spans), spans
        assert 0 <= sample.staleness <= 3
    return [[span.version for span in sample.segments] for sample in samples]


WAYS: dict[str, tuple[Ask, int]] = {
    "unary": (as_clients(stream=False), 0),
    "streamed": (as_clients(stream=True), 0),
    "trainer": (as_trainer, 0),
    "trainer, streamed": (as_trainer, 4),
}


@pytest.mark.parametrize("mode", ["keep", "abort"])
@pytest.mark.parametrize("way", WAYS)
async def test_every_token_has_the_servers_version(tmp_path: Path, way: str, mode: str) -> None:
    ask, stream_every = WAYS[way]
    async with house(tmp_path, settings=PATIENT, stream_every=stream_every, speed=SLOW) as the:
        asking = asyncio.create_task(ask(the))
        for version in (1, 2):
            await until_made(the, 30)
            await load_around_us(the, version, mode)
        await until_made(the, 30)
        the.set_speed(FAST)
        labelled = await asking
        assert {version for each in labelled for version in each} >= {1, 2}
        await until(lambda: versions(the) == [2, 2])
        assert the.driver.view.run.version == 2
        assert the.driver.versions.version_of(the.name(0)).driven_by is AROUND_US
        assert the.anomalies == {}


async def test_a_lagging_instance_holds_the_version_of_the_fleet(tmp_path: Path) -> None:
    async with house(tmp_path, settings=PATIENT) as the:
        await load_around_us(the, 3, "keep", 1)
        await until(lambda: versions(the) == [0, 3])
        assert the.driver.view.run.version == 3
        assert the.driver.view.run.fleet_version == 0
        await load_around_us(the, 3, "keep", 0)
        await until(lambda: versions(the) == [3, 3])


async def test_an_instance_that_another_has_paused_is_sent_nothing(tmp_path: Path) -> None:
    async with house(tmp_path, settings=PATIENT) as the:
        await the.clients[0].post("/pause?mode=keep")
        await until(lambda: the.driver.versions.gate(the.name(0)))
        answered = await as_clients(stream=False)(the)
        assert len(answered) == len(PROMPTS)
        assert await the.clients[0].metric("vllm:generation_tokens_total") == 0
        await the.clients[0].post("/resume")
        await until(lambda: not the.driver.versions.gate(the.name(0)))
        assert await as_clients(stream=False)(the)
        assert await the.clients[0].metric("vllm:generation_tokens_total") > 0


async def test_a_paused_instance_is_not_taken_for_stuck(tmp_path: Path) -> None:
    impatient = msgspec.structs.replace(PATIENT, stall_s=1.0)
    async with house(tmp_path, 1, settings=impatient, speed=SLOW) as the:
        asking = asyncio.create_task(as_clients(stream=True)(the))
        await until_all_have_begun(the)
        await the.clients[0].post("/pause?mode=keep")
        await until(lambda: the.driver.versions.gate(the.name(0)))
        await asyncio.sleep(2.0)  # far longer than its tokens may stand still
        assert versions(the) == [0], "it is not lost"
        await load_around_us(the, 1, "keep")
        the.set_speed(FAST)
        assert [set(each) for each in await asking] == [{0, 1}] * len(PROMPTS)


async def test_a_trainer_that_publishes_what_it_has_loaded_is_understood(tmp_path: Path) -> None:
    """We may have seen it before it says so."""
    async with house(tmp_path, settings=PATIENT) as the:
        await load_around_us(the, 1, "keep")
        await until(lambda: versions(the) == [1, 1])
        async with RolloutScheduler.connect(the.url) as rollouts:
            await rollouts.publish_weights(1, weights(tmp_path), wait=True)
            await rollouts.publish_weights(2, weights(tmp_path), wait=True)
        assert versions(the) == [2, 2]
        assert the.driver.versions.version_of(the.name(0)).driven_by is US


class TestBackFromTheDead:
    async def test_a_restarted_instance_waits_for_its_version(self, tmp_path: Path) -> None:
        """The trainer loads around us, so nobody but it can bring the weights back."""
        async with house(tmp_path, settings=PATIENT) as the:
            await load_around_us(the, 1, "keep")
            await until(lambda: versions(the) == [1, 1])
            await the.servers[0].restart(0.05)
            supervisor = the.driver.supervisors[the.name(0)]
            await until(lambda: "version 0, the trainer is at 1" in supervisor.reason)
            labelled = await as_clients(stream=False)(the)
            assert labelled == [[1]] * len(PROMPTS)
            await label(the.clients[0], 1)
            await until(lambda: versions(the) == [1, 1])

    async def test_a_restarted_instance_is_loaded_where_we_know_how(self, tmp_path: Path) -> None:
        """Without stopping the other."""
        names = []
        async with house(tmp_path, settings=PATIENT) as the:
            names.extend(the.name(number) for number in range(2))
            async with RolloutScheduler.connect(the.url) as rollouts:
                await rollouts.publish_weights(1, weights(tmp_path), wait=True)
            await the.servers[0].restart(0.05)
            await until(lambda: len(versions(the)) == 1)
            await until(lambda: versions(the) == [1, 1] and loaded(the))
            _, told = await the.clients[0].get("/weight_info")
            assert told == {"weight_version": "1"}
        updated = [e.instance for e in events(tmp_path) if isinstance(e, WeightsUpdated)]
        assert sorted(updated) == sorted([*names, names[0]])

    async def test_a_restarted_instance_with_old_weights_waits(self, tmp_path: Path) -> None:
        async with house(tmp_path, settings=PATIENT) as the:
            await load_around_us(the, 5, "keep")
            await until(lambda: versions(the) == [5, 5])
            await the.servers[0].restart(0.05, "4")
            supervisor = the.driver.supervisors[the.name(0)]
            await until(lambda: "version 4, the trainer is at 5" in supervisor.reason)
            assert "/weight_info reports 5" in supervisor.reason


def weights(folder: Path) -> Reload:
    """What loads any version: the same checkpoint."""
    if not (folder / "weights").exists():
        checkpoint(folder / "weights")
    return Reload(str(folder / "weights"))


def loaded(the: House) -> bool:
    version = the.driver.view.run.version
    return bool(the.driver.view.instances) and the.service.live.trainer.weights.has_loaded(version)
