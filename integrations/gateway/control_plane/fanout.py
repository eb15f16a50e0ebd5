"""Reads `fanout_table.toml`: to which instances a call that is meant for one server goes.

A call that is not in the table may not configure one instance of many. Each row is tested, so
support for a trainer's new path is one line. The trainer gets one server's answer, because trainers
read nothing else: an error if some instances failed, since SkyRL and prime-rl take 207 for success,
with a status that says whether to send it again, since TRL and prime-rl retry without reading the
body.
"""

from __future__ import annotations

import asyncio
import re
import time
import tomllib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast
from urllib.parse import quote

import msgspec
from aiohttp import web

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.auth import id_of
from rollout_sched.integrations.gateway.control_plane.weight_protocol import ProtocolStep
from rollout_sched.integrations.gateway.data_plane.call import Upstream
from rollout_sched.integrations.gateway.data_plane.client_request import NOT_FORWARDED
from rollout_sched.integrations.http import Exchange
from rollout_sched.integrations.vllm.weights import RankFields
from rollout_sched.live.instances import InstanceSupervisor
from rollout_sched.live.ports import InstanceError

_FILE = Path(__file__).with_name("fanout_table.toml")


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row; the file explains each field. Raises ValueError for fields that contradict."""

    to: Literal["all", "rewrite", "one", "refuse"]
    pause: Literal["hold", "release"] | None = None
    away: bool = False
    update: ProtocolStep | None = None
    ranks: RankFields | None = None
    sum: str = ""
    because: str = ""

    def __post_init__(self) -> None:
        if (self.to == "rewrite") != (self.ranks is not None):
            raise ValueError('`ranks` belongs to "rewrite", and "rewrite" needs it')
        if (self.to == "refuse") != bool(self.because):
            raise ValueError('`because` belongs to "refuse", and "refuse" needs it')
        if self.away and (self.update or self.sum):
            raise ValueError("`away` cannot be combined with `update` or `sum`")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    calls: dict[str, Rule]
    rpc: dict[str, ProtocolStep]
    rpc_paths: frozenset[str] = frozenset()


class FanoutTable:
    """The rules by method and path."""

    def __init__(
        self,
        calls: Mapping[tuple[str, str], Rule],
        rpc: Mapping[str, ProtocolStep],
        rpc_paths: frozenset[str],
    ) -> None:
        self.calls = calls
        self._rpc = rpc
        self._rpc_paths = rpc_paths

    def rule_for(self, method: str, path: str) -> Rule | None:
        return self.calls.get((method, path))

    def path_fields(self, method: str, path: str, body: bytes) -> frozenset[str]:
        """The fields of a call's body that name weights on disk, though their names do not say
        so."""
        rule = self.rule_for(method, path)
        by_method = rule is not None and rule.update is ProtocolStep.BY_METHOD
        return frozenset({"args"} if by_method and _called(body) in self._rpc_paths else ())

    def step(self, rule: Rule, body: bytes) -> ProtocolStep | None:
        """The weight update step of a call; for /collective_rpc its body decides."""
        return (
            self._rpc.get(_called(body)) if rule.update is ProtocolStep.BY_METHOD else rule.update
        )


class _Rpc(msgspec.Struct):
    method: str


def _called(body: bytes) -> str:
    """The worker's method; "" for an invalid body, about which the instances report the error."""
    try:
        return msgspec.json.decode(body, type=_Rpc).method
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


@cache
def shipped() -> FanoutTable:
    """The table of this version."""
    return read(_FILE.read_text("utf-8"))


def read(text: str) -> FanoutTable:
    """Raises ValueError with the row."""
    try:
        raw: dict[str, Any] = tomllib.loads(text)
        file = msgspec.convert(raw, _File)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{_FILE.name}: {error}") from error
    calls = {}
    for name, rule in file.calls.items():
        method, _, path = name.partition(" ")
        if method not in ("GET", "POST") or not path.startswith("/"):
            raise ValueError(f'{_FILE.name}: {name!r} is not "GET /path" or "POST /path"')
        calls[method, path] = rule
    return FanoutTable(calls, file.rpc, file.rpc_paths)


# ------------------------------------------------------------------------------------------
# Passes a call that concerns only the instance on unchanged, and its answer back.

#: Bytes read from the instance but not yet by the client, beyond which reading pauses.
AHEAD = 2**20

#: Seconds within which a client must read one part of an answer.
CLIENT_STALL_S = 60.0

_DROPPED = (NOT_FORWARDED | {b"proxy-connection"}) - {b"x-request-id"}

#: Other paths could mean one thing here and another to the instance.
_PLAIN = re.compile(r"/[\w/.~-]*")


class InstanceSilent(InstanceError):
    """An instance accepted a call and does not answer."""


def is_plain(path: str) -> bool:
    """Whether every server reads a raw path the same way."""
    return (
        _PLAIN.fullmatch(path) is not None
        and "//" not in path
        and not any(part in (".", "..") for part in path.split("/"))
    )


#: The address in a redirect; without it, the path is one of the gateway.
_OWN_ADDRESS = re.compile(rb"(?:https?:)?//[^/?#]*", re.IGNORECASE)


def forwardable(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers without hop-by-hop headers, including those that Connection names."""
    lowered = [(name.lower(), value) for name, value in headers]
    between = {
        name.strip()
        for field, value in lowered
        if field == b"connection"
        for name in value.lower().split(b",")
    }
    return [field for field in lowered if field[0] not in _DROPPED and field[0] not in between]


async def relay(
    request: web.Request, body: bytes, client: Upstream, *, silence_s: float
) -> web.StreamResponse:
    """`silence_s`: the longest time without data from the instance, before or within its answer.

    Raises InstanceError if the instance does not begin to answer.
    """
    headers = [*forwardable(request.raw_headers), *client.request_headers]
    answer = _Answer()
    try:
        answer.exchange = client.pool.send(
            request.method, request.raw_path, headers, body, answer, alone=True
        )
    except ValueError as error:
        raise CallerError(f"the call cannot be passed on: {error}") from error
    except RuntimeError as error:  # it is being removed
        raise InstanceError(str(error)) from error
    try:
        response = await _begun(client, answer, silence_s)
        try:
            await response.prepare(request)
            while data := await answer.data(silence_s):
                async with asyncio.timeout(CLIENT_STALL_S):
                    await response.write(data)
            async with asyncio.timeout(CLIENT_STALL_S):
                await response.write_eof()
        except BaseException as error:  # an incomplete answer must not look complete
            if request.transport is not None:
                request.transport.abort()
            if not isinstance(error, OSError):  # a side has disconnected or is too slow
                raise
        return response
    finally:
        answer.exchange.cancel()


async def _begun(client: Upstream, answer: _Answer, silence_s: float) -> web.StreamResponse:
    try:
        async with asyncio.timeout(silence_s):
            status, fields = await answer.head
    except TimeoutError as error:
        raise InstanceSilent(f"{client.name} did not answer within {silence_s:g} s") from error
    except OSError as error:  # raised by the pool
        raise InstanceError(f"{client.name}: {error}") from error
    response = web.StreamResponse(status=status)
    for name, value in forwardable(fields):
        if name.lower() == b"location":  # the client cannot and must not go to the instance itself
            value = _OWN_ADDRESS.sub(b"", value)
        response.headers.add(name.decode("latin-1"), value.decode("latin-1"))
    response.headers["X-Rollout-Sched-Instance"] = client.name
    return response


class _Answer:
    """An answer as it arrives (integrations.http.exchange.Receiver), read part by part."""

    exchange: Exchange

    def __init__(self) -> None:
        self.head: asyncio.Future[tuple[int, list[tuple[bytes, bytes]]]]
        self.head = asyncio.get_running_loop().create_future()
        self._ahead = 0
        self._parts: asyncio.Queue[bytes | Exception] = asyncio.Queue()

    async def data(self, silence_s: float) -> bytes:
        """The next part; b"" at the end. Raises the error that ended it early, or TimeoutError."""
        async with asyncio.timeout(silence_s):
            part = await self._parts.get()
        if isinstance(part, Exception):
            raise part
        was, self._ahead = self._ahead, self._ahead - len(part)
        if was > AHEAD >= self._ahead:
            self.exchange.resume()
        return part

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if not self.head.done():
            self.head.set_result((status, headers))

    def on_data(self, data: bytes) -> None:
        was, self._ahead = self._ahead, self._ahead + len(data)
        self._parts.put_nowait(data)
        if was <= AHEAD < self._ahead:
            self.exchange.pause()

    def on_end(self) -> None:
        self._parts.put_nowait(b"")

    def on_error(self, error: Exception) -> None:
        if not self.head.done():
            self.head.set_exception(error)
        else:
            self._parts.put_nowait(error)


# ------------------------------------------------------------------------------------------
# A call that goes on from a response (/v1/responses) goes to the instance that has it.

#: Seconds for an instance to say whether it has a response.
HOLDER_S = 5.0

_RESPONSES = re.compile(r"/v1/responses(?:/(?P<id>[^/]+)(?:/\w+)?)?")


class _Chained(msgspec.Struct):
    previous_response_id: str | None = None


def needed_response(path: str, body: bytes) -> str:
    """The id of the response that a call is about, or goes on from; "" if there is none."""
    found = _RESPONSES.fullmatch(path)
    if found is None:
        return ""
    try:
        return found["id"] or msgspec.json.decode(body, type=_Chained).previous_response_id or ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""  # the instance says what is wrong


async def holder_of(response_id: str, clients: Sequence[Upstream]) -> Upstream | None:
    """The instance that has a response in its memory; None if no instance has it."""
    path = f"/v1/responses/{quote(response_id, safe='')}"

    async def has(client: Upstream) -> bool:
        headers = [*client.request_headers]
        answer = await client.pool.request("GET", path, headers, b"", HOLDER_S, alone=True)
        return bool(answer.status == 200)

    told = await asyncio.gather(*(has(client) for client in clients), return_exceptions=True)
    return next((client for client, said in zip(clients, told, strict=True) if said is True), None)


# ------------------------------------------------------------------------------------------
# Sends one control call to several instances and gathers their answers and failures.

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
    """The status of an answer for all, as in smg: 200, 207 if some failed, 502 if all failed, 503
    if there was no instance."""
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
            call.method, target, headers, call.body, call.timeout_s, alone=True
        )
        body = _readable(response.body)
        if response.status >= 300:
            raise InstanceRefused(response.status, body)
        _note(supervisor, call, body)
    return {"status": response.status, "body": body}


def _note(supervisor: InstanceSupervisor, call: FleetCall, body: Any) -> None:
    """Tell the instance's supervisor that the instance is paused or resumed."""
    if call.pause == "hold":
        supervisor.control.note_held()
    elif call.pause == "release" and not still_asleep(body):
        supervisor.control.note_released()


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
