"""The data plane: clients' calls on the hot paths become requests of the scheduler.

It knows HTTP only as `Request` (see integrations.http.server) and the scheduler only as
`Scheduling`. A call is checked before anything is queued, and the queue is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.data_plane import body as envelopes
from rollout_sched.integrations.gateway.data_plane.body import SubRequest, split
from rollout_sched.integrations.gateway.data_plane.call import (
    JSON,
    Call,
    Parsing,
    Reply,
    error_body,
)
from rollout_sched.integrations.gateway.data_plane.client_request import (
    ClientRequest,
    HttpRequest,
    check_head,
    names_in,
    read_client_request,
)
from rollout_sched.integrations.gateway.data_plane.fanout import Fanout
from rollout_sched.integrations.gateway.data_plane.fields import BadRequest
from rollout_sched.integrations.gateway.data_plane.reply import (
    HttpReply,
    Limits,
    Load,
    OpenCalls,
    Responses,
    Scheduling,
    Unavailable,
    error_headers,
    log_failure,
)
from rollout_sched.integrations.gateway.data_plane.sglang_call import SglangCall, read_body
from rollout_sched.integrations.gateway.data_plane.streaming_call import StreamingCall
from rollout_sched.integrations.gateway.data_plane.unary_call import UnaryCall
from rollout_sched.integrations.http.server import BearerKeys
from rollout_sched.integrations.sglang.protocol import GENERATE
from rollout_sched.integrations.vllm.protocol.endpoints import ENDPOINTS

UNADMITTED = "this gateway needs one of its API keys as a bearer token"
UNKNOWN_KEY = f"the key that was sent is not known: {UNADMITTED}"

#: The error texts for clients: when the gateway stops, and while it has had no instance for long.
CLOSED = "the gateway is shutting down"
NO_INSTANCE = "no instance has joined"


_GENERATE = GENERATE.encode()
_PATHS = frozenset((*ENDPOINTS, _GENERATE))


class DataPlane:
    """Answers the three hot paths, and SGLang's `/generate`.

    resumable     interrupted responses are resumed, so every attempt is asked for token ids
    keys          those that open it; empty for an open gateway
    trainer_keys  whoever has one of them is the trainer. All others are clients: one for each key,
                  or without keys one for each address
    """

    def __init__(
        self,
        scheduling: Scheduling,
        *,
        resumable: bool,
        limits: Limits | None = None,
        keys: Sequence[str] = (),
        trainer_keys: Sequence[str] = (),
        responses: Responses | None = None,
    ) -> None:
        self.scheduling = scheduling
        self.keys = BearerKeys(keys)
        self._trainer_keys = BearerKeys(trainer_keys)
        self.calls = OpenCalls(limits or Limits(), responses)
        self.refused = 0
        self._closed = ""  # why no call is accepted
        self._resumable = resumable
        self._parsing: Parsing = {}

    def wants(self, method: bytes, target: bytes) -> bool:
        return method == b"POST" and target.partition(b"?")[0] in _PATHS

    def refusal(
        self, method: bytes, target: bytes, fields: Mapping[bytes, bytes]
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes] | None:
        given = fields.get(b"authorization")
        if self.keys.admit(given):
            return None
        return 401, [JSON], error_body(401, UNKNOWN_KEY if given else UNADMITTED)

    def handle(self, request: HttpRequest) -> None:
        self.calls.pacer.take(self._take_in, request, log_failure)

    def refuse(self, why: str) -> None:
        """Answer every open call with 503, or end its stream with an error, and accept no more
        until `accept`. `why` is for the clients."""
        self._closed = why
        for reply in list(self.calls.replies):
            try:
                reply.fail(503, why)
            except Exception as error:
                log_failure(error)

    def accept(self) -> None:
        self._closed = ""

    def abort(self, wanted: Callable[[str], bool]) -> list[str]:
        """Let the open calls that are `wanted`, by the name that their client has given, be
        answered with what they have; returns the requests to abort."""
        return [
            request
            for reply in self.calls.replies
            if wanted(reply.name)
            for request in reply.abort()
        ]

    def _take_in(self, request: HttpRequest) -> None:
        status, text = 400, ""
        try:
            if not request.disconnected:
                self._take(request)
            return
        except BadRequest as error:
            status, text = error.status, str(error)
        except CallerError as error:
            text = str(error)
        except Unavailable as error:
            self.refused += 1
            status, text = error.status, f"{error}; try again later"
        except Exception as error:
            log_failure(error)
            status, text = 500, f"the gateway failed: {error}"
        calls, responses = self.calls, self.calls.responses
        responses.end(request.method, request.target, status, responses.begin())
        request.answer(status, error_headers(status, calls.limits), error_body(status, text))

    def _take(self, request: HttpRequest) -> None:
        """Submit what a call asks for. Raises the error to answer with; then nothing is submitted.

        Responses and bytes are checked against the limits before anything is built from them.
        """
        if self._closed:
            raise Unavailable(self._closed)
        limits = self.calls.limits
        check_head(request)
        path = request.target.partition(b"?")[0]
        if path == _GENERATE:
            self._take_generate(request)
            return
        endpoint = ENDPOINTS[path]
        envelope = envelopes.read(request.body, endpoint)
        body = envelope.body
        ones = split(body, endpoint, envelope, min(limits.samples, limits.requests))
        body_bytes, prompt = len(request.body), len(envelope.prompt)
        if len(ones) > 1:
            body_bytes = sum([body_bytes - prompt + len(one.prompt) for one in ones])
        limit = envelope.limit or 0
        load = Load(len(ones), body_bytes, sum([one.tokens + limit for one in ones]))
        client = self._client(request)
        self.calls.check_room(client, load)
        client_request = read_client_request(request, endpoint, body, envelope)
        name = client_request.request_id.decode()
        reply = HttpReply(self.calls, self.scheduling, request, client, load, name)
        try:
            if len(ones) == 1 and not ones[0].values:
                reply.submitted(self._submit(client_request, client, ones[0], reply))
                return
            fanout = Fanout(reply, len(ones), envelope.samples)
            for index, one in enumerate(ones):
                reply.submitted(self._submit(client_request, client, one, fanout.child(index)))
                if reply.over:
                    break  # one failed at once, and that was the answer
        except BaseException as error:
            if reply.leave():
                reply.withdraw()
                raise
            log_failure(error)  # the client already has its answer

    def _take_generate(self, request: HttpRequest) -> None:
        """As `_take`, for a call in SGLang's words."""
        body, sampling, asked = read_body(request.body)
        tokens, limit = self._within_limits(body.tokens, asked)
        load = Load(1, len(request.body), body.tokens + limit)
        client = self._client(request)
        self.calls.check_room(client, load)
        reply = HttpReply(self.calls, self.scheduling, request, client, load, body.rid or "")
        call = SglangCall(body, sampling, limit, reply)
        try:
            group, session = names_in(request)
            name = self.scheduling.submit(
                call,
                tokens,
                limit,
                group or body.siblings,
                session or body.session_id,
                body.priority,
                client,
            )
            reply.submitted(name)
        except BaseException as error:
            if reply.leave():
                reply.withdraw()
                raise
            log_failure(error)

    def _client(self, request: HttpRequest) -> str:
        """Whose call it is, for fairness; "" for the trainer's."""
        given = request.fields.get(b"authorization")
        if given is not None:
            if self._trainer_keys.number(given):
                return ""
            number = self.keys.number(given)
            if number:
                return f"key {number}"
        return request.peer

    def _submit(self, request: ClientRequest, client: str, one: SubRequest, to: Reply) -> str:
        envelope = request.envelope
        call = Call(
            request, one, asks_ids=self._resumable or envelope.stream, parsing=self._parsing
        )
        tokens, limit = self._within_limits(one.tokens, envelope.limit)
        kind: Any = StreamingCall if envelope.stream else UnaryCall
        group = envelope.group or envelopes.group_of(one.prompt)
        return self.scheduling.submit(
            kind(call, to, limit),
            tokens,
            limit,
            group,
            envelope.session,
            envelope.priority,
            client,
        )

    def _within_limits(self, tokens: int, limit: int | None) -> tuple[int, int]:
        """(prompt, new) tokens for the scheduler. The prompt's may be an estimate, so a call that
        seems to fit nowhere goes to an instance that takes the most, which may refuse it. A call
        without a limit may make as many as fit there."""
        most = self.scheduling.max_model_len()
        if limit is None:
            if not most:
                raise Unavailable(f"{NO_INSTANCE}, so the token limit is not known")
            tokens = min(tokens, max(1, most - 1))
            return tokens, max(1, most - tokens)
        if most > 1 and tokens + limit > most:
            limit = min(limit, most - 1)
            tokens = min(tokens, most - limit)
        return tokens, limit
