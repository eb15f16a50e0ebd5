"""Sends one control call to several instances and gathers their answers and failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import msgspec

from rollout_sched.integrations.gateway.control_plane.instance_access import id_of
from rollout_sched.integrations.gateway.data_plane.upstream import Upstream
from rollout_sched.live.instance_supervisor import InstanceSupervisor
from rollout_sched.live.ports import InstanceError

#: `results` by instance, `failed`, `total`, `succeeded`.
Answer = dict[str, Any]


class FleetCall(NamedTuple):
    """A call for every instance; `query` without "?". `pause`: whether the call pauses the instance
    or resumes it."""

    method: str
    path: str
    query: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    timeout_s: float
    pause: Literal["hold", "release"] | None = None


class InstanceRefused(InstanceError):
    """An instance answered with a status other than success."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.body = body


async def broadcast(
    supervisors: Sequence[InstanceSupervisor],
    call: FleetCall,
    bodies: Mapping[str, bytes] | None = None,
) -> tuple[int, Answer]:
    """As `to_each`; every result has the status and the body of an instance's answer.

    `bodies`: bodies by instance name, if they differ.
    """

    async def order(supervisor: InstanceSupervisor) -> dict[str, Any]:
        own = call if bodies is None else call._replace(body=bodies[supervisor.name])
        return await _ask(supervisor, own)

    return await to_each(supervisors, order)


async def to_each(
    supervisors: Sequence[InstanceSupervisor],
    order: Callable[[InstanceSupervisor], Awaitable[dict[str, Any]]],
) -> tuple[int, Answer]:
    """(`multi_status`, answer)"""
    answers = await asyncio.gather(*(_done(supervisor, order) for supervisor in supervisors))
    failed = [answer for answer in answers if "error" in answer]
    results = {answer.pop("worker_id"): answer for answer in answers if "error" not in answer}
    answer: Answer = {
        "results": results,
        "failed": failed,
        "total": len(answers),
        "succeeded": len(results),
    }
    return multi_status(answer), answer


def multi_status(answer: Answer) -> int:
    """As in smg: 200, 207 if some failed, 502 if all failed, 503 if there was no instance."""
    if answer["failed"]:
        return 207 if answer["results"] else 502
    return 200 if answer["total"] or answer.get("done_before") else 503


async def _done(
    supervisor: InstanceSupervisor, order: Callable[[InstanceSupervisor], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    who = {"worker_id": id_of(supervisor.name), "url": supervisor.name}
    begun = time.monotonic()
    try:
        done = await order(supervisor)
    except InstanceRefused as error:
        return {**who, "status": error.status, "error": "refused", "message": error.body}
    except Exception as error:  # no error of one instance may lose the answers of the others
        text = str(error) or type(error).__name__
        return {**who, "status": None, "error": "unreachable", "message": text}
    return {**who, "latency_ms": round(1000 * (time.monotonic() - begun)), **done}


async def _ask(supervisor: InstanceSupervisor, call: FleetCall) -> dict[str, Any]:
    if supervisor.description is None and not supervisor.admission.awaits_weights:
        raise InstanceError(
            f"not passed on, this server has never answered as vLLM: {supervisor.reason}"
        )
    client = cast(Upstream, supervisor.client)
    target = f"{call.path}?{call.query}" if call.query else call.path
    headers = [*call.headers, *client.request_headers]
    async with supervisor.control_lock:
        response = await client.pool.request(
            call.method, target, headers, call.body, call.timeout_s
        )
        body = _readable(response.body)
        if response.status >= 300:
            raise InstanceRefused(response.status, body)
        _note(supervisor, call, body)
    return {"status": response.status, "body": body}


def _note(supervisor: InstanceSupervisor, call: FleetCall, body: Any) -> None:
    """Tell the instance's supervisor that the instance is paused or resumed."""
    if call.pause == "hold":
        supervisor.pauses.note_held()
    elif call.pause == "release" and not still_asleep(body):
        supervisor.pauses.note_released()


def still_asleep(body: Any) -> bool:
    """Whether an answer to /wake_up says that only part of the memory is back, as `tags` asked."""
    return isinstance(body, dict) and body.get("status") == "sleeping"


def _readable(body: bytes) -> Any:
    """JSON as a value that every format can encode, anything else as text."""
    try:
        value = msgspec.json.decode(body)
        msgspec.msgpack.encode(value)  # has no integers beyond 64 bits
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
        return body.decode(errors="replace")
    return value
