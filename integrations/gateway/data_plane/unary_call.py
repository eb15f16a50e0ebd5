"""A call that is answered as a whole: the payload of a request that does not stream."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import msgspec

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.integrations.gateway.data_plane import answers
from rollout_sched.integrations.gateway.data_plane import resume as dialects
from rollout_sched.integrations.gateway.data_plane.answers import both_spellings
from rollout_sched.integrations.gateway.data_plane.call import (
    FIELD,
    JSON,
    Call,
    InstanceCall,
    Reply,
    Upstream,
    added,
    error_body,
    weight_versions,
    with_added,
)
from rollout_sched.integrations.gateway.data_plane.resume import ResponsePart
from rollout_sched.integrations.http import Headers, WholeAnswer, write_fields
from rollout_sched.integrations.vllm.protocol.endpoints import Endpoint
from rollout_sched.integrations.vllm.protocol.refusals import refusal_of_request
from rollout_sched.live.ports import Attempting, Outcome, Over, RequestRejected
from rollout_sched.live.requests.continuation import spans_until
from rollout_sched.live.requests.token_payload import detached

log = logging.getLogger(__name__)

Answer = dict[str, Any]

#: Most bytes of an answer.
MAX_ANSWER_BYTES = 256 * 2**20

NO_IDS = error_body(502, "the instance gives no token_ids, so the response cannot be resumed")


@lru_cache(256)
def header_lines(instance: str) -> bytes:
    """The headers of an answer whose last tokens this instance made."""
    named = (b"x-rollout-sched-instance", instance.encode())
    return write_fields([JSON, named] if instance else [JSON])


class RawAnswer(msgspec.Struct):
    """An answer as received; it is the whole response."""

    body: bytes


class PartialAnswer(msgspec.Struct):
    """A part of a response, and the answer that has it."""

    part: ResponsePart
    answer: Answer


class UnaryTranscript:
    """The answers of the attempts so far (`live.ports.Transcript`); no tokens arrive before one."""

    def __init__(self) -> None:
        self._pieces: dict[int, RawAnswer | PartialAnswer] = {}

    @property
    def last(self) -> RawAnswer | PartialAnswer | None:
        return next(reversed(self._pieces.values()), None)

    @property
    def first(self) -> Answer | None:
        """The answer with the first part."""
        shares = self._pieces.values()
        return next((share.answer for share in shares if isinstance(share, PartialAnswer)), None)

    def parts(self) -> list[ResponsePart]:
        return [share.part for share in self._pieces.values() if isinstance(share, PartialAnswer)]

    def streamed(self, attempt: int) -> int:
        return 0

    def partial(self, attempt: int, tokens: int) -> None:
        """Nothing to do: no tokens arrive before the answer."""

    def append(self, attempt: int, tokens: int, piece: RawAnswer | PartialAnswer | None) -> None:
        if isinstance(piece, PartialAnswer):
            del piece.part.token_ids[tokens:]
        if isinstance(piece, RawAnswer) or (tokens and piece is not None):
            self._pieces[attempt] = piece

    def detach(self) -> None:
        self._pieces = detached(self._pieces)

    def drop(self, attempt: int) -> None:
        if attempt:
            self._pieces.pop(attempt, None)
        else:
            self._pieces.clear()


class UnaryCall:
    """Passes an answer through, or joins the answers of several attempts."""

    def __init__(self, call: Call, reply: Reply, max_tokens: int) -> None:
        self.call = call
        self.reply = reply
        self.max_tokens = max_tokens
        self.transcript = UnaryTranscript()
        self.responder = UnaryResponder(call, reply, self.transcript)

    @property
    def resumable(self) -> bool:
        return not self.call.hindrance

    def begin(self, client: Upstream, dispatch: Dispatch, order_id: str, over: Over) -> Attempting:
        parts = self.transcript.parts()
        if parts:
            prompt_ids = self.call.prompt_ids(parts)
            assert prompt_ids is not None  # see UnaryReceiver._outcome
            path, body = self.call.resumed(dispatch, prompt_ids, parts)
        else:
            path, body = self.call.first(dispatch, self.max_tokens)
        segment = dispatch.max_new_tokens < self.max_tokens - dispatch.response_tokens
        upstream_endpoint = (
            "completions" if parts and self.call.endpoint == "chat" else self.call.endpoint
        )
        receiver = UnaryReceiver(
            self,
            over,
            upstream_endpoint,
            whole=not parts,
            segment=segment,
            labelled=client.labelled,
            serves=client.models,
        )
        receiver.upstream_call = self.call.pass_on(client, order_id, path, body, receiver)
        return receiver


class UnaryResponder:
    """Answers the client (`live.ports.Responder`), once."""

    def __init__(self, call: Call, reply: Reply, transcript: UnaryTranscript) -> None:
        self._call = call
        self._reply = reply
        self._transcript = transcript
        self._answered = False

    def answer(self, sample: DeliveredSample) -> None:
        try:
            headers = header_lines(sample.segments[-1].instance if sample.segments else "")
            body = self._body(sample)
        except Exception as error:
            log.exception("an answer could not be assembled")
            self.fail("failed", error)
        else:
            self._answered = True
            self._reply.answer(200, headers, body)

    def fail(self, reason: str, error: Exception | None) -> None:
        if reason != "withdrawn" and not self._answered:
            self._answered = True
            status, body = failure(error)
            self._reply.answer(status, [JSON], body)

    def _body(self, sample: DeliveredSample) -> bytes:
        last = self._transcript.last
        if isinstance(last, RawAnswer):
            return self._whole(last.body, sample)
        said = None if last is None else last.answer
        answer = dialects.join(
            self._call.endpoint,
            self._transcript.parts(),
            said,
            sample.finish,
            self._transcript.first,
            self._call.tops,
        )
        self._strip(answer)
        if self._call.says_versions:
            answer["choices"][0]["weight_versions"] = weight_versions(sample)
        answer[FIELD] = msgspec.Raw(added(sample))
        return msgspec.json.encode(answer)

    def _whole(self, body: bytes, sample: DeliveredSample) -> bytes:
        if not self._call.asks_ids or self._call.keep_ids:
            return with_added(body, sample)
        answer = answers.read_object(body)
        self._strip(answer)
        return with_added(msgspec.json.encode(answer), sample)

    def _strip(self, answer: Answer) -> None:
        """Remove the ids that only the gateway had asked for."""
        if not self._call.keep_ids:
            answer.pop("prompt_token_ids", None)
            for choice in answer["choices"]:
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)


def failure(error: Exception | None) -> tuple[int, bytes]:
    """(status, body) for a client whose call has failed; the body is JSON on one line."""
    if isinstance(error, RequestRejected):
        status, text, body = error.status, str(error), error.body
    else:
        status, text, body = (
            502,
            f"no instance could answer: {error or 'each attempt was stopped'}",
            b"",
        )
    try:
        answers.read_object(body)
        return status, msgspec.json.format(body, indent=-1)
    except Exception:  # whatever the body is, it is not for clients
        return status, error_body(status, text.encode(errors="replace").decode())


class UnaryReceiver(WholeAnswer):
    """Receives an attempt's answer; for the driver it is the attempt. Later data is dropped.

    `whole`: it is the first attempt; `segment`: its "length" is not the end; `labelled`: as its
    instance's.
    """

    __slots__ = (
        "_labelled",
        "_over",
        "_owner",
        "_segment",
        "_serves",
        "_upstream_endpoint",
        "_whole",
        "upstream_call",
    )

    def __init__(
        self,
        owner: UnaryCall,
        over: Over,
        upstream_endpoint: Endpoint,
        *,
        whole: bool,
        segment: bool,
        labelled: bool,
        serves: tuple[str, ...],
    ) -> None:
        super().__init__(MAX_ANSWER_BYTES)
        self._owner = owner
        self._over: Over | None = over
        self._upstream_endpoint = upstream_endpoint
        self._whole = whole
        self._segment = segment
        self._labelled = labelled
        self._serves = serves
        self.upstream_call: InstanceCall | None = None

    def cancel(self) -> None:
        self._over = None
        if self.upstream_call is not None:
            self.upstream_call.cancel()

    def arrived(self, status: int, headers: Headers, body: bytes) -> None:
        if self._over is None:
            return
        try:
            if status != 200:
                raise refusal_of_request(status, body, serves=self._serves)
            outcome = self._outcome(body)
        except Exception as error:
            self.on_error(error)
        else:
            self._tell(outcome)

    def on_error(self, error: Exception) -> None:
        self._tell(error)

    def _tell(self, result: Outcome | Exception) -> None:
        over, self._over = self._over, None
        if over is not None:
            over(result)

    def _outcome(self, body: bytes) -> Outcome:
        """The outcome of the answer. Raises InstanceError for an invalid one."""
        call, transcript = self._owner.call, self._owner.transcript
        beams = call.request.envelope.beams
        said = answers.read_answer(
            body, self._upstream_endpoint, labelled=self._labelled, beams=beams
        )
        assert self.upstream_call is not None
        self.upstream_call.recognize(said.id)
        if call.endpoint == "generate":
            body = both_spellings(body)  # here, as the next instance may run another vLLM version
        finish = said.finish
        ends = self._owner.reply.aborted if finish == "abort" else True
        if self._whole and ends and not (self._segment and finish == "length"):
            return Outcome(said.tokens, finish, said.spans, RawAnswer(body))
        parts = transcript.parts()
        if call.hindrance:
            return Outcome(said.tokens, "abort", said.spans, None)
        answer = answers.read_object(body)
        part = dialects.part_of(call.endpoint, answer)
        if part is not None and not parts:
            part.prompt_ids = call.prompt_ids([part])
        if part is None or (not parts and part.prompt_ids is None):
            if finish == "abort":
                # Without token ids it cannot be resumed: it starts from the beginning.
                return Outcome(0, "abort", (), None)
            raise RequestRejected("the instance gives no token_ids to resume from", 502, NO_IDS)
        call.learn(dialects.parsed_in(answer))
        if dialects.shows_no_way_on(call.endpoint, answer, parts, call.prompt):
            return Outcome(said.tokens, "abort", said.spans, None, resumable=False)
        kept = None
        if parts:
            kept = dialects.end_over_the_cut(call.stops, parts, part, answer["choices"][0])
        if kept == 0:
            return Outcome(said.tokens, "abort", said.spans, None, resumable=False)
        if kept is not None:
            spans = spans_until(said.spans, kept)
            return Outcome(kept, "stop", spans, PartialAnswer(part, answer))
        return Outcome(said.tokens, finish, said.spans, PartialAnswer(part, answer))
