"""A front finds out what an instance offers before it sends anything there."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.core.model.errors import CallerError
from rollout_sched.integrations.gateway.front_service import FrontClients, FrontInstance
from rollout_sched.live.ports import InstanceError, Order
from tests.integrations.gateway.house import run
from tests.integrations.vllm.scripted import ScriptedVllm


def made(url: str, key: str) -> FrontInstance:
    return FrontInstance(url, api_key=key or None)


def test_one_is_made_when_it_is_first_needed_and_looked_at_once() -> None:
    async def scene() -> None:
        server = ScriptedVllm()
        async with server.serving():
            clients = FrontClients(made)
            client = clients.client(server.url)
            looked = clients.unverified(server.url)
            assert looked is not None
            await looked.wait()
            assert clients.unverified(server.url) is None
            assert clients.client(server.url) is client
            assert client.findings.abort_path is not None
            await clients.close()

    run(scene())


def test_what_cannot_be_looked_at_fails_what_is_sent_there_and_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout_sched.integrations.gateway.front_service._AGAIN_S", (0.01, 0.02))

    async def scene() -> None:
        server = ScriptedVllm()
        async with server.serving():
            server.failing = {"/v1/models"}
            clients = FrontClients(made)
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
            await clients.close()

    run(scene())


def test_one_that_joins_anew_is_looked_at_again_before_anything_is_sent_there() -> None:
    async def scene() -> None:
        server = ScriptedVllm()
        async with server.serving():
            clients = FrontClients(made)
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
            await clients.close()

    run(scene())


def test_it_is_sent_the_key_that_its_scheduler_has_for_it() -> None:
    async def scene() -> None:
        clients = FrontClients(made)
        first = clients.client("http://127.0.0.1:9")
        clients.reach("http://127.0.0.1:9", "k")
        second = clients.client("http://127.0.0.1:9")
        clients.reach("http://127.0.0.1:9", "k")
        assert clients.client("http://127.0.0.1:9") is second
        assert [first.api_key, second.api_key] == ["", "k"]
        await clients.close()

    run(scene())


def test_it_is_closed_and_forgotten_when_the_last_that_reached_it_has_left() -> None:
    async def scene() -> None:
        closed: list[str] = []

        class Noted(FrontInstance):
            async def close(self) -> None:
                closed.append(self.api_key or "")
                await super().close()

        clients = FrontClients(lambda url, key: Noted(url, api_key=key or None))
        url = "http://127.0.0.1:9"
        clients.reach(url, "k")
        clients.reach(url, "l")  # by a scheduler that has come after the first
        clients.leave(url)
        assert clients.client(url).api_key == "l"
        clients.leave(url)
        clients.leave(url)
        assert not len(clients)
        async with asyncio.timeout(5):
            while closed != ["k", "l"]:
                await asyncio.sleep(0)
        clients.reach(url, "m")
        assert clients.client(url).api_key == "m"
        await clients.close()
        assert closed == ["k", "l", "m"]

    run(scene())


def test_a_fleet_that_comes_and_goes_leaves_no_clients_behind() -> None:
    async def scene() -> None:
        clients = FrontClients(made)
        for port in range(1, 200):
            url = f"http://127.0.0.1:{port}"
            clients.reach(url, "")
            clients.client(url)
            clients.leave(url)
        assert not len(clients)
        await clients.close()

    run(scene())


def test_a_name_that_is_no_url() -> None:
    async def scene() -> None:
        clients = FrontClients(made)
        with pytest.raises(CallerError):
            clients.client("the one over there")
        await clients.close()

    run(scene())
