"""A simulated server on a real socket, and a client to talk to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from rollout_sched.simulators.instance.model import CostModel, InstanceSpec

#: A step takes a simulated second, so a millisecond at the usual speed of these tests.
SPEC = InstanceSpec(
    cost=CostModel(step_s=1.0, weights_s=0.0, token_s=0.0),
    kv_blocks=1000,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    max_model_len=4000,
)
FOREVER = {"ignore_eos": True, "temperature": 0}
PROMPT = list(range(1, 9))


class Client:
    """Talks JSON to one server."""

    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self.port = port
        self.session = session

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(path) as response:
            return response.status, _decoded(await response.read())

    async def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(path, json=body, headers=named) as response:
            return response.status, _decoded(await response.read())

    async def generate(self, token_ids: list[int], **body: Any) -> Any:
        """The only choice of an answer of /inference/v1/generate."""
        sampling = {"temperature": 0, **body.pop("sampling", {})}
        status, answer = await self.post(
            "/inference/v1/generate", {"token_ids": token_ids, "sampling_params": sampling, **body}
        )
        assert status == 200, answer
        return answer["choices"][0]

    async def stream(self, path: str, body: Any) -> list[Any]:
        return [chunk async for chunk in self.chunks(path, body)]

    async def chunks(self, path: str, body: Any) -> AsyncIterator[Any]:
        """What a stream brings, up to its [DONE]."""
        done = False
        async with self.session.post(path, json={"stream": True, **body}) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.strip():
                    assert not done
                    data = line.removeprefix(b"data: ").strip()
                    done = data == b"[DONE]"
                    if not done:
                        yield msgspec.json.decode(data)
        assert done

    async def metric(self, name: str, label: str = "") -> float:
        async with self.session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.partition("{")[0].partition(" ")[0] == name and label in line
        )

    async def until_running(self, requests: int) -> None:
        while await self.metric("vllm:num_requests_running") != requests:
            await asyncio.sleep(0.002)

    async def until_generated(self, tokens: int) -> None:
        while await self.metric("vllm:generation_tokens_total") < tokens:
            await asyncio.sleep(0.002)


async def begin(client: Client, tokens: int = 5, **body: Any) -> asyncio.Task[Any]:
    """A greedy request under way that has made some tokens."""
    before = await client.metric("vllm:generation_tokens_total")
    body = {"sampling": {**FOREVER, "max_tokens": 60}, **body}
    task = asyncio.create_task(client.generate(PROMPT, **body))
    await client.until_generated(int(before) + tokens)
    return task


def _decoded(body: bytes) -> Any:
    return msgspec.json.decode(body) if body[:1] in (b"{", b"[") else body


@asynccontextmanager
async def served(
    *, speed: float = 1000.0, api_key: str = "", spec: InstanceSpec = SPEC, **settings: Any
) -> AsyncIterator[Client]:
    server = FakeServer(EngineSettings(spec, speed=speed, **settings), api_key=api_key)
    port = await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            yield Client(port, session)
    finally:
        await server.close()
