"""One call of a client: what it asks, and where its answer goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from rollout_sched.core.actions import Dispatch
from rollout_sched.core.model import DeliveredSample
from rollout_sched.integrations.gateway.data_plane import envelope as envelopes
from rollout_sched.integrations.gateway.data_plane.client_request import ClientRequest
from rollout_sched.integrations.gateway.data_plane.dialects import RESUME_PATH, Part, resume
from rollout_sched.integrations.gateway.data_plane.fields import BadRequest
from rollout_sched.integrations.gateway.data_plane.http_request import Headers
from rollout_sched.integrations.gateway.data_plane.splice import Values
from rollout_sched.integrations.gateway.data_plane.split import One
from rollout_sched.integrations.gateway.data_plane.upstream import Upstream, UpstreamCall
from rollout_sched.integrations.http.exchange import Receiver
from rollout_sched.integrations.vllm.protocol.endpoints import ENDPOINTS
from rollout_sched.integrations.vllm.protocol.request_ids import engine_id
from rollout_sched.integrations.vllm.protocol.requests import INPUT
from rollout_sched.live.ports import Outcome, Over, RequestRejected

Write = Callable[[bytes], None]

#: The field that an answer carries beside what the instance said.
FIELD = "rollout_sched"

_IDS = msgspec.json.Decoder(list[int])


class Reply(Protocol):
    """Where an answer goes. Exactly one of `answer` and `begin` is called, once."""

    def upstream(self, upstream_call: UpstreamCall) -> None:
        """Where the stream's bytes come from, to be slowed down for a slow client."""

    def paced(self, over: Over, outcome: Outcome) -> None:
        """Tell an attempt's end as soon as that holds up no other stream."""

    def answer(self, status: int, headers: bytes | Headers, body: bytes) -> None:
        """The whole answer at once; `headers` as in `integrations.http.request.ReceivedRequest`."""

    def begin(self, headers: Headers) -> Write:
        """The answer comes as a stream of server-sent events; returns where they go."""

    def end(self, status: int = 200) -> None:
        """The stream is over; `status` is what it would have been answered, were that not out."""


class Call:
    """A request for one response, as it came.

    `body`: the client's, of which this is one response; `prompt`: its own, as it stands there.
    `keep_ids`: the client wants the token ids too. `resumable`: ask for them whatever the client
    wants, to be able to go on.
    """

    __slots__ = ("body", "endpoint", "keep_ids", "one", "prompt", "request", "resumable")

    def __init__(self, request: ClientRequest, one: One, *, resumable: bool) -> None:
        self.request = request
        self.one = one
        self.body = request.body.raw
        self.prompt = one.prompt
        self.endpoint = request.endpoint
        self.keep_ids = request.envelope.keep_ids
        self.resumable = resumable

    def pass_on(
        self, client: Upstream, order_id: str, path: bytes, body: bytes, receiver: Receiver
    ) -> UpstreamCall:
        """Make an attempt's call, under a name that no other call has.

        Else whoever chose the same name as another client could have its responses aborted.
        """
        request, name = self.request, order_id.encode()
        if request.request_id:
            name = b"%b-%b" % (request.request_id, name)
        lines = b"%bx-request-id: %b\r\n" % (request.header_lines, name)
        spoken = ENDPOINTS[path.partition(b"?")[0]]
        engine = engine_id(spoken, name.decode("latin-1"))
        return client.pass_on(order_id, engine, path.decode(), lines, body, receiver)

    def first(self, dispatch: Dispatch, max_tokens: int) -> tuple[bytes, bytes]:
        """(path, body) of an attempt that has no tokens to go on from. Raises RequestRejected."""
        fields: dict[str, Any] = {"cache_salt": self._salt(dispatch)}
        if self.resumable and not self.keep_ids:
            fields["return_token_ids"] = True
        segment = dispatch.max_new_tokens < max_tokens
        request, one = self.request, self.one
        if not (segment or request.envelope.says_ours or one.values or one.sampling):
            return request.path, envelopes.with_fields(self.body, fields)
        values = dict(one.values)
        for name, value in fields.items():
            values[name] = msgspec.json.encode(value)
        sampling = dict(one.sampling)
        if segment:
            sampling[request.envelope.limit_field] = b"%d" % dispatch.max_new_tokens
        return request.path, self._changed(values, sampling)

    def resumed(
        self, dispatch: Dispatch, prompt_ids: list[int], parts: list[Part]
    ) -> tuple[bytes, bytes]:
        """(path, body) of an attempt that goes on. Raises RequestRejected."""
        limit = dispatch.max_new_tokens
        # Its prompt is said anew, so it need not be read.
        body = self._changed({INPUT[self.endpoint]: b"null"}, self.one.sampling)
        try:
            fields = resume(self.endpoint, body, prompt_ids, parts, limit, self._salt(dispatch))
            return RESUME_PATH[self.endpoint], msgspec.json.encode(fields)
        except Exception as error:  # whatever it is, no instance has a part in it
            raise _cannot_be_sent(error) from error

    def prompt_ids(self, parts: list[Part]) -> list[int] | None:
        """The prompt as tokens: as it came, or as the instance said. Raises RequestRejected."""
        if not envelopes.are_token_ids(self.prompt):
            return parts[0].prompt_ids
        try:
            return _IDS.decode(self.prompt)
        except msgspec.DecodeError as error:
            raise _cannot_be_sent(error) from error

    def _changed(self, values: Values, sampling: Values) -> bytes:
        try:
            return self.request.body.changed(values, sampling)
        except BadRequest as error:
            raise _cannot_be_sent(error) from error

    def _salt(self, dispatch: Dispatch) -> str:
        """Versions never share KV unless the policy says so; nor do the client's own salts."""
        own = self.request.envelope.salt
        return f"v{dispatch.salt}" if own is None else f"{own}/v{dispatch.salt}"


def _cannot_be_sent(error: Exception) -> RequestRejected:
    text = f"the request cannot be passed on: {error}"
    return RequestRejected(text, 400, error_body(400, text))


def added(sample: DeliveredSample) -> bytes:
    """The added field's value: which version and instance made which of the tokens."""
    start, segments = 0, []
    for segment in sample.segments:
        end = start + segment.tokens
        segments.append(
            f'{{"version":{segment.version},"start":{start},"end":{end},'
            f'"instance":"{segment.instance}"}}'
        )
        start = end
    return f'{{"segments":[{",".join(segments)}]}}'.encode()


def weight_versions(sample: DeliveredSample) -> list[dict[str, Any]]:
    """What vLLM says of the versions of an answer's tokens, for one that took several attempts."""
    spans: list[dict[str, Any]] = []
    start = 0
    for segment in sample.segments:
        version, end = str(segment.version), start + segment.tokens
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = end
        else:
            spans.append({"version": version, "start": start, "end": end})
        start = end
    return spans


def with_added(body: bytes, sample: DeliveredSample) -> bytes:
    """An answer's JSON object with the added field at its end."""
    end = body.rindex(b"}")
    return b'%b,"%b":%b}' % (body[:end], FIELD.encode(), added(sample))


def error_body(status: int, text: str) -> bytes:
    """An error as OpenAI's and vLLM's clients expect it."""
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return msgspec.json.encode({"error": {"message": text, "type": kind, "code": status}})


JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")
