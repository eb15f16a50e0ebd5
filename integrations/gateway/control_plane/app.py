"""Everything of the gateway that is not hot, as one aiohttp application.

It is what the hot server falls back to on the same port, and there is no way back from it, so every
answer closes its connection.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import cast

from aiohttp import web

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.admin import Admin
from rollout_sched.integrations.gateway.control_plane.auth import Access, AccessControl
from rollout_sched.integrations.gateway.control_plane.codec import body_of, refusal
from rollout_sched.integrations.gateway.control_plane.fleet_control import FleetControl
from rollout_sched.integrations.gateway.control_plane.gateway import Gateway, NoSuchInstance
from rollout_sched.integrations.gateway.control_plane.instance_access import NotAllowed
from rollout_sched.integrations.gateway.control_plane.live_routes import LiveRoutes
from rollout_sched.integrations.gateway.control_plane.live_watch import LiveWatch
from rollout_sched.integrations.gateway.control_plane.public import Public
from rollout_sched.integrations.gateway.control_plane.relay import InstanceSilent, is_plain, relay
from rollout_sched.integrations.gateway.control_plane.scheduler_routes import (
    ADMIN,
    SchedulerRoutes,
)
from rollout_sched.integrations.gateway.control_plane.trainer_api import EPOCH, ROLLOUT, TrainerApi
from rollout_sched.integrations.gateway.control_plane.weight_protocol import Conflict
from rollout_sched.integrations.gateway.control_plane.workers import WorkerRoutes
from rollout_sched.integrations.gateway.data_plane.responses import CLIENT_LEFT, Responses
from rollout_sched.integrations.gateway.data_plane.upstream import Upstream
from rollout_sched.integrations.vllm.weight_roots import OutsideRoots
from rollout_sched.live.ports import InstanceError

log = logging.getLogger(__name__)

#: What might change an instance must not change one of many.
_TO_ALL_OR_ONE = (
    "{path} is no path of this gateway; POST it to every instance at /v1/rl/engine{path}, or to "
    "one at /v1/rl/workers/ID/engine{path}"
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: Paths that ask a model something: passed on for whoever has a client's key. What else we do not
#: know may change an instance, and is passed on for administrators only.
_INFERENCE = re.compile(
    r"/(v1|v2|inference/v1)/[\w/.-]+|/(tokenize|detokenize|tokenizer_info|pooling|classify|score"
    r"|rerank|invocations|generate|skyrl/v1/generate)"
)

_UNIX = getattr(socket, "AF_UNIX", None)  # not everywhere

#: Set when the gateway stops and has waited for long enough.
STOPPING = web.AppKey("STOPPING", asyncio.Event)

#: Its streams end first when the gateway stops.
WATCH = web.AppKey("WATCH", LiveWatch)

#: Seconds for what is cancelled then.
CANCEL_S = 0.5

#: The class of every route, by its resource; what is passed on has the class of what it asks.
ACCESS: web.AppKey[dict[web.AbstractResource, Access]] = web.AppKey("ACCESS", dict)

#: What goes on without its client; the event loop itself would let go of it.
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
    public, workers = Public(gateway), WorkerRoutes(gateway, control)
    scheduler, trainer = SchedulerRoutes(gateway), TrainerApi(gateway, max_samples)
    app[WATCH] = LiveWatch(gateway)
    live = LiveRoutes(app[WATCH])
    guards.add(app, Access.OPEN, public.routes(), live.open_routes())
    guards.add(app, Access.CLIENT, public.keyed_routes(), workers.keyed_routes())
    guards.add(
        app,
        Access.TRAINER,
        trainer.routes(),
        scheduler.routes(ROLLOUT),
        control.trainer_routes(),
        workers.trainer_routes(),
    )
    guards.add(
        app,
        Access.ADMIN,
        Admin(gateway).routes(),
        scheduler.routes(ADMIN),
        control.admin_routes(),
        workers.routes(),
        live.routes(),
    )
    app[ACCESS] = guards.access
    app.add_routes([web.get("/{path:.*}", guards.pass_on), web.post("/{path:.*}", guards.pass_on)])
    return app


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
        path = request.rel_url.raw_path.encode()  # quoted as it came, so that it stays on its line
        responses.end(request.method.encode(), path, status, begun)


class _Epoch:
    """Tells trainers which run of a scheduler answers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def say(self, request: web.Request, response: web.StreamResponse) -> None:
        if request.path.startswith(ROLLOUT):
            response.headers[EPOCH] = self._gateway.driver.epoch


class _Guards:
    """Asks for the key that a route needs; `access` is the class of each."""

    def __init__(self, gateway: Gateway, auth: AccessControl, control: FleetControl) -> None:
        self.access: dict[web.AbstractResource, Access] = {}
        self._gateway = gateway
        self._auth = auth
        self._control = control

    def add(self, app: web.Application, access: Access, *rooms: list[web.RouteDef]) -> None:
        """Raises ValueError for a path that has another class already."""
        for route in app.add_routes(list(chain.from_iterable(rooms))):
            assert route.resource is not None  # it has a path
            if self.access.setdefault(route.resource, access) is not access:
                raise ValueError(f"{route.resource.canonical} is of two classes")

    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.http_exception is not None:
            return await handler(request)  # which raises it: there is no such route
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
        """Whoever forgot to say whose a route is has made it the administrators'."""
        resource = request.match_info.route.resource
        return Access.ADMIN if resource is None else self.access.get(resource, Access.ADMIN)

    def _unknown(self, request: web.Request) -> Access:
        """Of a path that is passed on. What we do not know may change an instance."""
        if _INFERENCE.fullmatch(request.path):
            return Access.CLIENT
        one = self._control.goes_to_one(request.method, request.path)
        return Access.TRAINER if one else Access.ADMIN

    def _would_change_one_of_many(self, request: web.Request) -> bool:
        return request.method != "GET" and len(self._gateway.supervisors()) > 1

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """To the least loaded instance, or to any if all are full."""
        instance = self._gateway.driver.view.least_loaded()
        if instance is None:
            return refusal(503, "no instance is here")
        if _INFERENCE.fullmatch(request.path) is None:
            body = await body_of(request)
            await self._gateway.weight_loaders.paths.check(request.method, request.path, body)
        client = self._gateway.driver.supervisors[instance.id].client
        silence_s = self._gateway.driver.settings.update_timeout_s
        return await relay(request, cast(Upstream, client), silence_s=silence_s)


def _comes_by_socket(request: web.Request) -> bool:
    """Whether by --admin-socket, which only its owner can open."""
    transport = request.transport
    taken = None if transport is None else transport.get_extra_info("socket")
    return taken is not None and taken.family == _UNIX


@web.middleware
async def _as_answers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What goes wrong, as OpenAI's clients expect to hear of it."""
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
        return refusal(400, "the request broke off")
    except Exception as error:
        path = request.rel_url.raw_path  # a query may hold a secret
        log.exception("%s %s", request.method, path)
        return refusal(500, f"the gateway failed: {error}")


@web.middleware
async def _to_the_end(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A client that goes away does not leave half of the instances paused.

    Who still waits when the gateway stops is told so.
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
    await asyncio.wait({handling}, timeout=CANCEL_S)  # an answer that has begun is cut off by it
    return refusal(503, "the gateway stops, and this had not ended; ask again when it is back")


async def _close_after(request: web.Request, response: web.StreamResponse) -> None:
    response.force_close()
    response.headers["Connection"] = "close"
