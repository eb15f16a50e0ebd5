"""The front: clients' calls on the hot paths become requests of the scheduler.

Knows HTTP only as `Request` (see integrations.http.server) and the scheduler only through the
driver. What a client asks for is checked before anything is queued; what may wait is bounded.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway import envelope as envelopes
from rollout_sched.integrations.gateway.call import JSON, Call, Headers, Reply, Write, error_body
from rollout_sched.integrations.gateway.envelope import ENDPOINTS, Endpoint, Envelope
from rollout_sched.integrations.gateway.fanout import Fanout, split
from rollout_sched.integrations.gateway.fields import BadRequest
from rollout_sched.integrations.gateway.forwarded import Forwarded
from rollout_sched.integrations.gateway.streamed import Streamed
from rollout_sched.integrations.gateway.turns import Turns
from rollout_sched.integrations.gateway.wire import Passing
from rollout_sched.live.driver import Driver
from rollout_sched.live.ports import Outcome, Over

log = logging.getLogger(__name__)

#: Headers between two neighbours, which are not passed on (RFC 9110, 7.6.1), and those that are
#: ours to say to the instance.
NOT_FORWARDED = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"host",
        b"content-length",
        b"expect",
        b"accept-encoding",
        b"authorization",
        b"x-request-id",
    )
)

UNADMITTED = "this gateway needs one of its API keys as a bearer token"


class NobodyHere(Exception):
    """What the call asks for only an instance can say."""


class HttpRequest(Protocol):
    """A request whose body is there (integrations.http.server)."""

    @property
    def method(self) -> bytes: ...
    @property
    def target(self) -> bytes: ...
    @property
    def headers(self) -> list[tuple[bytes, bytes]]: ...
    @property
    def fields(self) -> Mapping[bytes, bytes]: ...
    @property
    def body(self) -> bytes: ...

    gone: bool
    on_disconnect: Callable[[], None] | None
    on_pause: Callable[[], None] | None
    on_resume: Callable[[], None] | None

    def answer(self, status: int, headers: bytes | Headers, body: bytes) -> None: ...
    def begin(self, status: int, headers: Headers) -> None: ...
    def write(self, data: bytes) -> None: ...
    def end(self) -> None: ...


class Limits(msgspec.Struct, frozen=True):
    """What may be here at once: requests, and bytes of their bodies."""

    requests: int = 100_000
    body_bytes: int = 4 * 2**30
    retry_after_s: int = 1


class Front:
    """Answers the three hot paths; `keys` are the clients', none for an open gateway."""

    def __init__(
        self, driver: Driver, *, limits: Limits | None = None, keys: Sequence[str] = ()
    ) -> None:
        self.driver = driver
        self.limits = limits or Limits()
        self.keys = [b"Bearer " + key.encode() for key in keys]
        self.open_requests = 0
        self.open_bytes = 0
        self.refused = 0
        self.turns = Turns()
        self._resumable = driver.scheduler.roles.interruption.keeps_partial

    def wants(self, method: bytes, target: bytes) -> bool:
        return method == b"POST" and target.partition(b"?")[0] in ENDPOINTS

    def refusal(
        self, method: bytes, target: bytes, fields: Mapping[bytes, bytes]
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes] | None:
        if self.admits(fields.get(b"authorization")):
            return None
        return 401, [JSON], error_body(401, UNADMITTED)

    def handle(self, request: HttpRequest) -> None:
        self.turns.take(self._take_in, request)

    def _take_in(self, request: HttpRequest) -> None:
        if request.gone:
            return
        endpoint = ENDPOINTS[request.target.partition(b"?")[0]]
        status, text = 400, ""
        try:
            envelope = envelopes.read(request.body, endpoint)
            bodies = split(request.body, endpoint, envelope)
            if self._full(request, 1 if bodies is None else len(bodies)):
                return
            self._take(request, endpoint, envelope, bodies)
            return
        except (BadRequest, CallerError) as error:
            text = str(error)
        except NobodyHere as error:
            self._refuse_for_now(request, str(error))
            return
        except Exception as error:
            log.exception("a call could not be taken")
            status, text = 500, f"the gateway failed: {error}"
        request.answer(status, [JSON], error_body(status, text))

    def admits(self, authorization: bytes | None) -> bool:
        """Whether a client with this header may call."""
        if not self.keys:
            return True
        given = authorization or b""
        return any(hmac.compare_digest(given, key) for key in self.keys)

    def _full(self, request: HttpRequest, count: int) -> bool:
        limits = self.limits
        if (
            self.open_requests + count <= limits.requests
            and self.open_bytes + len(request.body) <= limits.body_bytes
        ):
            return False
        self._refuse_for_now(request, f"{self.open_requests} requests are here already")
        return True

    def _refuse_for_now(self, request: HttpRequest, text: str) -> None:
        self.refused += 1
        retry = (b"retry-after", b"%d" % self.limits.retry_after_s)
        request.answer(503, [JSON, retry], error_body(503, f"{text}; try again later"))

    def _take(
        self,
        request: HttpRequest,
        endpoint: Endpoint,
        envelope: Envelope,
        bodies: list[bytes] | None,
    ) -> None:
        reply = HttpReply(self, request, 1 if bodies is None else len(bodies))
        submitted = reply.submitted
        try:
            if bodies is None:
                submitted.append(self._submit(request, endpoint, envelope, request.body, reply))
                return
            fanout = Fanout(reply, len(bodies), envelope.samples)
            for index, body in enumerate(bodies):
                child = envelopes.read(body, endpoint)
                to = fanout.child(index)
                submitted.append(self._submit(request, endpoint, child, body, to))
        except BaseException:
            reply.withdraw()
            reply.left()
            raise

    def _submit(
        self,
        request: HttpRequest,
        endpoint: Endpoint,
        envelope: Envelope,
        body: bytes,
        reply: Reply,
    ) -> str:
        header = request.fields.get
        # What was read from lines can be written as lines.
        lines = [b"%b: %b\r\n" % f for f in request.headers if f[0] not in NOT_FORWARDED]
        call = Call(
            endpoint,
            request.target,
            b"".join(lines),
            body,
            envelope,
            request_id=header(b"x-request-id") or b"",
            resumable=self._resumable or envelope.stream,
        )
        tokens = envelopes.prompt_tokens(call.prompt)
        limit = call.limit
        if limit is None:
            tokens, limit = self._as_many_as_fit(tokens)
        group = header(b"x-group-id")
        name = group.decode("latin-1") if group else envelope.group
        session = header(b"x-session-id")
        kind: Any = Streamed if envelope.stream else Forwarded
        return self.driver.submit(
            kind(call, reply, limit),
            tokens,
            limit,
            name or envelopes.group_of(call.prompt),
            session.decode("latin-1") if session else envelope.session,
        )

    def _as_many_as_fit(self, tokens: int) -> tuple[int, int]:
        """(prompt, new) tokens where the client sets no limit and the prompt may be an estimate."""
        most = self.driver.max_model_len()
        if not most:
            raise NobodyHere("no instance has joined, so nobody knows how many tokens fit")
        tokens = min(tokens, max(1, most - 1))
        return tokens, max(1, most - tokens)


class HttpReply:
    """The answer to a client over HTTP; `submitted` names its requests, `count` of them.

    They are given up when the client goes away.
    """

    __slots__ = ("_count", "_front", "_request", "_streams", "submitted")

    def __init__(self, front: Front, request: HttpRequest, count: int) -> None:
        self.submitted: list[str] = []
        self._front = front
        self._request = request
        self._count = count
        self._streams = 0
        front.open_requests += count
        front.open_bytes += len(request.body)
        request.on_disconnect = self._gone

    def left(self) -> None:
        """The call is over."""
        self._front.open_requests -= self._count
        self._front.open_bytes -= len(self._request.body)
        self._front.turns.streams -= self._streams

    def withdraw(self) -> None:
        """Nobody waits for the answer any more."""
        for name in self.submitted:
            self._front.driver.withdraw(name)

    def _gone(self) -> None:
        self.left()
        self.withdraw()

    def upstream(self, passing: Passing) -> None:
        self._request.on_pause = passing.pause
        self._request.on_resume = passing.resume

    def in_turn(self, over: Over, outcome: Outcome) -> None:
        self._front.turns.take(over, outcome)

    def answer(self, status: int, headers: bytes | Headers, body: bytes) -> None:
        self.left()
        self._request.answer(status, headers, body)

    def begin(self, headers: Headers) -> Write:
        self._streams = 1
        self._front.turns.streams += 1
        self._request.begin(200, headers)
        return self._request.write

    def end(self) -> None:
        self.left()
        self._request.end()
