"""A trainer's calls that an actor answers or does not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from rollout_sched.client.remote.calls import GatewayError
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.ray import client
from rollout_sched.integrations.ray.client import ActorCalls
from rollout_sched.integrations.ray.deployment import NAMESPACE, Deployment
from tests.ray.conftest import PATIENCE_S


@ray.remote(num_cpus=0)
class Scheduler:
    """Answers as a test wants."""

    async def call(self, method: str, path: str, data: bytes, epoch: str) -> tuple[int, bytes, str]:
        if path == "/wrong":
            return 409, b'{"error": {"message": "that is wrong"}}', "e2"
        if path == "/raises":
            raise CallerError("it cannot start")
        if path == "/closing":
            raise RuntimeError("Session is closed")
        if path == "/silent":
            await asyncio.Event().wait()
        if path == "/dies":
            ray.actor.exit_actor()
        return 200, f"{method} {path} {epoch}".encode() + data, "e1"


def calling(name: str, use: Any) -> Any:
    async def scene() -> Any:
        calls = ActorCalls(name)
        async with asyncio.timeout(PATIENCE_S):
            await calls.open()
            return await use(calls)

    return asyncio.run(scene())


def test_what_is_answered_and_what_is_not(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = Scheduler.options(
        name=Deployment(name="double").scheduler, namespace=NAMESPACE
    ).remote()

    async def use(calls: ActorCalls) -> None:
        assert await calls.send("GET", "/x") == (200, b"GET /x ")
        assert await calls.post("/y") == (200, b"POST /y e1\x80")
        with pytest.raises(CallerError, match="that is wrong"):
            await calls.send("GET", "/wrong")
        assert calls.epoch == "e2"
        with pytest.raises(CallerError, match="it cannot start") as caught:
            await calls.send("GET", "/raises")
        assert type(caught.value) is CallerError
        with pytest.raises(GatewayError, match="Session is closed"):
            await calls.send("GET", "/closing")
        monkeypatch.setattr(client, "ANSWER_S", 0.05)
        with pytest.raises(GatewayError, match="has not answered"):
            await calls.send("GET", "/silent")
        monkeypatch.undo()
        with pytest.raises(GatewayError):
            await calls.send("GET", "/dies")

    calling("double", use)
    del actor


def test_a_deployment_that_was_stopped_and_started_anew_is_found_again(cluster: Cluster) -> None:
    named = Scheduler.options(name=Deployment(name="anew").scheduler, namespace=NAMESPACE)
    first = named.remote()

    async def use(calls: ActorCalls) -> Any:
        await calls.send("GET", "/x")
        ray.kill(first)
        while True:
            try:
                second = named.remote()
                break
            except ValueError:  # the first actor still has its name
                await asyncio.sleep(0.1)
        assert await calls.send("GET", "/x", repeatable=True) == (200, b"GET /x e1")
        return second

    calling("anew", use)


def test_a_deployment_that_is_not_there_is_named(cluster: Cluster) -> None:
    with pytest.raises(CallerError, match="ray up --policy P --name nobody"):
        calling("nobody", lambda calls: calls.send("GET", "/x"))
