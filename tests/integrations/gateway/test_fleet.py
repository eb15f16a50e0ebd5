"""From end to end: a trainer and clients, the gateway, simulated servers, all over sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import pytest

from rollout_sched.client import Applied, Prompt, Reload, RolloutScheduler, Transfer
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from tests.simulators.fake_instance.served import SPEC, Client, served

POLICY = """
[batching]
use = "fully_async"
[freshness]
use = "bounded"
max_staleness = 2
[interruption]
use = "partial"
kv = "{kv}"
at_update = "resubmit"
"""


@asynccontextmanager
async def fleet(
    folder: Path, count: int = 2, kv: str = "recompute", **settings: Any
) -> AsyncIterator[tuple[Service, list[Client]]]:
    policy = folder / "policy.toml"
    policy.write_text(POLICY.format(kv=kv))
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(served(**settings)) for _ in range(count)]
        options = Options(
            policy=str(policy),
            instances=[f"http://127.0.0.1:{server.port}" for server in servers],
            port=0,
            prompts_per_step=4,
            grace_s=0.1,
            slots=SPEC.max_num_seqs,
        )
        service = Service(options, lambda line: None)
        try:
            await service.open()
            yield service, servers
        finally:
            await service.close()
        service.live.driver.pump.scheduler.check_invariants()


@pytest.mark.parametrize("kv", ["recompute", "retain"])
async def test_training_steps_with_real_updates(tmp_path: Path, kv: str) -> None:
    async with (
        fleet(tmp_path, kv=kv) as (service, servers),
        RolloutScheduler.connect(service.url) as rollouts,
    ):
        sampling = {"logprobs": 0, "ignore_eos": True, "temperature": 0}
        await rollouts.submit(
            Prompt(f"g{n}", [n + 1] * 5, 2, 20 + 15 * n, sampling) for n in range(12)
        )
        await rollouts.close_submissions()
        samples, steps = [], 0
        async for batch in rollouts.batches():
            steps += 1
            samples += batch.samples
            checkpoint(tmp_path / f"v{batch.version + 1}")
            apply = Reload(str(tmp_path / "v{version}"))
            await rollouts.publish_weights(batch.version + 1, apply, wait=steps == 1)
        assert sorted((s.uid, s.index) for s in samples) == sorted(
            (f"g{n}", index) for n in range(12) for index in range(2)
        )
        for sample in samples:
            tokens = 20 + 15 * int(sample.uid[1:])
            assert len(sample.response_ids) == len(sample.versions) == tokens
            assert sample.rollout_log_probs is not None
            assert len(sample.rollout_log_probs) == tokens
            assert sample.versions == sorted(sample.versions)
            assert 0 <= sample.staleness <= 2
        assert any(sample.num_interruptions for sample in samples)
        state = await rollouts.state()
        assert state["anomalies"] == {}
        for server in servers:
            status, told = await server.get("/weight_info")
            assert (status, int(told["weight_version"]) <= steps) == (200, True)


async def test_the_ranks_of_our_own_transfer_meet(tmp_path: Path) -> None:
    """Servers that wait, as NCCL does, until every rank is there once."""
    async with (
        fleet(tmp_path, world_size=2) as (service, servers),
        RolloutScheduler.connect(service.url) as rollouts,
    ):
        ranks = {"rank_offset": 1, "world_size": 5}
        info = {"master_address": uuid4().hex, "master_port": 1, **ranks}
        for version in (1, 2):
            await rollouts.publish_weights(version, Transfer({}, info), wait=True)
        for server in servers:
            assert (await server.get("/weight_info"))[1] == {"weight_version": "2"}


@pytest.mark.parametrize("trouble", ["an update", "a lost instance", "both"])
async def test_updates_are_invisible_to_clients(tmp_path: Path, trouble: str) -> None:
    async with fleet(tmp_path) as (service, servers), aiohttp.ClientSession() as session:
        alone = await servers[0].generate([1, 2, 3], sampling=_long(600))

        async def ask() -> Any:
            body = {"token_ids": [1, 2, 3], "sampling_params": _long(600)}
            url = f"{service.url}/inference/v1/generate"
            async with session.post(url, json=body) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        asking = [asyncio.create_task(ask()) for _ in range(10)]
        await asyncio.gather(*(server.until_running(5) for server in servers))
        if trouble != "a lost instance":
            body = {"version": 1, "applied": True}
            async with session.post(f"{service.url}/admin/weights", json=body) as response:
                assert response.status == 202
        if trouble != "an update":
            # The next control call that reaches it, whoever sends it, is its end.
            fault = {"fault": "restart", "on": "control", "times": 1}
            await servers[1].post("/fake/fault", fault)
            async with session.get(f"{service.url}/is_paused") as response:
                await response.read()
        answers = await asyncio.gather(*asking)
        for answer in answers:
            assert answer["choices"][0]["token_ids"] == alone["token_ids"]
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["rollout_sched"]["segments"][-1]["end"] == 600
        counters = service.gateway.figures.counters
        failed, lost = sum(counters.failed.values()), counters.gone["lost"]
        assert counters.interrupted >= (0 if trouble == "a lost instance" else 10)
        assert failed + 5 * lost >= 5 * (trouble != "an update")
        assert not service.live.driver.pump.scheduler.parts.requests


async def test_calls_that_come_together_beside_streams(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (service, _), aiohttp.ClientSession() as session:
        data_plane = service.data_plane

        async def stream(tokens: int) -> None:
            body = {"prompt": [1, 2], "max_tokens": tokens, "ignore_eos": True, "stream": True}
            async with session.post(f"{service.url}/v1/completions", json=body) as response:
                events = [line async for line in response.content if line.strip()]
            assert events[-1] == b"data: [DONE]\n"
            assert b'"length"' in events[-2]

        async def pipeline(count: int, *, stay: bool) -> int:
            """How many of the calls that one connection sends at once are answered."""
            port = int(service.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = b'{"prompt":[3],"max_tokens":4,"ignore_eos":true}'
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + (
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            )
            writer.write((head + body) * count)
            await writer.drain()
            answered = 0
            while stay and answered < count:
                answer = await reader.readuntil(b"\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 200 ")
                length = int(answer.lower().partition(b"content-length: ")[2].split()[0])
                await reader.readexactly(length)
                answered += 1
            writer.close()
            return answered

        streams = [asyncio.create_task(stream(900 + 10 * n)) for n in range(6)]
        while data_plane.calls.pacer.streams < 6:
            await asyncio.sleep(0.01)
        staying = [pipeline(5, stay=True) for _ in range(8)]
        going = [pipeline(5, stay=False) for _ in range(8)]
        assert sum(await asyncio.gather(*staying, *going)) == 40
        assert data_plane.calls.pacer.streams
        await asyncio.gather(*streams)
        while data_plane.calls.open.requests:
            await asyncio.sleep(0.01)
        assert (data_plane.calls.open.body_bytes, data_plane.calls.pacer.streams) == (0, 0)


async def test_the_fleet_runs_in_process(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY.format(kv="retain"))
    async with (
        served() as server,
        RolloutScheduler.from_toml(
            policy, [f"http://127.0.0.1:{server.port}"], prompts_per_step=2
        ) as rollouts,
    ):
        await rollouts.submit(Prompt(f"g{n}", [1, 2], 1, 9, {"ignore_eos": True}) for n in range(4))
        await rollouts.close_submissions()
        numbers = []
        async for batch in rollouts.batches():
            numbers.append(batch.number)
            assert all(len(sample.response_ids) == 9 for sample in batch.samples)
            await rollouts.publish_weights(batch.version + 1, Applied(), wait=True)
        assert numbers == [0, 1]


def checkpoint(folder: Path) -> None:
    """The smallest there is: one tensor of one number."""
    head = b'{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    folder.mkdir()
    content = len(head).to_bytes(8, "little") + head + bytes(4)
    (folder / "model.safetensors").write_bytes(content)


def _long(tokens: int) -> dict[str, Any]:
    return {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
