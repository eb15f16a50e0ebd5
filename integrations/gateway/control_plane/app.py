"""All routes of the gateway except the hot paths, as one aiohttp application.

The hot server passes such connections on the same port to it. A connection cannot go back to the
hot server, so every answer closes its connection.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, cast

from aiohttp import web

from rollout_sched.client.remote import EPOCH
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.admin import Admin
from rollout_sched.integrations.gateway.control_plane.auth import Access, AccessControl, NotAllowed
from rollout_sched.integrations.gateway.control_plane.codec import body_of, read, refusal, reply
from rollout_sched.integrations.gateway.control_plane.fanout import (
    InstanceSilent,
    holder_of,
    is_plain,
    needed_response,
    relay,
    shipped,
)
from rollout_sched.integrations.gateway.control_plane.fleet import FleetControl, WorkerRoutes
from rollout_sched.integrations.gateway.control_plane.gateway import Gateway, NoSuchInstance
from rollout_sched.integrations.gateway.control_plane.live import LiveRoutes, LiveWatch
from rollout_sched.integrations.gateway.control_plane.prometheus import metrics_of
from rollout_sched.integrations.gateway.control_plane.trainer_api import ROLLOUT, TrainerApi
from rollout_sched.integrations.gateway.control_plane.weight_protocol import Conflict
from rollout_sched.integrations.gateway.data_plane.reply import CLIENT_LEFT, Responses
from rollout_sched.integrations.gateway.families import MetricsPage
from rollout_sched.integrations.sglang.protocol import ABORT as SGLANG_ABORT
from rollout_sched.integrations.vllm.protocol.endpoints import DEV_ABORT, OPEN_ABORT
from rollout_sched.integrations.vllm.weight_updates import WeightUpdate
from rollout_sched.integrations.vllm.weights import OutsideRoots
from rollout_sched.live.instances import InstanceSupervisor
from rollout_sched.live.ports import InstanceError, printable, with_timeout

log = logging.getLogger(__name__)


class SchedulerRoutes:
    """Health, version, models and metrics of the gateway, its state, and new weights."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._metrics = MetricsPage(partial(metrics_of, gateway))

    async def health(self, request: web.Request) -> web.Response:
        """200 from the joining of an instance to a SIGTERM; as with vLLM, the body is empty."""
        if self._gateway.healthy:
            return web.Response()
        broken = self._gateway.driver.broken
        if self._gateway.leaving:
            return refusal(503, "the gateway stops soon")
        return refusal(
            503, f"the scheduler stopped: {broken}" if broken else "no instance has joined"
        )

    async def liveness(self, request: web.Request) -> web.Response:
        """200 while the scheduler works, even without instances: prime-rl calls this path."""
        broken = self._gateway.driver.broken
        return refusal(503, f"the scheduler stopped: {broken}") if broken else web.Response()

    async def version(self, request: web.Request) -> web.Response:
        """The version of the gateway."""
        return reply(request, {"version": version("rollout-sched"), "server": "rollout-sched"})

    async def metrics(self, request: web.Request) -> web.Response:
        """Metrics in the format of Prometheus."""
        page, content_type = await self._metrics.text(request.headers.get("Accept", ""))
        return web.Response(body=page, headers={"Content-Type": content_type})

    async def models(self, request: web.Request) -> web.Response:
        """The models of the fleet and their adapters, as the instances serve them now, each with
        the largest max_model_len of its instances."""
        joined = [one for one in self._gateway.supervisors() if one.joined]
        served = await asyncio.gather(*[_served(supervisor) for supervisor in joined])
        data: dict[str, dict[str, Any]] = {}
        for supervisor, names in zip(joined, served, strict=True):
            described = supervisor.description
            assert described is not None  # it has joined
            for name in names:
                entry = data.setdefault(
                    name,
                    {
                        "id": name,
                        "object": "model",
                        "created": self._gateway.created,
                        "owned_by": "rollout-sched",
                        "root": name,
                        "parent": None if name == described.model else described.model,
                        "max_model_len": described.max_model_len,
                    },
                )
                entry["max_model_len"] = max(entry["max_model_len"], described.max_model_len)
        return reply(request, {"object": "list", "data": list(data.values())})

    async def state(self, request: web.Request) -> web.Response:
        """The state of the scheduler: queues, versions, leases, what the next batch waits for."""
        return reply(request, self._gateway.state())

    async def weights(self, request: web.Request) -> web.Response:
        """With `wait`, 200 when every instance has the weights; else 202."""
        update = await read(request, WeightUpdate)
        await self._gateway.publish(update)
        return reply(request, {"version": update.version}, 200 if update.wait else 202)


async def _served(supervisor: InstanceSupervisor) -> Sequence[str]:
    """The names of what an instance serves, or served when it was last asked."""
    client: Any = supervisor.client
    try:
        return cast(Sequence[str], await with_timeout(client.list_models(), MODELS_S))
    except InstanceError:
        return cast(Sequence[str], client.models)


#: Seconds for an instance to list its models.
MODELS_S = 5.0

#: A call that may change an instance must not change only one of several.
_TO_ALL_OR_ONE = (
    "{path} is not a path of this gateway; POST it to all instances at /v1/rl/engine{path}, or to "
    "one at /v1/rl/workers/ID/engine{path}"
)

#: vLLM keeps responses in the memory of one server, if VLLM_ENABLE_RESPONSES_API_STORE=1.
_NO_RESPONSE = (
    "no instance has the response {id!r}: start them with VLLM_ENABLE_RESPONSES_API_STORE=1, or "
    "send the earlier messages again if the one that had it was restarted"
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: Paths for inference: passed on for clients. Other unknown paths may change an instance, and are
#: passed on for administrators only.
_INFERENCE = re.compile(
    r"/(v1|v2|inference/v1)/[\w/.-]+|/(tokenize|detokenize|tokenizer_info|pooling|classify|score"
    r"|rerank|invocations|generate|skyrl/v1/generate)"
)

_UNIX = getattr(socket, "AF_UNIX", None)  # not everywhere

#: Set when the gateway stops and the grace period is over.
STOPPING = web.AppKey("STOPPING", asyncio.Event)

#: The live view; its streams end first when the gateway stops.
WATCH = web.AppKey("WATCH", LiveWatch)

#: Seconds that a cancelled call then gets to end.
CANCEL_S = 0.5

#: The access class of every route, by its resource; calls passed on have the class of their path.
ACCESS: web.AppKey[dict[web.AbstractResource, Access]] = web.AppKey("ACCESS", dict)

#: Calls that continue without their client; the event loop alone does not keep tasks alive.
HANDLING: web.AppKey[set[asyncio.Future[web.StreamResponse]]] = web.AppKey("HANDLING", set)


def make_app(
    gateway: Gateway, auth: AccessControl, *, max_body: int, max_samples: int
) -> web.Application:
    """All routes. `max_body`: bytes of a request's body; more is answered 413. `max_samples`: see
    `TrainerApi`.
    """
    control = FleetControl(gateway)
    guards = _Guards(gateway, auth, control)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await guards.check(request, handler)

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await _counted(gateway.responses, request, handler)

    app = web.Application(
        middlewares=[count, _to_the_end, _as_answers, check], client_max_size=max_body
    )
    app[STOPPING] = asyncio.Event()
    app[HANDLING] = set()
    app.on_response_prepare.append(_close_after)
    app.on_response_prepare.append(_Epoch(gateway).say)
    app[WATCH] = LiveWatch(gateway)
    for access, routes in _routes(gateway, control, app[WATCH], max_samples).items():
        guards.add(app, access, routes)
    app[ACCESS] = guards.access
    app.add_routes([web.get("/{path:.*}", guards.pass_on), web.post("/{path:.*}", guards.pass_on)])
    return app


def _routes(
    gateway: Gateway, control: FleetControl, watch: LiveWatch, max_samples: int
) -> dict[Access, list[web.RouteDef]]:
    """Every route by its access class, except those that are passed on."""
    admin, live, trainer = Admin(gateway), LiveRoutes(watch), TrainerApi(gateway, max_samples)
    scheduler, workers = SchedulerRoutes(gateway), WorkerRoutes(gateway, control)
    rules, engine = shipped().calls.items(), "/v1/rl/engine"
    instance = "{id:(?s:.+)}"
    return {
        Access.OPEN: [
            web.get("/", live.page),
            web.get("/health", scheduler.health),
            web.get("/liveness", scheduler.liveness),
            web.get("/ping", scheduler.health),
            web.post("/ping", scheduler.health),  # for SageMaker, as in vLLM
            web.get("/version", scheduler.version),
            web.get("/metrics", scheduler.metrics),
        ],
        Access.CLIENT: [
            web.get("/v1/models", scheduler.models),
            web.post("/finish_session", workers.finish_session),
        ],
        Access.TRAINER: [
            web.post(f"{ROLLOUT}/groups", trainer.submit),
            web.post(f"{ROLLOUT}/groups/close", trainer.close),
            web.post(f"{ROLLOUT}/groups/unknown", trainer.unknown),
            web.post(f"{ROLLOUT}/batches/next", trainer.next_batch),
            web.post(f"{ROLLOUT}/batches/renew", trainer.renew),
            web.post(f"{ROLLOUT}/mismatch", trainer.mismatch),
            web.get(f"{ROLLOUT}/state", scheduler.state),
            web.post(f"{ROLLOUT}/weights", scheduler.weights),
            web.get("/v1/rl/workers", workers.list_rl),
            web.get("/v1/rl/workers/{id}", workers.show_rl),
            *(web.post(path, control.abort) for path in (OPEN_ABORT, DEV_ABORT, SGLANG_ABORT)),
            *(_of_table(c, control.call) for c, rule in rules if rule.to in ("all", "rewrite")),
            *(_of_table(c, workers.engine, engine) for c, rule in rules if rule.to != "refuse"),
        ],
        Access.ADMIN: [
            web.get("/admin/instances", admin.instances),
            web.post("/admin/instances", admin.add),
            web.get(f"/admin/instances/{instance}", admin.show),
            web.delete(f"/admin/instances/{instance}", admin.remove),
            web.post(f"/admin/instances/{instance}/drain", admin.drain),
            web.post("/admin/pause", admin.pause),
            web.post("/admin/resume", admin.resume),
            web.get("/admin/state", scheduler.state),
            web.post("/admin/weights", scheduler.weights),
            web.get("/admin/live", live.live),
            web.get("/workers", workers.list_all),
            web.post("/workers", workers.add),
            web.get(f"/workers/{instance}", workers.show),
            web.delete(f"/workers/{instance}", workers.remove),
            web.post("/add_worker", workers.add_by_query),
            web.post("/remove_worker", workers.remove_by_query),
            web.get("/list_workers", workers.list_urls),
            web.route("*", "/v1/rl/workers/{id}/engine/{path:.+}", workers.engine_of_one),
            *(_of_table(c, control.call) for c, rule in rules if rule.to == "refuse"),
            web.route("*", "/v1/rl/engine/{path:.+}", workers.engine),
        ],
    }


def _of_table(call: tuple[str, str], handler: Handler, root: str = "") -> web.RouteDef:
    """The route for a method and path of the fan-out table."""
    method, path = call
    return web.RouteDef(
        method, root + path, handler, {"allow_head": False} if method == "GET" else {}
    )


async def _counted(
    responses: Responses, request: web.Request, handler: Handler
) -> web.StreamResponse:
    status, begun = CLIENT_LEFT, responses.begin()
    try:
        response = await handler(request)
        status = response.status
        return response
    except web.HTTPException as answer:
        status = answer.status
        raise
    finally:
        path = request.rel_url.raw_path.encode()  # still quoted, so that it stays on one log line
        responses.end(request.method.encode(), path, status, begun)


class _Epoch:
    """Adds the epoch of the scheduler's run to answers for trainers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def say(self, request: web.Request, response: web.StreamResponse) -> None:
        if request.path.startswith(ROLLOUT):
            response.headers[EPOCH] = self._gateway.driver.epoch


class _Guards:
    """Checks the key that a route needs; `access` has the access class of each."""

    def __init__(self, gateway: Gateway, auth: AccessControl, control: FleetControl) -> None:
        self.access: dict[web.AbstractResource, Access] = {}
        self._gateway = gateway
        self._auth = auth
        self._control = control

    def add(self, app: web.Application, access: Access, routes: list[web.RouteDef]) -> None:
        """Raises ValueError for a path that already has another class."""
        for route in app.add_routes(routes):
            assert route.resource is not None  # it has a path
            if self.access.setdefault(route.resource, access) is not access:
                raise ValueError(f"{route.resource.canonical} has two access classes")

    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.http_exception is not None:
            return await handler(request)  # it raises the exception: there is no such route
        passed_on = request.match_info.handler == self.pass_on
        if passed_on and not is_plain(request.raw_path.partition("?")[0]):
            return refusal(404, f"{request.path}: no such path")
        access = self._unknown(request) if passed_on else self._known(request)
        by_socket = _comes_by_socket(request)
        why = self._auth.refusal(access, request.remote, request.headers, by_socket=by_socket)
        if why:
            return refusal(401 if self._auth.takes_keys(access) else 403, why)
        if passed_on and access is Access.ADMIN and self._would_change_one_of_many(request):
            return refusal(404, _TO_ALL_OR_ONE.format(path=request.path))
        return await handler(request)

    def _known(self, request: web.Request) -> Access:
        """A route without an access class is for administrators."""
        resource = request.match_info.route.resource
        return Access.ADMIN if resource is None else self.access.get(resource, Access.ADMIN)

    def _unknown(self, request: web.Request) -> Access:
        """The class of a path that is passed on. An unknown path may change an instance."""
        if _INFERENCE.fullmatch(request.path):
            return Access.CLIENT
        one = self._control.goes_to_one(request.method, request.path)
        return Access.TRAINER if one else Access.ADMIN

    def _would_change_one_of_many(self, request: web.Request) -> bool:
        return request.method != "GET" and len(self._gateway.supervisors()) > 1

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """To the instance that has the response that the call is about; any other call to the least
        loaded instance, or to any if all are full."""
        driver = self._gateway.driver
        instance = driver.view.least_loaded()
        if instance is None:
            return refusal(503, "no instance has joined")
        body = await body_of(request)
        if _INFERENCE.fullmatch(request.path) is None:
            query = request.raw_path.partition("?")[2]
            body = await self._gateway.resolve_paths(request.method, request.path, query, body)
        client: Any = driver.supervisors[instance.id].client
        response_id = needed_response(request.path, body)
        if response_id:
            joined: list[Any] = [one.client for one in self._gateway.supervisors() if one.joined]
            client = client if len(joined) == 1 else await holder_of(response_id, joined)
            if client is None:
                return refusal(404, _NO_RESPONSE.format(id=printable(response_id, 80)))
        return await relay(request, body, client, silence_s=driver.settings.update_timeout_s)


def _comes_by_socket(request: web.Request) -> bool:
    """Whether it came by --admin-socket, which only its owner can open."""
    transport = request.transport
    taken = None if transport is None else transport.get_extra_info("socket")
    return taken is not None and taken.family == _UNIX


@web.middleware
async def _as_answers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns exceptions into errors in the format that OpenAI's clients expect."""
    try:
        return await handler(request)
    except NoSuchInstance as error:
        return refusal(404, str(error))
    except (NotAllowed, OutsideRoots) as error:
        return refusal(403, str(error))
    except Conflict as error:
        return refusal(409, str(error))
    except CallerError as error:
        return refusal(400, str(error))
    except InstanceSilent as error:
        return refusal(504, str(error))
    except InstanceError as error:
        return refusal(502, str(error))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return refusal(error.status, error.text or error.reason)
    except ConnectionResetError:  # the client's: an instance's is an InstanceError
        return refusal(400, "the connection was closed before the request was complete")
    except Exception as error:
        path = request.rel_url.raw_path  # a query may hold a secret
        log.exception("%s %s", request.method, path)
        return refusal(500, f"the gateway failed: {error}")


@web.middleware
async def _to_the_end(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Calls run to their end even if the client disconnects, so that no call stops halfway, for
    example with half of the instances paused.

    Clients that still wait when the gateway stops get an error.
    """
    handling = asyncio.ensure_future(handler(request))
    stopping = asyncio.ensure_future(request.app[STOPPING].wait())
    try:
        await asyncio.wait({handling, stopping}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        if getattr(request.match_info.handler, "__name__", "") == _Guards.pass_on.__name__:
            handling.cancel()
        request.app[HANDLING].add(handling)
        handling.add_done_callback(request.app[HANDLING].discard)
        raise
    finally:
        stopping.cancel()
    if handling.done():
        return handling.result()
    handling.cancel()
    await asyncio.wait({handling}, timeout=CANCEL_S)  # this cuts off an answer that has begun
    return refusal(503, "the gateway stopped before this call ended; try again when it is back")


async def _close_after(request: web.Request, response: web.StreamResponse) -> None:
    response.force_close()
    response.headers["Connection"] = "close"
