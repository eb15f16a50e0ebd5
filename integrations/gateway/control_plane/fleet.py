"""Sends calls that are meant for one vLLM server to a fleet, by the table of `fanout_table.toml`.

A client that expects one server gets an answer like that of one server: the status, and the fields
that all answers share. The answers of the single instances are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.events import SessionEnded
from rollout_sched.integrations.gateway.control_plane.codec import body_of, read, refusal, reply
from rollout_sched.integrations.gateway.control_plane.fanout import (
    Answer,
    FleetCall,
    Rule,
    broadcast,
    forwardable,
    is_plain,
    multi_status,
    shipped,
    still_asleep,
)
from rollout_sched.integrations.gateway.control_plane.gateway import (
    Gateway,
    InstanceView,
    NewInstance,
)
from rollout_sched.integrations.gateway.data_plane.call import error_body
from rollout_sched.integrations.sglang.protocol import ABORT as SGLANG_ABORT
from rollout_sched.integrations.vllm.protocol.endpoints import ENDPOINTS, engine_id
from rollout_sched.live.instances import InstanceSupervisor

#: For a call that a client may retry: a retry goes only to the instances that failed, or does no
#: harm. TRL 1.16 retries after 500, 502 and 503, prime-rl (2026-08) after every status from 500 on.
REPEATABLE = 502

#: For a call in which all ranks take part: no client retries after this status. A retry would wait
#: for the other ranks.
NOT_REPEATABLE = 424

_AGAIN = {
    REPEATABLE: "a retry goes only to the instances that have not done it",
    NOT_REPEATABLE: "do not retry, because the other ranks would not take part: set up the "
    "transfer again, and begin the update again",
}


class _Abort(msgspec.Struct):
    """vLLM's `request_ids` (none: every request), or SGLang's `rid` and `abort_all`."""

    request_ids: list[str] | None = None
    rid: str = ""
    abort_all: bool = False

    def wants(self, path: str, name: str) -> bool:
        """Whether it is about a call that its client has named so. An id at SGLang stands for all
        that begin with it; at vLLM it is made from the name."""
        if path == SGLANG_ABORT:
            return self.abort_all or bool(self.rid and name.startswith(self.rid))
        if self.request_ids is None:
            return True
        ids = {name, *(engine_id(endpoint, name) for endpoint in ENDPOINTS.values())}
        return bool(name) and not ids.isdisjoint(self.request_ids)


class FleetControl:
    """The calls of the table that go to more than one instance. They are a trainer's, except those
    that change the server itself and are refused if there are several instances."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._updates = gateway.trainer_updates
        self._table = shipped()

    def goes_to_one(self, method: str, path: str) -> bool:
        """Whether any instance may answer for all."""
        rule = self._table.rule_for(method, path)
        return rule is not None and rule.to == "one"

    async def call(self, request: web.Request) -> web.Response:
        """Raises CallerError, or InstanceError if an instance does not answer a needed question."""
        rule = self._table.calls[request.method, request.path]
        if rule.to == "refuse" and len(self._gateway.supervisors()) > 1:
            return refusal(
                409,
                f"{request.path} is passed on only if there is one instance: {rule.because}; send "
                f"it to one at /v1/rl/workers/ID/engine{request.path}",
            )
        call = await call_of(self._gateway, request, request.path)
        together = self._updates.ranks_meet_in(self._table.step(rule, call.body))
        answer = await self.carry_out(call, rule)
        return _as_one_server(request, rule, answer, NOT_REPEATABLE if together else REPEATABLE)

    async def abort(self, request: web.Request) -> web.Response:
        """Clients' calls are answered with what they have; the trainer's batches are not touched,
        and nothing is passed on."""
        asked = await read(request, _Abort)
        driver, path = self._gateway.driver, request.path
        names = self._gateway.data_plane.abort(lambda name: asked.wants(path, name))
        for name in names:
            driver.abort(name)
        return reply(request, {"status": "aborted", "aborted": len(names)})

    async def carry_out(self, call: FleetCall, rule: Rule) -> Answer:
        """Send it to all concerned instances; failures of instances that have not joined are listed
        separately, in `away`."""
        step = self._table.step(rule, call.body)
        if step is not None:
            return await self._updates.send(call, step, rule.ranks)
        if rule.pause == "release":
            self._updates.check_release(call.path)
        everybody = self._gateway.supervisors()
        joined = [supervisor for supervisor in everybody if supervisor.joined]
        here = {each.name for each in (self._updates.reachable() if rule.sum else joined)}
        asked = [each for each in everybody if rule.away or each.name in here]
        _, answer = await broadcast(asked, call)
        away = [failure for failure in answer["failed"] if failure["url"] not in here]
        failed = [failure for failure in answer["failed"] if failure["url"] in here]
        if rule.pause == "release":
            await self._released(asked, answer)
        elif rule.pause == "hold":
            self._updates.held(result["url"] for result in answer["results"].values())
        return {**answer, "failed": failed, "away": away}

    async def _released(self, asked: Sequence[InstanceSupervisor], answer: Answer) -> None:
        """An instance that is away and did not receive the call resumes when it is back."""
        results = answer["results"].values()
        asleep = {each["url"] for each in results if still_asleep(each["body"])}
        self._updates.released(each.name for each in asked if each.name not in asleep)
        for supervisor in asked:
            if supervisor.control.held and not supervisor.joined:
                await supervisor.control.release()


async def call_of(gateway: Gateway, request: web.Request, path: str) -> FleetCall:
    """The call for instances, on a path of theirs. The query stays encoded, because a decoded "%26"
    would separate parameters; `selector` is removed, it is for the gateway. Raises CallerError for
    weights outside of the allowed folders."""
    pairs = request.raw_path.partition("?")[2].split("&")
    query = "&".join(pair for pair in pairs if unquote(pair.split("=")[0]) != "selector")
    headers = forwardable(request.raw_headers)
    body = await body_of(request)
    body = await gateway.resolve_paths(request.method, path, query, body)
    limit_s = gateway.driver.settings.update_timeout_s
    rule = shipped().rule_for(request.method, path)
    pause = None if rule is None else rule.pause
    return FleetCall(request.method, path, query, headers, body, limit_s, pause)


def _as_one_server(request: web.Request, rule: Rule, answer: Answer, failing: int) -> web.Response:
    """`failing`: the status if not all joined instances have done it."""
    results, failed, before = answer["results"], answer["failed"], answer.get("done_before", 0)
    if not answer["total"] + before:
        return refusal(503, "no instance has joined")
    if failed or not (results or before):
        status, text = _failure(request.path, answer, failing)
        error = msgspec.json.decode(error_body(status, text))
        return reply(request, {**error, **answer}, status)
    bodies = [result["body"] for result in results.values()]
    return reply(request, {**_shared(bodies, rule.sum), **answer})


def _failure(path: str, answer: Answer, failing: int) -> tuple[int, str]:
    failed = answer["failed"]
    if not failed:
        return failing, f"{path} reached no instance: none has joined"
    statuses = {failure["status"] for failure in failed}
    names = ", ".join(
        f"{failure['url']} ({failure['status'] or 'no answer'})" for failure in failed
    )
    text = f"{path} failed on {names}"
    refused = statuses.pop() if len(statuses) == 1 and not answer["results"] else None
    if refused is not None and 400 <= refused < 500:
        return refused, text
    return failing, f"{text}; {_AGAIN[failing]}"


def _shared(bodies: list[Any], summed: str) -> dict[str, Any]:
    """The fields that are equal in all answers; a flag is true if it is true in all of them."""
    objects = [body for body in bodies if isinstance(body, dict)]
    if not objects or len(objects) < len(bodies):
        return {}
    first, *others = objects
    shared = {}
    for field, value in first.items():
        values = [value, *(other.get(field) for other in others)]
        if field == summed and all(type(value) is int for value in values):
            shared[field] = sum(values)
        elif all(isinstance(value, bool) for value in values):
            shared[field] = all(values)
        elif all(value == values[0] for value in values):
            shared[field] = value
    return shared


# ------------------------------------------------------------------------------------------
# Routes to manage instances that are compatible with other routers.
#
# Names and answers follow sglang-router and vllm-router (/add_worker, /remove_worker,
# /list_workers, /workers, /finish_session) and smg (/v1/rl), so a trainer that was written for one
# of them needs no change.

#: Selectors that match every instance.
EVERYBODY = ("", "*", "all")


class WorkerRoutes:
    """The handlers; the paths and their access classes stand in `app`."""

    def __init__(self, gateway: Gateway, control: FleetControl) -> None:
        self._gateway = gateway
        self._control = control

    # -- sglang-router and vllm-router -----------------------------------------------------

    async def list_all(self, request: web.Request) -> web.Response:
        """All instances, in the format of sglang-router and vllm-router."""
        workers = [_worker(view) for view in self._views()]
        workers += [{"id": "gateway", "url": url} for url in self._own_url(request)]
        return reply(request, {"workers": workers, "total": len(workers)})

    async def show(self, request: web.Request) -> web.Response:
        """One instance, as `GET /workers` shows it."""
        supervisor = self._gateway.supervisor(request.match_info["id"])
        return reply(request, _worker(self._gateway.view(supervisor)))

    async def add(self, request: web.Request) -> web.Response:
        """Add an instance, as these routers do."""
        supervisor = await self._gateway.add(await read(request, NewInstance))
        return reply(request, _worker(self._gateway.view(supervisor)), 201)

    async def remove(self, request: web.Request) -> web.Response:
        """Remove an instance at once."""
        await self._gateway.remove(request.match_info["id"])
        return reply(request, {"message": f"removed {request.match_info['id']}"})

    async def add_by_query(self, request: web.Request) -> web.Response:
        """Add the instance of the query's `url`."""
        supervisor = await self._gateway.add(NewInstance(_named(request, "url")))
        return web.Response(text=f"Successfully added worker: {supervisor.name}")

    async def remove_by_query(self, request: web.Request) -> web.Response:
        """Remove the instance of the query's `url`."""
        url = _named(request, "url")
        await self._gateway.remove(url)
        return web.Response(text=f"Successfully removed worker: {url}")

    async def list_urls(self, request: web.Request) -> web.Response:
        """The URLs of all instances."""
        return reply(
            request, {"urls": [*(view.url for view in self._views()), *self._own_url(request)]}
        )

    async def finish_session(self, request: web.Request) -> web.Response:
        """Forget the session of the query's `session_id`."""
        session = _named(request, "session_id")
        known = self._gateway.driver.view.knows_session(session)
        if known:
            self._gateway.driver.tell(SessionEnded(session))
        return reply(request, {"session_id": session, "finished": known})

    # -- smg -------------------------------------------------------------------------------

    async def list_rl(self, request: web.Request) -> web.Response:
        """All instances, for trainers."""
        workers = [_rl_worker(view) for view in self._views()]
        return reply(request, {"workers": workers, "total": len(workers)})

    async def show_rl(self, request: web.Request) -> web.Response:
        """One instance, as `GET /v1/rl/workers` shows it."""
        supervisor = self._gateway.supervisor(request.match_info["id"])
        return reply(request, _rl_worker(self._gateway.view(supervisor)))

    async def engine(self, request: web.Request) -> web.Response:
        """Send to all instances, or to those that `selector` matches: "key=value,...", with the
        fields of the list."""
        call = await call_of(self._gateway, request, _path_of_engine(request))
        selector = request.query.get("selector", "")
        rule = shipped().rule_for(call.method, call.path)
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

    def _own_url(self, request: web.Request) -> list[str]:
        """The address by which the caller has reached the gateway, if it lists itself."""
        return [str(request.url.origin())] if self._gateway.lists_itself else []

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
