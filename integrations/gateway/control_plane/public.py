"""The routes that every client may call: health, version, models and metrics."""

from __future__ import annotations

from importlib.metadata import version

from aiohttp import web

from rollout_sched.integrations.gateway.control_plane.codec import refusal, reply
from rollout_sched.integrations.gateway.control_plane.gateway import Gateway
from rollout_sched.integrations.gateway.control_plane.prometheus import GatewayMetrics


class Public:
    """Read-only routes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._metrics = GatewayMetrics(gateway)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health),
            web.get("/liveness", self.liveness),
            web.get("/ping", self.health),
            web.post("/ping", self.health),  # for SageMaker, as in vLLM
            web.get("/version", self.version),
            web.get("/metrics", self.metrics),
        ]

    def keyed_routes(self) -> list[web.RouteDef]:
        """The routes for which a client needs its key."""
        return [web.get("/v1/models", self.models)]

    async def health(self, request: web.Request) -> web.Response:
        """200 once an instance has joined; as with vLLM, the body is empty."""
        if self._gateway.healthy:
            return web.Response()
        broken = self._gateway.driver.broken
        return refusal(
            503, f"the scheduler stopped: {broken}" if broken else "no instance has joined"
        )

    async def liveness(self, request: web.Request) -> web.Response:
        """200 while the scheduler works, even without instances: prime-rl calls this path."""
        broken = self._gateway.driver.broken
        return refusal(503, f"the scheduler stopped: {broken}") if broken else web.Response()

    async def version(self, request: web.Request) -> web.Response:
        return reply(request, {"version": version("rollout-sched"), "server": "rollout-sched"})

    async def metrics(self, request: web.Request) -> web.Response:
        page, content_type = await self._metrics.page(request.headers.get("Accept", ""))
        return web.Response(body=page, headers={"Content-Type": content_type})

    async def models(self, request: web.Request) -> web.Response:
        """The models of the fleet, each with the smallest max_model_len of its instances."""
        lengths: dict[str, int] = {}
        for supervisor in self._gateway.supervisors():
            told = supervisor.description
            if told is not None and supervisor.joined:
                known = lengths.get(told.model, told.max_model_len)
                lengths[told.model] = min(known, told.max_model_len)
        data = [
            {
                "id": model,
                "object": "model",
                "created": self._gateway.created,
                "owned_by": "rollout-sched",
                "root": model,
                "parent": None,
                "max_model_len": length,
            }
            for model, length in lengths.items()
        ]
        return reply(request, {"object": "list", "data": data})
