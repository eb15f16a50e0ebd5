"""Fronts with ports of their own before one scheduler, which may go and come again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rollout_sched.config import load_policy
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.data_plane.data_plane import DataPlane
from rollout_sched.integrations.gateway.families import MetricsPage
from rollout_sched.integrations.gateway.front_service import (
    FrontClients,
    FrontInstance,
    FrontService,
    front_metrics,
)
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.vllm.http_instance import HttpInstance
from rollout_sched.link.front import FrontCalls
from rollout_sched.link.host import Hub
from rollout_sched.live.live_scheduler import LiveScheduler
from rollout_sched.live.ports import InstanceError, Order
from rollout_sched.live.settings import RunOptions, Settings
from rollout_sched.live.trainer.samples import Prompt
from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from rollout_sched.simulators.replay.scenario import load_scenario
from tests.integrations.vllm.scripted import ScriptedVllm
from tests.link.wires import Shared
from tests.live.scripted import until

SPEC = load_scenario("tiny-cpu-2").instance
SETTINGS = Settings(poll_s=0.2, abort_timeout_s=1.0)

#: Enough for a scheduler to go in the middle.
TOKENS = 400
BODY = {"prompt": [5, 6, 7], "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
GENERATE = {
    "token_ids": [5, 6, 7],
    "sampling_params": {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True},
}


class Scene:
    """Instances, a scheduler that may be replaced, and fronts joined to it within this process."""

    def __init__(self, servers: dict[str, FakeServer], store: Path | None) -> None:
        self.servers = servers
        self.fronts: dict[str, FrontService] = {}
        self.live: LiveScheduler
        self.hub: Hub
        self._store = store

    async def begin(self, policy: str = "partial_rollout") -> None:
        """A scheduler starts."""
        options = RunOptions(prompts_per_step=1, stream_every=4, store=self._store)
        self.live = LiveScheduler(load_policy(policy), options, settings=SETTINGS)
        self.hub = Hub(self.live)
        for url in self.servers:
            await self.live.driver.add_instance(HttpInstance(url))
        for front in self.fronts.values():
            self.connect(front)

    async def end(self) -> None:
        """It stops, and its fronts see that."""
        for front in self.fronts.values():
            front.calls.disconnected()
        await self.live.close()

    def connect(self, front: FrontService) -> None:
        hub, loop, name = self.hub, asyncio.get_running_loop(), front.name

        def up(frame: bytes) -> None:
            loop.call_soon(lambda: self.hub is hub and hub.receive(name, frame))

        def down(frame: bytes) -> None:
            loop.call_soon(front.calls.receive, frame)

        front.calls.connect(hub.connect(name, down), up)

    async def front(self, name: str, **options: Any) -> FrontService:
        front = self.fronts[name] = FrontService(
            name, Options(policy="", port=0, grace_s=0.5, **options)
        )
        await front.open()
        self.connect(front)
        return front


@asynccontextmanager
async def scene(instances: int = 1, store: Path | None = None) -> AsyncIterator[Scene]:
    made = [FakeServer(EngineSettings(SPEC, speed=1.0, seed=1)) for _ in range(instances)]
    servers = {f"http://127.0.0.1:{await one.start('127.0.0.1', 0)}": one for one in made}
    one = Scene(servers, store)
    await one.begin()
    try:
        yield one
    finally:
        for front in one.fronts.values():
            await front.close()
        await one.live.close()
        for server in made:
            await server.close()


async def post(url: str, path: str, body: Any) -> Any:
    async with aiohttp.ClientSession() as client, client.post(url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def stream(url: str, path: str, body: Any, begun: asyncio.Event | None = None) -> list[Any]:
    asked, events, last = {**body, "stream": True}, [], b""
    async with aiohttp.ClientSession() as client, client.post(url + path, json=asked) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
                if begun is not None:
                    begun.set()
            last = line if line.strip() else last
    assert last == b"data: [DONE]\n"
    return events


def text_of(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


def ids_of(answer: Any) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def covered(said: Any) -> int:
    """Tokens that the segments of an answer cover, one after the other."""
    end = 0
    for segment in said["rollout_sched"]["segments"]:
        assert segment["start"] == end
        end = segment["end"]
    return end


async def test_clients_are_answered_through_a_front() -> None:
    async with scene() as made:
        front = await made.front("f0")
        asked = made.live.driver.view
        answer = await post(front.url, "/v1/completions", {**BODY, "max_tokens": 8})
        assert answer["usage"]["completion_tokens"] == 8
        assert covered(answer) == 8
        events = await stream(front.url, "/v1/completions", {**BODY, "max_tokens": 8})
        assert text_of(events) == answer["choices"][0]["text"]
        assert "token_ids" not in answer["choices"][0]
        assert not asked.in_flight
        assert not len(front.calls)


async def test_other_requests_go_to_the_scheduler() -> None:
    async with scene() as made, aiohttp.ClientSession() as client:
        named = await made.front("f0")
        named.app.scheduler_url = "http://host:9000"
        front = await made.front("f1")
        path = "/rollout/state?x=1"
        async with client.get(named.url + path, allow_redirects=False) as answer:
            assert answer.status == 307
            assert answer.headers["Location"] == f"http://host:9000{path}"
        async with client.post(front.url + "/update_weights", data=b"{}") as answer:
            assert answer.status == 404
            assert "the scheduler's process" in await answer.text()
        async with client.get(front.url + "/health") as answer:
            assert answer.status == 200
        async with client.get(front.url + "/metrics") as answer:
            assert "rollout_sched_scheduler_connected 1.0" in await answer.text()
        front.calls.disconnected()
        async with client.get(front.url + "/health") as answer:
            assert answer.status == 503
        async with client.get(front.url + "/liveness") as answer:
            assert answer.status == 200


async def test_before_its_first_scheduler_a_front_says_so() -> None:
    front = FrontService("f0", Options(policy="", port=0, grace_s=0.1))
    await front.open()
    async with aiohttp.ClientSession() as client:
        async with client.post(front.url + "/v1/completions", json=BODY) as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
        async with client.get(front.url + "/health") as answer:
            assert answer.status == 503
    await front.close()


async def test_a_front_checks_client_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    async with scene() as made, aiohttp.ClientSession() as client:
        front = await made.front("f0", api_key_file=keys)
        async with client.post(front.url + "/v1/completions", json=BODY) as answer:
            assert answer.status == 401
        headers = {"Authorization": "Bearer sesame"}
        body = {**BODY, "max_tokens": 4}
        url = front.url + "/v1/completions"
        async with client.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("pause_s", [0.0, 0.3])
async def test_a_scheduler_that_restarts_costs_clients_a_pause(pause_s: float) -> None:
    async with scene(instances=2) as made:
        front = await made.front("f0")
        path = "/inference/v1/generate"
        other = {**GENERATE, "token_ids": [5, 6, 8]}
        whole = await post(front.url, path, GENERATE)
        whole_of_other = await post(front.url, path, other)
        streamed = await stream(front.url, "/v1/completions", BODY)
        begun = asyncio.Event()
        unary = asyncio.ensure_future(post(front.url, path, GENERATE))
        streaming = asyncio.ensure_future(stream(front.url, "/v1/completions", BODY, begun))
        await begun.wait()
        await until(lambda: made.live.driver.view.in_flight == 2)
        await made.end()
        waiting = asyncio.ensure_future(post(front.url, path, other))
        await asyncio.sleep(pause_s)
        await made.begin()
        answer, events, late = await asyncio.gather(unary, streaming, waiting)
        assert ids_of(answer) == ids_of(whole)
        assert ids_of(late) == ids_of(whole_of_other)
        assert text_of(events) == text_of(streamed)
        assert covered(answer) == TOKENS
        assert covered(next(e for e in events if "rollout_sched" in e)) == TOKENS
        assert not len(front.calls)
        assert not made.live.driver.view.in_flight
        assert front.calls.refused == 0
        # What had been made was gone on from.
        assert made.live.driver.view.anomalies == {}


async def test_calls_that_end_without_a_scheduler_are_answered() -> None:
    async with scene() as made:
        front = await made.front("f0")
        path = "/inference/v1/generate"
        unary = asyncio.ensure_future(post(front.url, path, GENERATE))
        streaming = asyncio.ensure_future(stream(front.url, "/v1/completions", BODY))
        remote = front.calls._remote
        assert remote is not None
        await until(lambda: len(remote.front.attempts) == 2)
        await made.end()
        answer, events = await asyncio.gather(unary, streaming)
        (server,) = made.servers.values()
        assert server.engine.finished["length"] == 2
        await made.begin()
        assert len(ids_of(answer)) == covered(answer) == TOKENS
        assert covered(next(e for e in events if "rollout_sched" in e)) == TOKENS


async def test_a_client_that_leaves_meanwhile_is_forgotten() -> None:
    async with scene() as made:
        front = await made.front("f0")
        asking = [
            asyncio.ensure_future(post(front.url, "/v1/completions", {**BODY, "prompt": [7, n]}))
            for n in range(3)
        ]
        await until(lambda: made.live.driver.view.in_flight == 3)
        await made.end()
        asking[0].cancel()
        await until(lambda: len(front.calls) == 2)
        await made.begin()
        asking[1].cancel()
        await asking[2]
        await until(lambda: not len(front.calls))
        assert not made.live.driver.view.in_flight


async def test_a_group_goes_on_where_the_store_has_it(tmp_path: Path) -> None:
    async with scene(store=tmp_path / "store") as made:
        await made.front("f0")
        sampling = {"temperature": 0.0, "ignore_eos": True}
        prompt = Prompt("a", [5, 6, 7], 2, TOKENS, sampling, [{"seed": 1}, {"seed": 2}])
        made.live.trainer.submit([prompt])
        waiting = asyncio.ensure_future(made.live.trainer.next_batch())
        transcripts = made.live.driver.front.payloads
        await until(lambda: len(transcripts) == 2, 20)
        waiting.cancel()
        await made.end()
        await made.begin()
        batch = await made.live.trainer.next_batch(timeout_s=30)
        assert batch is not None
        first, second = batch.samples
        assert first.response_ids == second.response_ids
        assert len(first.response_ids) == TOKENS


async def test_hostile_frames_are_refused_and_change_nothing() -> None:
    async with scene() as made:
        front = await made.front("f0")
        for garbage in (b"", b"\xc1", b"{}", b"\x00" * 100):
            with pytest.raises(msgspec.DecodeError):
                front.calls.receive(garbage)
            with pytest.raises(msgspec.DecodeError):
                made.hub.receive("f0", garbage)
            with pytest.raises(msgspec.DecodeError):
                front.calls.connect(garbage, lambda frame: None)
        answer = await post(front.url, "/v1/completions", {**BODY, "max_tokens": 8})
        assert covered(answer) == 8


async def test_calls_and_connections() -> None:
    calls = FrontCalls("f0", Shared({}), lambda error: None)
    data_plane = DataPlane(calls, resumable=True)
    data_plane.calls.responses.end(b"POST", b"/", 499, 0.0)
    data_plane.refused = 2
    calls.connections, calls.connected = 3, True
    page, content_type = await MetricsPage(partial(front_metrics, calls, data_plane)).text()
    lines = page.decode().splitlines()
    assert content_type.startswith("text/plain")
    assert 'rollout_sched_http_responses_total{code="499",plane="data"} 1.0' in lines
    assert "rollout_sched_refused_total 2.0" in lines
    assert "rollout_sched_scheduler_connected 1.0" in lines
    assert "rollout_sched_schedulers_total 3.0" in lines
    assert "process_resident_memory_bytes" in page.decode()
    await calls.close()


def made(url: str, key: str) -> FrontInstance:
    return FrontInstance(url, api_key=key or None)


URL = "http://127.0.0.1:9"


@pytest.fixture
@asynccontextmanager
async def server() -> AsyncIterator[ScriptedVllm]:
    async with ScriptedVllm().serving() as serving:
        yield serving


@pytest.fixture
@asynccontextmanager
async def clients() -> AsyncIterator[FrontClients]:
    made_clients = FrontClients(made)
    yield made_clients
    await made_clients.close()


async def test_a_client_is_created_on_first_use_and_checked_once(server, clients) -> None:
    client = clients.client(server.url)
    looked = clients.unverified(server.url)
    assert looked is not None
    await looked.wait()
    assert clients.unverified(server.url) is None
    assert clients.client(server.url) is client
    assert client.findings.abort_path is not None


async def test_a_failed_check_fails_the_call_and_is_repeated(
    server, clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_sched.integrations.gateway.front_service._AGAIN_S", (0.01, 0.02))
    server.failing = {"/v1/models"}
    client = clients.client(server.url)
    looked = clients.unverified(server.url)
    assert looked is not None
    await looked.wait()
    with pytest.raises(InstanceError, match="as seen by this front"):
        await client.generate(Order("a", [1], 1, "v0", {}))
    server.failing = set()
    async with asyncio.timeout(5):
        while client.unknown:
            await asyncio.sleep(0.01)


async def test_a_rejoined_instance_is_checked_before_use(server, clients) -> None:
    client = clients.client(server.url)
    looked = clients.unverified(server.url)
    clients.reach(server.url, "")
    assert clients.unverified(server.url) is looked  # nobody has looked yet
    assert looked is not None
    await looked.wait()
    assert not client.unknown
    server.failing = {"/v1/models"}
    clients.reach(server.url, "")
    again = clients.unverified(server.url)
    assert again is not None
    await again.wait()
    assert client.unknown
    assert clients.client(server.url) is client


async def test_a_client_sends_the_schedulers_key(clients) -> None:
    first = clients.client(URL)
    clients.reach(URL, "k")
    second = clients.client(URL)
    clients.reach(URL, "k")
    assert clients.client(URL) is second
    assert [first.api_key, second.api_key] == ["", "k"]


async def test_an_unused_client_is_closed() -> None:
    closed: list[str] = []

    class Noted(FrontInstance):
        async def close(self) -> None:
            closed.append(self.api_key or "")
            await super().close()

    clients = FrontClients(lambda url, key: Noted(url, api_key=key or None))
    url = URL
    clients.reach(url, "k")
    clients.reach(url, "l")  # by a scheduler that has come after the first
    clients.leave(url)
    assert clients.client(url).api_key == "l"
    clients.leave(url)
    clients.leave(url)
    assert not len(clients)
    async with asyncio.timeout(5):
        while closed != ["k", "l"]:
            await asyncio.sleep(0.001)
    clients.reach(url, "m")
    assert clients.client(url).api_key == "m"
    await clients.close()
    assert closed == ["k", "l", "m"]


async def test_a_fleet_that_comes_and_goes_leaves_no_clients_behind(clients) -> None:
    for port in range(1, 200):
        url = f"http://127.0.0.1:{port}"
        clients.reach(url, "")
        clients.client(url)
        clients.leave(url)
    assert not len(clients)


async def test_an_invalid_url_is_refused(clients) -> None:
    with pytest.raises(CallerError):
        clients.client("the one over there")
