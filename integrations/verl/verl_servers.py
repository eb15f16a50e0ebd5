"""Adds and removes instances of a scheduler as the servers of verl's load balancer change."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from rollout_sched.client import RolloutScheduler
from rollout_sched.core.model.errors import CallerError
from rollout_sched.integrations.verl.server_instance import ServerInstance

log = logging.getLogger(__name__)


def servers_of(balancer: Any) -> dict[str, Any]:
    """Address -> handle. Runs in the actor, with verl's load balancer: its API returns only the
    addresses of its servers."""
    servers = getattr(balancer, "_servers", None)
    if servers is None:
        raise CallerError(
            f"{type(balancer).__name__} does not keep its servers where verl's own load balancer "
            "does; remove rollout.router_config_path, or put a gateway before the servers"
        )
    return dict(servers)


class VerlServers:
    """Keeps the instances of `rollouts` equal to the load balancer's servers: verl removes hybrid
    servers while it trains on their GPUs."""

    def __init__(self, rollouts: RolloutScheduler, balancer: Any) -> None:
        self._rollouts = rollouts
        self._balancer = balancer
        self._here: set[str] = set()

    async def follow(self) -> None:
        """Add the new servers and remove the missing ones. Raises CallerError or InstanceError; the
        changes made before the error stay."""
        servers = await self._balancer.__ray_call__.remote(servers_of)
        for address in self._here - set(servers):
            self._here.discard(address)
            await self._rollouts.remove_instance(address)
        for address in set(servers) - self._here:
            await self._rollouts.add_instance(ServerInstance(address, servers[address]))
            self._here.add(address)

    async def keep_following(self, look_s: float) -> None:
        """Call `follow` every `look_s` seconds, until this is cancelled."""
        while True:
            await asyncio.sleep(look_s)
            try:
                await self.follow()
            except Exception as error:  # it may succeed next time
                log.warning("cannot update verl's servers: %s", error)
