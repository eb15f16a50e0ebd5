"""One call of a client: what it asks for, and where its answer goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.core.model.records import Count
from rollout_sched.integrations.gateway.data_plane import body as envelopes
from rollout_sched.integrations.gateway.data_plane.answers import REASONING
from rollout_sched.integrations.gateway.data_plane.body import SubRequest, Values
from rollout_sched.integrations.gateway.data_plane.client_request import ClientRequest, Headers
from rollout_sched.integrations.gateway.data_plane.fields import BadRequest, boolean, integer, texts
from rollout_sched.integrations.gateway.data_plane.resume import RESUME_PATH, ResponsePart, resume
from rollout_sched.integrations.http import Receiver
from rollout_sched.integrations.vllm.protocol.endpoints import (
    ASK_VERSIONS,
    ENDPOINTS,
    INPUT,
    engine_id,
)
from rollout_sched.live.ports import Attempting, Outcome, Over, RequestRejected
from rollout_sched.live.requests.continuation import StopStrings

# ------------------------------------------------------------------------------------------
# What the gateway needs from an instance's client beyond the driver's port: to pass bytes on.


class UpstreamCall(Attempting, Protocol):
    """A call in flight."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class InstanceCall(UpstreamCall, Protocol):
    """One at an instance. `recognize` checks the id in its answer, and raises AnswerUntrue."""

    def recognize(self, told: str) -> None: ...


class Upstream(Protocol):
    """An instance's client (`integrations.vllm.http_instance`)."""

    @property
    def name(self) -> str: ...
    @property
    def pool(self) -> Any: ...
    @property
    def labelled(self) -> bool: ...
    @property
    def takes_openai(self) -> bool: ...
    @property
    def asks_versions(self) -> bool: ...
    @property
    def models(self) -> tuple[str, ...]: ...
    @property
    def request_headers(self) -> list[tuple[bytes, bytes]]: ...
    async def list_models(self) -> tuple[str, ...]: ...
    def pass_on(
        self,
        order_id: str,
        engine_id: str,
        path: str,
        header_lines: bytes,
        body: bytes,
        receiver: Receiver,
    ) -> InstanceCall: ...


Write = Callable[[bytes], None]

#: A comment of a stream of server-sent events, which readers ignore and proxies count as life.
KEEP_ALIVE = b": keep-alive\n\n"

#: The field that the gateway adds to an instance's answer.
FIELD = "rollout_sched"

_IDS = msgspec.json.Decoder(list[Count])


class Reply(Protocol):
    """Where an answer goes. Exactly one of `answer` and `begin` is called, once.

    `aborted`: the response ends with what it has.
    """

    @property
    def aborted(self) -> bool: ...

    def upstream(self, upstream_call: UpstreamCall) -> None:
        """The source of the stream's bytes, which is paused while the client reads slowly."""

    def paced(self, over: Over, outcome: Outcome) -> None:
        """Report the end of an attempt as soon as this delays no other stream."""

    def answer(self, status: int, headers: bytes | Headers, body: bytes) -> None:
        """The whole answer at once; `headers` as in `integrations.http.request.ReceivedRequest`."""

    def begin(self, headers: Headers) -> Write:
        """Start an answer that is a stream of server-sent events; returns the function to write
        them."""

    def end(self, status: int = 200) -> None:
        """The stream has ended. `status` is for the counts: the client already has status 200."""


#: The field in which a model's servers give reasoning, by the model as clients write it.
Parsing = dict[bytes, str]


class Call:
    """A request for one response, as received.

    `body`: the client's body, which may ask for several responses; `prompt`: the raw prompt of this
    one. `keep_ids`: the client wants the token ids too. `asks_ids`: the instance is always asked
    for them, so that the response can be resumed. `hindrance`: the field with which the response
    cannot be resumed; "" if it can. `says_versions`: an answer has its `weight_versions`.
    """

    __slots__ = (
        "_parsing",
        "asks_ids",
        "body",
        "endpoint",
        "hindrance",
        "keep_ids",
        "one",
        "prompt",
        "request",
        "says_versions",
    )

    def __init__(
        self, request: ClientRequest, one: SubRequest, *, asks_ids: bool, parsing: Parsing
    ) -> None:
        self.request = request
        self.one = one
        self.body = request.body.raw
        self.prompt = one.prompt
        self.endpoint = request.endpoint
        self.keep_ids = request.envelope.keep_ids
        self.asks_ids = asks_ids
        self.says_versions = self.endpoint == "generate"
        self._parsing = parsing
        self.hindrance = request.envelope.hindrance
        if parsing and self.endpoint == "chat":
            self.hindrance = self.hindrance or parsing.get(self._model, "")

    @property
    def _model(self) -> bytes:
        return bytes(self.request.body.fields.get("model", b""))

    def learn(self, parsed: str) -> None:
        """An answer has this field of `PARSED`. Reasoning is parsed from every chat of a model, so
        later ones are never cut for a policy's sake; few call tools."""
        if parsed in REASONING:
            self._parsing[self._model] = parsed

    def pass_on(
        self, client: Upstream, order_id: str, path: bytes, body: bytes, receiver: Receiver
    ) -> InstanceCall:
        """Make an attempt's call, under a unique request id.

        Otherwise a client that chooses another client's id could have its responses aborted.
        """
        if not client.takes_openai:
            raise _cannot_be_sent(ValueError("the instances are SGLang servers: POST /generate"))
        request, name = self.request, order_id.encode()
        if request.request_id:
            name = b"%b-%b" % (request.request_id, name)
        lines = b"%bx-request-id: %b\r\n" % (request.header_lines, name)
        upstream_endpoint = ENDPOINTS[path.partition(b"?")[0]]
        if client.asks_versions and upstream_endpoint != "generate":
            self.says_versions = True
            # A client's own comes after it, and counts.
            body = envelopes.with_fields(body, {ASK_VERSIONS: True})
        engine = engine_id(upstream_endpoint, name.decode("latin-1"))
        return client.pass_on(order_id, engine, path.decode(), lines, body, receiver)

    def first(self, dispatch: Dispatch, max_tokens: int) -> tuple[bytes, bytes]:
        """(path, body) of an attempt that has no tokens to resume from. Raises RequestRejected."""
        fields: dict[str, Any] = {"cache_salt": self._salt(dispatch)}
        # With `echo`, vLLM leaves the prompt's text out of an answer with token ids.
        if self.asks_ids and not self.keep_ids and not self.request.envelope.echo:
            fields["return_token_ids"] = True
        request, one = self.request, self.one
        segment = dispatch.max_new_tokens < max_tokens and not self._refused(max_tokens)
        if not (segment or request.envelope.says_ours or one.values or one.sampling):
            return request.path, envelopes.with_fields(self.body, fields)
        values = dict(one.values)
        for name, value in fields.items():
            values[name] = msgspec.json.encode(value)
        sampling = dict(one.sampling)
        if segment:
            limit = b"%d" % dispatch.max_new_tokens
            sampling[request.envelope.limit_field] = limit
            if dispatch.max_new_tokens < self._least_tokens() <= max_tokens:
                sampling["min_tokens"] = limit
        return request.path, self._changed(values, sampling)

    def _refused(self, max_tokens: int) -> bool:
        """Whether vLLM refuses it, which it would not if a limit of ours were set."""
        if self.endpoint == "generate":
            return "sampling_params" not in self.request.body.fields
        asked = self.request.envelope.limit
        return asked is not None and asked > max_tokens  # than any instance takes

    def resumed(
        self, dispatch: Dispatch, prompt_ids: list[int], parts: list[ResponsePart]
    ) -> tuple[bytes, bytes]:
        """(path, body) of an attempt that resumes a response. Raises RequestRejected."""
        if self.hindrance:
            raise not_resumable(self.hindrance)
        limit = dispatch.max_new_tokens
        # The prompt is replaced by token ids, so it need not be decoded.
        body = self._changed({INPUT[self.endpoint]: b"null"}, self.one.sampling)
        try:
            fields = resume(self.endpoint, body, prompt_ids, parts, limit, self._salt(dispatch))
            return RESUME_PATH[self.endpoint], msgspec.json.encode(fields)
        except Exception as error:  # whatever the error, no instance caused it
            raise _cannot_be_sent(error) from error

    def prompt_ids(self, parts: list[ResponsePart]) -> list[int] | None:
        """The prompt's token ids, from the client or from the instance, which may have truncated
        them. Raises RequestRejected."""
        truncated = "truncate_prompt_tokens" in self.request.body.fields
        if truncated or not envelopes.are_token_ids(self.prompt):
            return parts[0].prompt_ids
        try:
            return _IDS.decode(self.prompt)
        except msgspec.DecodeError as error:
            raise _cannot_be_sent(error) from error

    @property
    def tops(self) -> int:
        """The most likely tokens that a chat wants in its log-probs; negative for all."""
        try:
            return integer(self.request.body.fields, "top_logprobs") or 0
        except BadRequest:
            return 0  # the server refuses it

    @property
    def stops(self) -> StopStrings:
        """Raises RequestRejected."""
        fields = self.request.body.fields
        try:
            strings = texts(fields, "stop")
            included = boolean(fields, "include_stop_str_in_output")
        except BadRequest as error:
            raise _cannot_be_sent(error) from error
        return StopStrings(strings, self._least_tokens(), bool(included))

    def _least_tokens(self) -> int:
        try:
            return integer(self.request.body.sampling, "min_tokens") or 0
        except BadRequest as error:
            raise _cannot_be_sent(error) from error

    def _changed(self, values: Values, sampling: Values) -> bytes:
        try:
            return self.request.body.changed(values, sampling)
        except BadRequest as error:
            raise _cannot_be_sent(error) from error

    def _salt(self, dispatch: Dispatch) -> str:
        """Versions share no KV unless the policy says so; neither do the client's own salts."""
        own = self.request.envelope.salt
        return f"v{dispatch.salt}" if own is None else f"{own}/v{dispatch.salt}"


def not_resumable(field: str) -> RequestRejected:
    """The client of a stream has a part of a response that cannot be resumed with this field."""
    text = (
        f"the response was interrupted and cannot be resumed: an engine applies {field!r} to a "
        f"response as one piece; send the request again, or without `stream` or {field!r}"
    )
    return RequestRejected(text, 502, error_body(502, text))


def _cannot_be_sent(error: Exception) -> RequestRejected:
    text = f"the request cannot be passed on: {error}"
    return RequestRejected(text, 400, error_body(400, text))


def added(sample: DeliveredSample) -> bytes:
    """The value of the added field: which version and instance made which tokens."""
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
    """The versions of an answer's tokens in vLLM's format, for an answer of several attempts."""
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
    """An answer's JSON object with the added field at the end."""
    kept = memoryview(body)[: body.rindex(b"}")]  # copied once
    return b"".join((kept, b',"%b":' % FIELD.encode(), added(sample), b"}"))


def error_body(status: int, text: str) -> bytes:
    """An error in the format that clients of OpenAI and vLLM expect."""
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return msgspec.json.encode({"error": {"message": text, "type": kind, "code": status}})


JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")
