"""The data plane: clients' calls on the hot paths become requests of the scheduler.

Knows HTTP only as `Request` (see integrations.http.server) and the scheduler only through the
driver. What a client asks for is checked before anything is queued; what may wait is bounded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.data_plane import envelope as envelopes
from rollout_sched.integrations.gateway.data_plane.call import (
    JSON,
    Call,
    ClientRequest,
    Headers,
    Reply,
    Write,
    error_body,
)
from rollout_sched.integrations.gateway.data_plane.envelope import Envelope
from rollout_sched.integrations.gateway.data_plane.fanout import Fanout
from rollout_sched.integrations.gateway.data_plane.fields import BadRequest
from rollout_sched.integrations.gateway.data_plane.limits import Limits
from rollout_sched.integrations.gateway.data_plane.pacer import Pacer
from rollout_sched.integrations.gateway.data_plane.splice import Body
from rollout_sched.integrations.gateway.data_plane.split import One, split
from rollout_sched.integrations.gateway.data_plane.streaming_call import StreamingCall
from rollout_sched.integrations.gateway.data_plane.unary_call import UnaryCall
from rollout_sched.integrations.gateway.data_plane.upstream import ProxyCall
from rollout_sched.integrations.http.bearer import BearerKeys
from rollout_sched.integrations.vllm.protocol.endpoints import ENDPOINTS, Endpoint
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


#: What clients are told when the gateway stops.
CLOSED = "the gateway is shutting down"

#: Codings of a body that are none, and charsets that say UTF-8.
_AS_IT_IS = (b"", b"identity")
_UTF8 = (b"utf-8", b"utf8", b"us-ascii", b"ascii")
_CHARSET = re.compile(rb"""(?i);\s*charset\s*=\s*["']?([^"';\s]*)""")

#: As much of a client's own request id as goes on to an instance, in bytes, and what it may hold.
_ID_SHOWN = 64
_NOT_IN_IDS = re.compile(rb"[^0-9A-Za-z._:-]")


class NotNow(Exception):
    """The call cannot be taken at present; the text says why."""


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


class DataPlane:
    """Answers the three hot paths; `keys` are the clients', none for an open gateway."""

    def __init__(
        self, driver: Driver, *, limits: Limits | None = None, keys: Sequence[str] = ()
    ) -> None:
        self.driver = driver
        self.limits = limits or Limits()
        self.keys = BearerKeys(keys)
        self.open_requests = 0
        self.open_bytes = 0
        self.refused = 0
        self.pacer = Pacer()
        self.open: set[HttpReply] = set()
        self._closed = False
        self._resumable = driver.view.keeps_partial

    def wants(self, method: bytes, target: bytes) -> bool:
        return method == b"POST" and target.partition(b"?")[0] in ENDPOINTS

    def refusal(
        self, method: bytes, target: bytes, fields: Mapping[bytes, bytes]
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes] | None:
        if self.keys.admit(fields.get(b"authorization")):
            return None
        return 401, [JSON], error_body(401, UNADMITTED)

    def handle(self, request: HttpRequest) -> None:
        self.pacer.take(self._take_in, request, _log_failure)

    def shut_down(self) -> None:
        """Answer every open call 503, or end its stream with an error, and take no other."""
        self._closed = True
        for reply in list(self.open):
            try:
                reply.fail(503, CLOSED)
            except Exception as error:
                _log_failure(error)

    def _take_in(self, request: HttpRequest) -> None:
        status, text = 400, ""
        try:
            if not request.gone:
                self._take(request)
            return
        except BadRequest as error:
            status, text = error.status, str(error)
        except CallerError as error:
            text = str(error)
        except NotNow as error:
            self.refused += 1
            status, text = 503, f"{error}; try again later"
        except Exception as error:
            _log_failure(error)
            status, text = 500, f"the gateway failed: {error}"
        request.answer(status, self.headers_of(status), error_body(status, text))

    def headers_of(self, status: int) -> Headers:
        """Of an error."""
        retry = (b"retry-after", b"%d" % self.limits.retry_after_s)
        return [JSON, retry] if status == 503 else [JSON]

    def _take(self, request: HttpRequest) -> None:
        """Submit what a call asks for. Raises what it is to be answered with; nothing is held then.

        Responses and bytes are counted before anything is made of them.
        """
        if self._closed:
            raise NotNow(CLOSED)
        limits = self.limits
        endpoint = ENDPOINTS[request.target.partition(b"?")[0]]
        _check_head(request)
        envelope = envelopes.read(request.body, endpoint)
        body = Body(request.body, nested=endpoint == "generate")
        ones = split(body, endpoint, envelope, min(limits.samples, limits.requests))
        held, prompt = len(request.body), len(envelope.prompt)
        if len(ones) > 1:
            held = sum([held - prompt + len(one.prompt) for one in ones])
        self._check_room(len(ones), held)
        client_request = _client_request(request, endpoint, body, envelope)
        reply = HttpReply(self, request, len(ones), held)
        try:
            if len(ones) == 1 and not ones[0].values:
                reply.submitted(self._submit(client_request, ones[0], reply))
                return
            fanout = Fanout(reply, len(ones), envelope.samples)
            for index, one in enumerate(ones):
                reply.submitted(self._submit(client_request, one, fanout.child(index)))
                if reply.over:
                    break  # one failed at once, and that was the answer
        except BaseException as error:
            if reply.leave():
                reply.withdraw()
                raise
            _log_failure(error)  # it has its answer

    def _check_room(self, count: int, held: int) -> None:
        """Raises NotNow if a call of so many responses and bytes cannot be taken at present."""
        limits = self.limits
        if held > limits.body_bytes:
            raise BadRequest(
                f"the bodies of the call's {count} responses come to {held} bytes, and all bodies "
                f"here may have {limits.body_bytes}; ask for fewer responses in one call",
                413,
            )
        if self.open_requests + count > limits.requests:
            raise NotNow(
                f"{self.open_requests} responses are waited for here, of at most "
                f"{limits.requests}, and the call asks for {count}"
            )
        if self.open_bytes + held > limits.body_bytes:
            raise NotNow(
                f"bodies of {self.open_bytes} bytes are here, of at most {limits.body_bytes}, and "
                f"the call has {held}"
            )

    def _submit(self, request: ClientRequest, one: One, to: Reply) -> str:
        envelope = request.envelope
        call = Call(request, one, resumable=self._resumable or envelope.stream)
        tokens, limit = one.tokens, envelope.limit
        if limit is None:
            tokens, limit = self._as_many_as_fit(tokens)
        kind: Any = StreamingCall if envelope.stream else UnaryCall
        group = envelope.group or envelopes.group_of(one.prompt)
        return self.driver.submit(kind(call, to, limit), tokens, limit, group, envelope.session)

    def _as_many_as_fit(self, tokens: int) -> tuple[int, int]:
        """(prompt, new) tokens where the client sets no limit and the prompt may be an estimate."""
        most = self.driver.max_model_len()
        if not most:
            raise NotNow("no instance has joined, so nobody knows how many tokens fit")
        tokens = min(tokens, max(1, most - 1))
        return tokens, max(1, most - tokens)


def _client_request(
    request: HttpRequest, endpoint: Endpoint, body: Body, envelope: Envelope
) -> ClientRequest:
    """What the responses of a call share. The header's names go before the body's."""
    fields = request.fields
    group, session = fields.get(b"x-group-id"), fields.get(b"x-session-id")
    if group:
        envelope.group = _name("X-Group-ID", group)
    if session:
        envelope.session = _name("X-Session-ID", session)
    request_id = fields.get(b"x-request-id") or b""
    if request_id:
        _name("X-Request-Id", request_id)
        request_id = _NOT_IN_IDS.sub(b"_", request_id[:_ID_SHOWN])
    # What was read from lines can be written as lines.
    lines = [b"%b: %b\r\n" % f for f in request.headers if f[0] not in NOT_FORWARDED]
    return ClientRequest(endpoint, request.target, b"".join(lines), request_id, body, envelope)


def _name(header: str, value: bytes) -> str:
    """Raises BadRequest if it is not one to keep."""
    name = value.decode("latin-1")
    envelopes.check_name(header, name)
    return name


def _check_head(request: HttpRequest) -> None:
    """Raises BadRequest for what no instance could be told, or would read otherwise than we do."""
    if not request.target.isascii():
        raise BadRequest("the path holds bytes that are not ASCII; percent-encode them")
    fields = request.fields
    coding = fields.get(b"content-encoding", b"").lower()
    if coding not in _AS_IT_IS:
        told = coding.decode("latin-1")
        raise BadRequest(f"Content-Encoding {told!r} is not read here; send the body as it is", 415)
    kind = fields.get(b"content-type")
    charset = None if kind is None else _CHARSET.search(kind)
    if charset is not None and charset[1].lower() not in _UTF8:
        told = charset[1].decode("latin-1")
        raise BadRequest(f"charset {told!r} is not read here; send JSON as UTF-8", 415)


def _log_failure(error: Exception | BaseException) -> None:
    log.error("a call failed in the gateway", exc_info=error)


class HttpReply:
    """The answer to a client over HTTP, which waits for `count` responses and `held` bytes.

    It is over once: by its answer, its end, a failure on this side or the client's leaving, and
    then its responses are counted no longer, and given up where they are not made yet. What comes
    for it afterwards goes nowhere.
    """

    __slots__ = ("_count", "_data_plane", "_held", "_request", "_requests", "_streams", "over")

    def __init__(self, data_plane: DataPlane, request: HttpRequest, count: int, held: int) -> None:
        self.over = False
        self._requests: list[str] = []
        self._data_plane = data_plane
        self._request = request
        self._count = count
        self._held = held
        self._streams = 0
        data_plane.open.add(self)
        data_plane.open_requests += count
        data_plane.open_bytes += held
        request.on_disconnect = self._gone

    def submitted(self, name: str) -> None:
        """One of the responses is asked for under this name."""
        self._requests.append(name)
        if self.over:
            self.withdraw()

    def leave(self) -> bool:
        """The call is over; False if it was already."""
        if self.over:
            return False
        self.over = True
        data_plane = self._data_plane
        data_plane.open.discard(self)
        data_plane.open_requests -= self._count
        data_plane.open_bytes -= self._held
        data_plane.pacer.streams -= self._streams
        return True

    def withdraw(self) -> None:
        """Nobody waits for the answer any more."""
        for name in self._requests:
            try:
                self._data_plane.driver.withdraw(name)
            except Exception as error:
                _log_failure(error)

    def fail(self, status: int, text: str) -> None:
        """End the call from this side, if it is not over: a stream with an error event."""
        if not self.leave():
            return
        body = error_body(status, text)
        try:
            if self._streams:
                self._request.write(b"data: " + body + b"\n\n")
                self._request.end()
            else:
                self._request.answer(status, self._data_plane.headers_of(status), body)
        finally:
            self.withdraw()

    def _gone(self) -> None:
        if self.leave():
            self.withdraw()

    def _crashed(self, error: Exception) -> None:
        _log_failure(error)
        self.fail(500, f"the gateway failed: {error}")

    def upstream(self, upstream_call: ProxyCall) -> None:
        self._request.on_pause = upstream_call.pause
        self._request.on_resume = upstream_call.resume

    def paced(self, over: Over, outcome: Outcome) -> None:
        self._data_plane.pacer.take(over, outcome, self._crashed)

    def answer(self, status: int, headers: bytes | Headers, body: bytes) -> None:
        if self.leave():
            self._request.answer(status, headers, body)

    def begin(self, headers: Headers) -> Write:
        if not self.over:
            self._streams = 1
            self._data_plane.pacer.streams += 1
            self._request.begin(200, headers)
        return self._write

    def _write(self, data: bytes) -> None:
        if not self.over:
            self._request.write(data)

    def end(self) -> None:
        if self.leave():
            self._request.end()
