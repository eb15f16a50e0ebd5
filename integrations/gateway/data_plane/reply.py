"""The answer to a client over HTTP, which ends exactly once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from rollout_sched.core.model.records import ONE_IN
from rollout_sched.integrations.gateway.data_plane.call import (
    JSON,
    KEEP_ALIVE,
    UpstreamCall,
    Write,
    error_body,
)
from rollout_sched.integrations.gateway.data_plane.client_request import Headers, HttpRequest
from rollout_sched.integrations.gateway.data_plane.fields import BadRequest
from rollout_sched.integrations.vllm.protocol.answers import as_event
from rollout_sched.live.ports import Outcome, Over, Payload

log = logging.getLogger(__name__)
access_log = logging.getLogger("rollout_sched.access")


@dataclass(frozen=True)
class Limits:
    """The limits on what clients may have in the gateway at once. A call beyond a limit is refused:
    for now, or permanently if it could never fit.

    requests         responses that clients wait for
    body_bytes       bytes of the bodies that are sent to instances for them
    samples          responses that one call may ask for: all are submitted at once while others
                     wait
    client_requests  responses that one client may wait for; None: as many as leave room for others
    client_tokens    tokens of prompts and responses that one client may wait for; None: any number
    """

    requests: int = 100_000
    body_bytes: int = 4 * 2**30
    samples: int = 16_384
    client_requests: int | None = None
    client_tokens: int | None = None
    retry_after_s: int = 1


# ------------------------------------------------------------------------------------------
# Gives events of running streams priority over calls that begin or end.
#
# Starting or ending a call costs as much as passing on several events. When many streams end
# together, their successors begin together, and all running streams would wait for each of them. So
# while streams are open, one such call is processed per iteration of the event loop, and events
# that have arrived for the streams are passed on in between.

#: Most calls that may wait. Beyond this the oldest runs immediately, so that a flood of calls is
#: not held in memory before it is counted, and the first calls do not wait long.
MAX_WAITING = 1024

Subject = TypeVar("Subject")

#: Called with the exception that a call raises.
Failed = Callable[[Exception], None]


class Pacer:
    """Calls functions in order: at once, or in a later iteration while `streams` are open.

    An exception of one call does not reach the next caller and does not stop the other calls.
    """

    def __init__(self) -> None:
        self.streams = 0
        self._taken = False  # a call has run in this iteration
        self._waiting: deque[tuple[Callable[[Any], None], Any, Failed]] = deque()

    def take(self, do: Callable[[Subject], None], subject: Subject, failed: Failed) -> None:
        """Call `do(subject)`, and `failed` with the exception that it raises."""
        if self._taken:
            self._waiting.append((do, subject, failed))
            if len(self._waiting) > MAX_WAITING:
                self._do_oldest()
            return
        if self.streams:
            self._taken = True
            asyncio.get_running_loop().call_soon(self._next)
        self._do(do, subject, failed)

    def _next(self) -> None:
        self._taken = bool(self._waiting)
        if self._taken:
            asyncio.get_running_loop().call_soon(self._next)
            self._do_oldest()

    def _do_oldest(self) -> None:
        do, subject, failed = self._waiting.popleft()
        self._do(do, subject, failed)

    def _do(self, do: Callable[[Any], None], subject: Any, failed: Failed) -> None:
        try:
            do(subject)
        except Exception as error:
            try:
                failed(error)
            except Exception:
                log.exception("a call could not be ended")


#: nginx's status for a client that disconnected before it had its answer.
CLIENT_LEFT = 499


class Responses:
    """Counts how calls ended, by status, and optionally logs a line for each. 4xx are the client's
    fault, 5xx are not. A stream counts with the status that it would have had if its end had been
    known at its beginning.

    `logs`: write a line per call to the access log, without the query, which may contain keys.
    """

    __slots__ = ("_logs", "by_status")

    def __init__(self, *, logs: bool = False) -> None:
        self.by_status: dict[int, int] = {}
        self._logs = logs

    def begin(self) -> float:
        """The value to pass to `end`: the time of the beginning."""
        return time.monotonic() if self._logs else 0.0

    def end(self, method: bytes, target: bytes, status: int, begun: float) -> None:
        """A call has ended, answered or not."""
        self.by_status[status] = self.by_status.get(status, 0) + 1
        if self._logs:
            self._say(method.decode(), target.partition(b"?")[0].decode("latin-1"), status, begun)

    def _say(self, method: str, path: str, status: int, begun: float) -> None:
        seconds = time.monotonic() - begun
        fields = {"method": method, "path": path, "status": status, "duration_s": seconds}
        access_log.info("%s %s %d %.3f s", method, path, status, seconds, extra={"fields": fields})


# ------------------------------------------------------------------------------------------
# The open calls of clients, counted against the limits.


#: nginx cuts a connection after 60 silent seconds.
KEEP_ALIVE_S = 15.0


class Unavailable(Exception):
    """The call cannot be accepted at present; the text says why."""

    status: ClassVar[int] = 503  # else it is missing where it is compiled


class TooMany(Unavailable):
    """Its client has so many open calls that it gets no more for now, although others may."""

    status: ClassVar[int] = 429


class Load:
    """What calls count for.

    requests    responses that clients wait for
    body_bytes  bytes of the bodies that are sent to instances for them
    tokens      of prompts and responses
    """

    __slots__ = ("body_bytes", "requests", "tokens")

    def __init__(self, requests: int = 0, body_bytes: int = 0, tokens: int = 0) -> None:
        self.requests = requests
        self.body_bytes = body_bytes
        self.tokens = tokens

    def grow(self, other: Load, by: int) -> None:
        """Add `other` (`by` 1) or take it away (-1)."""
        self.requests += by * other.requests
        self.body_bytes += by * other.body_bytes
        self.tokens += by * other.tokens


class OpenReply(Protocol):
    """Where the answer to an open call goes; `name`: the client's own name for the call."""

    @property
    def name(self) -> str: ...
    def abort(self) -> list[str]: ...
    def keep_alive(self) -> None: ...
    def fail(self, status: int, text: str) -> None: ...


class OpenCalls:
    """The open calls.

    open       what all of them count for
    clients    what those of each client count for; the trainer is ""
    replies    where their answers go, in order of arrival
    pacer      decides which work runs first
    responses  how ended calls ended
    """

    def __init__(self, limits: Limits, responses: Responses | None = None) -> None:
        self.limits = limits
        self.open = Load()
        self.clients: dict[str, Load] = {}
        self.replies: dict[OpenReply, None] = {}
        self.pacer = Pacer()
        self.responses = responses or Responses()
        self._timer: asyncio.TimerHandle | None = None

    def keep_alive(self) -> None:
        """Send a comment to each stream that was silent for `KEEP_ALIVE_S` seconds, as while its
        response waits in the gateway or is paused with its instance: no proxy cuts it."""
        if not self.replies:
            self._timer = None
            return
        for reply in list(self.replies):
            reply.keep_alive()
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self.keep_alive)

    def enter(self, reply: OpenReply, client: str, load: Load) -> None:
        """Count a call."""
        self.replies[reply] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self.keep_alive)
        self.open.grow(load, 1)
        self.clients.setdefault(client, Load()).grow(load, 1)

    def leave(self, reply: OpenReply, client: str, load: Load) -> None:
        self.replies.pop(reply, None)
        self.open.grow(load, -1)
        held = self.clients[client]
        held.grow(load, -1)
        if not held.requests:
            del self.clients[client]

    def check_room(self, client: str, load: Load) -> None:
        """Raises TooMany if a call of this load does not fit beside its client's others,
        Unavailable if it does not fit beside all others, BadRequest if it never can."""
        limits, open = self.limits, self.open
        if load.body_bytes > limits.body_bytes:
            raise BadRequest(
                f"the bodies of the call's {load.requests} responses have {load.body_bytes} bytes, "
                f"the limit for all bodies is {limits.body_bytes}; ask for fewer responses in one "
                "call",
                413,
            )
        if client:
            self._check_share(client, load)
        if open.requests + load.requests > limits.requests:
            raise Unavailable(
                f"too many requests: {open.requests} responses are pending, the limit is "
                f"{limits.requests}, the call asks for {load.requests}"
            )
        if open.body_bytes + load.body_bytes > limits.body_bytes:
            raise Unavailable(
                f"too many bytes: pending bodies have {open.body_bytes}, the limit is "
                f"{limits.body_bytes}, the call has {load.body_bytes}"
            )

    def _check_share(self, client: str, load: Load) -> None:
        """A client's own limits; and some room is left for those that have less."""
        limits, held = self.limits, self.clients.get(client, _NOTHING)
        for what, has, asks, most in (
            ("responses", held.requests, load.requests, limits.client_requests),
            ("tokens", held.tokens, load.tokens, limits.client_tokens),
        ):
            if most is not None and has + asks > most:
                if asks > most:
                    raise BadRequest(f"the call asks for {asks} {what}, a client's limit is {most}")
                raise TooMany(
                    f"too many requests of this client: {has} {what} are pending, its limit is "
                    f"{most}, the call asks for {asks}"
                )
        for what, has, asks, all_have, most in (
            ("responses", held.requests, load.requests, self.open.requests, limits.requests),
            ("bytes", held.body_bytes, load.body_bytes, self.open.body_bytes, limits.body_bytes),
        ):
            free, kept = most - all_have, most // ONE_IN
            if has and kept and free - asks < kept and has + asks > free:
                raise TooMany(
                    f"too many requests of this client: {has} of the {most} {what} that may be "
                    f"pending are its own, and the {free} that are left are kept for others"
                )


_NOTHING = Load()


class Scheduling(Protocol):
    """The interface to which the data plane submits the requests of clients' calls. The driver in
    this process (`live.driver`), or a front's link to a driver in another process
    (`link.front`)."""

    def max_model_len(self) -> int:
        """Tokens of prompt and response that some instance takes; 0 without instances."""

    def submit(
        self,
        payload: Payload,
        prompt_tokens: int,
        max_tokens: int,
        group: str = "",
        session: str = "",
        priority: int = 0,
        client: str = "",
    ) -> str:
        """Ask for one response, which is answered when it is finished; returns the request's id."""

    def withdraw(self, request: str) -> None:
        """The client of a submitted request has disconnected."""


class HttpReply:
    """The answer to a client over HTTP; its call counts for `load` with its client.

    It ends exactly once: by its answer, the end of its stream, a failure of the gateway or a
    disconnect of the client. Then its responses no longer count against the limits, unfinished ones
    are withdrawn after a failure or disconnect, and later output for it is dropped.
    """

    __slots__ = (
        "_begun",
        "_calls",
        "_client",
        "_load",
        "_request",
        "_requests",
        "_scheduling",
        "_silent",
        "_streams",
        "aborted",
        "name",
        "over",
    )

    def __init__(
        self,
        calls: OpenCalls,
        scheduling: Scheduling,
        request: HttpRequest,
        client: str,
        load: Load,
        name: str = "",
    ) -> None:
        self.over = False
        self.aborted = False
        self.name = name
        self._requests: list[str] = []
        self._calls = calls
        self._scheduling = scheduling
        self._request = request
        self._client = client
        self._load = load
        self._streams = 0
        self._silent = False
        self._begun = calls.responses.begin()
        calls.enter(self, client, load)
        request.on_disconnect = self._gone

    def submitted(self, name: str) -> None:
        """One of the responses was submitted as request `name`."""
        self._requests.append(name)
        if self.over:
            self.withdraw()

    def leave(self) -> bool:
        """End the call; False if it had ended before."""
        if self.over:
            return False
        self.over = True
        self._calls.leave(self, self._client, self._load)
        self._calls.pacer.streams -= self._streams
        return True

    def _leave_with(self, status: int) -> bool:
        """End the call with `status`; False if it had ended before."""
        if not self.leave():
            return False
        request = self._request
        self._calls.responses.end(request.method, request.target, status, self._begun)
        return True

    def withdraw(self) -> None:
        """Withdraw its requests: no client waits for the answer any more."""
        for name in self._requests:
            try:
                self._scheduling.withdraw(name)
            except Exception as error:
                log_failure(error)

    def abort(self) -> list[str]:
        """Its responses end with what they have; returns the requests to abort."""
        self.aborted = True
        return self._requests

    def fail(self, status: int, text: str) -> None:
        """End the call with an error, if it has not ended: a stream gets an error event."""
        if not self._leave_with(status):
            return
        body = error_body(status, text)
        try:
            if self._streams:
                self._request.write(as_event(body))
                self._request.end()
            else:
                self._request.answer(status, error_headers(status, self._calls.limits), body)
        finally:
            self.withdraw()

    def _gone(self) -> None:
        if self._leave_with(CLIENT_LEFT):
            self.withdraw()

    def _crashed(self, error: Exception) -> None:
        log_failure(error)
        self.fail(500, f"the gateway failed: {error}")

    def upstream(self, upstream_call: UpstreamCall) -> None:
        self._request.on_pause = upstream_call.pause
        self._request.on_resume = upstream_call.resume

    def paced(self, over: Over, outcome: Outcome) -> None:
        self._calls.pacer.take(over, outcome, self._crashed)

    def answer(self, status: int, headers: bytes | Headers, body: bytes) -> None:
        if self._leave_with(status):
            self._request.answer(status, headers, body)

    def begin(self, headers: Headers) -> Write:
        if not self.over:
            self._streams = 1
            self._calls.pacer.streams += 1
            self._request.begin(200, headers)
        return self._write

    def _write(self, data: bytes) -> None:
        if not self.over:
            self._silent = False
            self._request.write(data)

    def keep_alive(self) -> None:
        """Send a comment if the stream has had no data since the last call of this."""
        if self._streams and self._silent and not self.over:
            self._request.write(KEEP_ALIVE)
        self._silent = True

    def end(self, status: int = 200) -> None:
        if self._leave_with(status):
            self._request.end()


def error_headers(status: int, limits: Limits) -> Headers:
    retry = (b"retry-after", b"%d" % limits.retry_after_s)
    return [JSON, retry] if status in (429, 503) else [JSON]


def log_failure(error: Exception | BaseException) -> None:
    log.error("a call failed in the gateway", exc_info=error)
