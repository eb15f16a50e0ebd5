"""The scheduler's routes that administrators and trainers share, each under their own path."""

from __future__ import annotations

from aiohttp import web

from rollout_sched.integrations.gateway.control_plane.codec import read, reply
from rollout_sched.integrations.gateway.control_plane.gateway import Gateway
from rollout_sched.integrations.gateway.control_plane.weight_update import WeightUpdate

#: The root of the administrators' paths.
ADMIN = "/admin"


class SchedulerRoutes:
    """Routes for new weights and for the state."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self, root: str) -> list[web.RouteDef]:
        return [
            web.get(f"{root}/state", self.state),
            web.post(f"{root}/weights", self.weights),
        ]

    async def state(self, request: web.Request) -> web.Response:
        return reply(request, self._gateway.state())

    async def weights(self, request: web.Request) -> web.Response:
        """With `wait`, 200 when every instance has the weights; else 202."""
        update = await read(request, WeightUpdate)
        await self._gateway.publish(update)
        return reply(request, {"version": update.version}, 200 if update.wait else 202)
