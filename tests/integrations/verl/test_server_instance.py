"""The servers of verl's load balancer, as instances that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.verl.server_instance import ServerInstance, VerlServers, servers_of
from rollout_sched.live.ports import InstanceError

#: Seconds that anything here may take, on a machine that does much else besides.
PATIENCE_S = 60.0


class Balancer:
    """verl's, as its handle answers: `__ray_call__` calls a function with what is in the actor."""

    def __init__(self, **inside: Any) -> None:
        self.inside = SimpleNamespace(**inside)
        self.__ray_call__ = SimpleNamespace(remote=self._call)

    async def _call(self, function: Callable[[Any], Any]) -> Any:
        return function(self.inside)


class Rollouts:
    """The instances of a scheduler; one that is in `refused` is not taken in."""

    def __init__(self) -> None:
        self.here: list[str] = []
        self.refused: set[str] = set()

    async def add_instance(self, instance: ServerInstance) -> None:
        if instance.name in self.refused:
            raise InstanceError("it does not answer")
        self.here.append(instance.name)

    async def remove_instance(self, name: str) -> None:
        self.here.remove(name)


async def test_instances_are_what_the_load_balancer_has():
    rollouts, balancer = Rollouts(), Balancer(_servers={"a": object(), "b": object()})
    servers = VerlServers(rollouts, balancer)
    await servers.follow()
    assert sorted(rollouts.here) == ["a", "b"]
    balancer.inside._servers = {"b": object(), "c": object()}
    await servers.follow()
    assert sorted(rollouts.here) == ["b", "c"]


async def test_a_silent_server_is_tried_again():
    rollouts, balancer = Rollouts(), Balancer(_servers={"a": object()})
    rollouts.refused.add("a")
    servers = VerlServers(rollouts, balancer)
    with pytest.raises(InstanceError):
        await servers.follow()
    following = asyncio.create_task(servers.keep_following(0.001))
    await asyncio.sleep(0.01)
    rollouts.refused.clear()
    async with asyncio.timeout(PATIENCE_S):
        while not rollouts.here:
            await asyncio.sleep(0.001)
    following.cancel()
    assert rollouts.here == ["a"]


def test_a_load_balancer_that_keeps_its_servers_elsewhere_is_refused_with_the_remedy():
    with pytest.raises(CallerError, match="router_config_path"):
        servers_of(object())
