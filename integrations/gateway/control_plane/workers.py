"""Routes to manage instances that are compatible with other routers.

Names and answers follow sglang-router and vllm-router (/add_worker, /remove_worker, /list_workers,
/workers, /finish_session) and smg (/v1/rl), so a trainer that was written for one of them needs no
change.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from rollout_sched.core.errors import CallerError
from rollout_sched.core.events import SessionEnded
from rollout_sched.integrations.gateway.control_plane.broadcast import broadcast, multi_status
from rollout_sched.integrations.gateway.control_plane.codec import read, refusal, reply
from rollout_sched.integrations.gateway.control_plane.fanout_table import shipped
from rollout_sched.integrations.gateway.control_plane.fleet_control import (
    FleetControl,
    call_of,
    route,
)
from rollout_sched.integrations.gateway.control_plane.gateway import (
    Gateway,
    InstanceView,
    NewInstance,
)
from rollout_sched.integrations.gateway.control_plane.relay import is_plain

#: Selectors that match every instance.
EVERYBODY = ("", "*", "all")


class WorkerRoutes:
    """Routes for administrators, except the end of a session, which is for clients, and calls of a
    trainer to the whole fleet."""

    def __init__(self, gateway: Gateway, control: FleetControl) -> None:
        self._gateway = gateway
        self._control = control

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/workers", self.list_all),
            web.post("/workers", self.add),
            web.get("/workers/{id:(?s:.+)}", self.show),
            web.delete("/workers/{id:(?s:.+)}", self.remove),
            web.post("/add_worker", self.add_by_query),
            web.post("/remove_worker", self.remove_by_query),
            web.get("/list_workers", self.list_urls),
            web.route("*", "/v1/rl/workers/{id}/engine/{path:.+}", self.engine_of_one),
            web.route("*", "/v1/rl/engine/{path:.+}", self.engine),
        ]

    def keyed_routes(self) -> list[web.RouteDef]:
        """The routes for which a client needs its key."""
        return [web.post("/finish_session", self.finish_session)]

    def trainer_routes(self) -> list[web.RouteDef]:
        """The calls that are also a trainer's without the prefix /v1/rl/engine."""
        calls = shipped().calls.items()
        return [
            *(
                web.get("/v1/rl/workers", self.list_rl),
                web.get("/v1/rl/workers/{id}", self.show_rl),
            ),
            *(route(c, self.engine, "/v1/rl/engine") for c, rule in calls if rule.to != "refuse"),
        ]

    # -- sglang-router and vllm-router -----------------------------------------------------

    async def list_all(self, request: web.Request) -> web.Response:
        workers = [_worker(view) for view in self._views()]
        return reply(request, {"workers": workers, "total": len(workers)})

    async def show(self, request: web.Request) -> web.Response:
        supervisor = self._gateway.supervisor(request.match_info["id"])
        return reply(request, _worker(self._gateway.view(supervisor)))

    async def add(self, request: web.Request) -> web.Response:
        supervisor = await self._gateway.add(await read(request, NewInstance))
        return reply(request, _worker(self._gateway.view(supervisor)), 201)

    async def remove(self, request: web.Request) -> web.Response:
        await self._gateway.remove(request.match_info["id"])
        return reply(request, {"message": f"removed {request.match_info['id']}"})

    async def add_by_query(self, request: web.Request) -> web.Response:
        supervisor = await self._gateway.add(NewInstance(_named(request, "url")))
        return web.Response(text=f"Successfully added worker: {supervisor.name}")

    async def remove_by_query(self, request: web.Request) -> web.Response:
        url = _named(request, "url")
        await self._gateway.remove(url)
        return web.Response(text=f"Successfully removed worker: {url}")

    async def list_urls(self, request: web.Request) -> web.Response:
        return reply(request, {"urls": [view.url for view in self._views()]})

    async def finish_session(self, request: web.Request) -> web.Response:
        session = _named(request, "session_id")
        known = self._gateway.driver.view.knows_session(session)
        if known:
            self._gateway.driver.tell(SessionEnded(session))
        return reply(request, {"session_id": session, "finished": known})

    # -- smg -------------------------------------------------------------------------------

    async def list_rl(self, request: web.Request) -> web.Response:
        workers = [_rl_worker(view) for view in self._views()]
        return reply(request, {"workers": workers, "total": len(workers)})

    async def show_rl(self, request: web.Request) -> web.Response:
        supervisor = self._gateway.supervisor(request.match_info["id"])
        return reply(request, _rl_worker(self._gateway.view(supervisor)))

    async def engine(self, request: web.Request) -> web.Response:
        """Send to all instances, or to those that `selector` matches: "key=value,...", with the
        fields of the list."""
        call = await call_of(self._gateway, request, _path_of_engine(request))
        selector = request.query.get("selector", "")
        rule = shipped().of(call.method, call.path)
        if rule is not None and selector in EVERYBODY:
            answer = await self._control.carry_out(call, rule)
            return reply(request, answer, multi_status(answer))
        chosen = [
            supervisor
            for supervisor in self._gateway.supervisors()
            if _selected(_rl_worker(self._gateway.view(supervisor)), selector)
        ]
        if not chosen and selector:
            return refusal(404, f"selector {selector!r} matches no instance")
        status, answer = await broadcast(chosen, call)
        return reply(request, answer, status)

    async def engine_of_one(self, request: web.Request) -> web.Response:
        supervisor = self._gateway.supervisor(request.match_info["id"])
        call = await call_of(self._gateway, request, _path_of_engine(request))
        _, answer = await broadcast([supervisor], call)
        for worker_id, result in answer["results"].items():
            return reply(request, {"worker_id": worker_id, **result}, result["status"])
        failure = answer["failed"][0]
        return reply(request, failure, failure["status"] or 502)

    # -- internal --------------------------------------------------------------------------

    def _views(self) -> list[InstanceView]:
        return [self._gateway.view(supervisor) for supervisor in self._gateway.supervisors()]


def _path_of_engine(request: web.Request) -> str:
    """The raw path after /engine/. Raises HTTPNotFound unless it is plain."""
    path = "/" + request.raw_path.partition("?")[0].partition("/engine/")[2]
    if not is_plain(path):
        raise web.HTTPNotFound(text=f"{path!r} is not a plain path: write it without escapes")
    return path


def _named(request: web.Request, field: str) -> str:
    value = request.query.get(field)
    if not value:
        raise CallerError(f"missing query parameter: ?{field}=...")
    return value


def _worker(view: InstanceView) -> dict[str, Any]:
    return {
        "id": view.id,
        "url": view.url,
        "model_id": view.model,
        "is_healthy": view.version is not None,
        "load": view.in_flight,
        "worker_type": "regular",
        "status": view.status,
        "reason": view.reason,
    }


def _rl_worker(view: InstanceView) -> dict[str, Any]:
    return {
        "id": view.id,
        "url": view.url,
        "base_url": view.url,
        "engine": "vllm",
        "engine_version": None,
        "model_id": view.model,
        "worker_type": "regular",
        "connection_mode": "http",
        "health": "unhealthy" if view.version is None else "healthy",
        "weight_version": None if view.version is None else str(view.version),
        "labels": {},
        "capabilities": dict.fromkeys(view.capabilities, True),
    }


def _selected(worker: dict[str, Any], selector: str) -> bool:
    """Whether a worker matches all terms of the selector; "" and "*" match every worker."""
    if selector in EVERYBODY:
        return True
    for term in selector.split(","):
        key, equals, value = term.strip().partition("=")
        if not equals or key not in worker:
            fields = ", ".join(key for key, value in worker.items() if isinstance(value, str))
            raise CallerError(f"selector {term!r}: write field=value, with one of: {fields}")
        if str(worker[key]) != value:
            return False
    return True
