"""A call that is answered as a stream: events pass through as they arrive.

Only the end is held back. An event with "abort" never reaches the client; the stream continues from
another attempt instead. The event that ends the stream waits for the scheduler, which adds the
versions. The client already has the earlier events, so only their token ids are kept, to resume
from.

Every stream ends with a finish_reason, the usage if the client asked for it, and [DONE], or with an
error. The gateway makes the closing events that no instance has sent.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.integrations.gateway.data_plane import answers
from rollout_sched.integrations.gateway.data_plane import resume as dialects
from rollout_sched.integrations.gateway.data_plane.body import are_token_ids, prompt_tokens
from rollout_sched.integrations.gateway.data_plane.call import (
    JSON,
    Call,
    Reply,
    Upstream,
    UpstreamCall,
    not_resumable,
    weight_versions,
    with_added,
)
from rollout_sched.integrations.gateway.data_plane.resume import Repetition, ResponsePart
from rollout_sched.integrations.gateway.data_plane.stream import ClientStream, Stream
from rollout_sched.integrations.gateway.data_plane.unary_call import failure
from rollout_sched.integrations.vllm.protocol.answers import DONE, as_event
from rollout_sched.integrations.vllm.protocol.refusals import refusal_of_request
from rollout_sched.live.ports import (
    AnswerUntrue,
    Attempting,
    EnginePaused,
    InstanceError,
    Outcome,
    Over,
    RequestRejected,
)
from rollout_sched.live.requests.token_payload import detached

log = logging.getLogger(__name__)

#: Most bytes of an error answer that are read.
_LONGEST_ERROR = 2**20


class StreamTranscript:
    """The streams of the attempts so far (`live.ports.Transcript`), which hold the token ids.

    `disbelieved`: the client has received tokens that the gateway has dropped, so it cannot be
    resumed.
    """

    def __init__(self) -> None:
        self.disbelieved = False
        self._streams: dict[int, Stream] = {}

    def add(self, attempt: int, stream: Stream) -> None:
        self._streams[attempt] = stream

    def streams(self) -> list[Stream]:
        return list(self._streams.values())

    def streamed(self, attempt: int) -> int:
        """Only tokens that can be resumed from count."""
        stream = self._streams.get(attempt)
        if stream is None:
            return 0
        stream.tokens.read_up()
        return 0 if stream.tokens.events else stream.tokens.count

    def partial(self, attempt: int, tokens: int) -> None:
        """Nothing to do: the stream holds the ids."""

    def append(self, attempt: int, tokens: int, piece: None) -> None:
        """Nothing to do: the client already has the tokens."""

    def detach(self) -> None:
        self._streams = detached(self._streams)

    def drop(self, attempt: int) -> None:
        if attempt:
            stream = self._streams.pop(attempt, None)
            self.disbelieved |= stream is not None and stream.passed
        else:
            self._streams.clear()


class StreamingCall:
    """Passes events through, from as many attempts as needed.

    For the reply it is the single `call.UpstreamCall`, whichever attempt is in flight. An
    attempt that begins while the client does not read begins paused.
    """

    def __init__(self, call: Call, reply: Reply, max_tokens: int) -> None:
        self.call = call
        self.reply = reply
        self.max_tokens = max_tokens
        self.transcript = StreamTranscript()
        self._client = ClientStream(call.endpoint, reply, call.tops)
        self.responder = StreamResponder(call, self._client, self.transcript)
        self._upstream_call: UpstreamCall | None = None
        self.paused = False

    @property
    def resumable(self) -> bool:
        return not self.call.hindrance

    def begin(self, client: Upstream, dispatch: Dispatch, order_id: str, over: Over) -> Attempting:
        for earlier in self.transcript.streams():
            if earlier.end.event:
                # The stream had ended when its instance was lost, but this was not reported yet.
                finish = earlier.end.finish
                assert finish is not None  # set together with the event
                outcome = Outcome(0, finish, (), None)
                return asyncio.get_running_loop().call_soon(over, outcome)
        if not self._client.begun:
            self._client.start_over()
        path, body = self._question(dispatch)
        given = dispatch.response_tokens
        last = self._client.last_choices() if given else []
        stream = Stream(
            self._client,
            dispatch.attempt,
            resumes=None if self._client.envelope is None else given,
            text_offset=dialects.text_after(last),
            repetition=Repetition(self.call.prompt, dialects.text_of(last)) if last else None,
            segment=dispatch.max_new_tokens < self.max_tokens - given,
            resumable=self.resumable,
            labelled=client.labelled,
        )
        self.transcript.add(dispatch.attempt, stream)
        receiver = StreamReceiver(self, stream, over, client.models)
        upstream_call = self.call.pass_on(client, order_id, path, body, receiver)
        receiver.upstream_call = upstream_call
        stream.recognize = upstream_call.recognize
        if self._upstream_call is None:
            self.reply.upstream(self)
        self._upstream_call = upstream_call
        if self.paused:
            upstream_call.pause()
        return receiver

    # -- the upstream of the reply ---------------------------------------------------------

    def pause(self) -> None:
        self.paused = True
        if self._upstream_call is not None:
            self._upstream_call.pause()

    def resume(self) -> None:
        self.paused = False
        if self._upstream_call is not None:
            self._upstream_call.resume()

    def cancel(self) -> None:
        if self._upstream_call is not None:
            self._upstream_call.cancel()

    def learn(self) -> None:
        self.call.learn(self._client.parsed)

    # -- what is sent ----------------------------------------------------------------------

    def _question(self, dispatch: Dispatch) -> tuple[bytes, bytes]:
        """(path, body): from the beginning, or resuming from the tokens that the client has."""
        if self._client.parsed:
            raise not_resumable(self._client.parsed)
        if self.transcript.disbelieved:
            if self.call.hindrance:
                raise not_resumable(self.call.hindrance)
            raise RequestRejected("the stream broke off, and its tokens are not valid", 502)
        streams = self.transcript.streams()
        for stream in streams:
            stream.tokens.read_up()
        lost = any(stream.tokens.events for stream in streams)
        part = ResponsePart(
            [token for stream in streams for token in stream.tokens.to_go_on_from()]
        )
        if self._client.prompt_ids:
            part.prompt_ids = msgspec.json.decode(self._client.prompt_ids)
        if not part.token_ids and not lost:
            return self.call.first(dispatch, self.max_tokens)
        if self.call.hindrance:
            raise not_resumable(self.call.hindrance)
        prompt_ids = self.call.prompt_ids([part])
        if lost or prompt_ids is None:
            raise RequestRejected("the stream broke off, and gave no token_ids to resume from", 502)
        return self.call.resumed(dispatch, prompt_ids, [part])


class StreamResponder:
    """Ends the client's stream (`live.ports.Responder`), once."""

    def __init__(self, call: Call, client: ClientStream, transcript: StreamTranscript) -> None:
        self._call = call
        self._client = client
        self._transcript = transcript
        self._ended = False

    def answer(self, sample: DeliveredSample) -> None:
        try:
            events = self._ending(sample)
            self._client.send(b"".join([as_event(data) for data in events]))
        except Exception as error:
            log.exception("a stream could not be ended")
            self.fail("failed", error)
        else:
            self._ended = True
            self._client.reply.end()

    def _ending(self, sample: DeliveredSample) -> list[bytes]:
        """The last events; the gateway makes those that no instance has sent."""
        said = self._client.envelope or dialects.envelope(self._call.endpoint, "event")
        final = usage = first = b""
        complete = False
        for stream in self._transcript.streams():
            end = stream.end
            first = first or end.usage
            if end.event:
                final, usage, complete = end.event, end.usage, end.done
        if not final:
            final = msgspec.json.encode(
                dialects.last_event(self._call.endpoint, said, sample.finish)
            )
        elif len(self._transcript.streams()) > 1 and self._call.says_versions:
            final = _of_all_attempts(final, sample)
        if not (usage or complete) and self._wants_usage():
            made = sum([segment.tokens for segment in sample.segments])
            told = {**said, "choices": [], "usage": dialects.usage(self._prompt_tokens(), made)}
            usage = msgspec.json.encode(told)
        events = [with_added(final, sample)]
        if usage:
            cut = first and first is not usage
            events.append(dialects.with_first_usage(usage, first) if cut else usage)
        return [*events, DONE]

    def _wants_usage(self) -> bool:
        if b"include_usage" not in self._call.body:
            return False
        options = answers.read_object(self._call.body).get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    def _prompt_tokens(self) -> int:
        """0 for a text whose token ids no instance has sent."""
        ids = self._call.prompt if are_token_ids(self._call.prompt) else self._client.prompt_ids
        return prompt_tokens(ids) if ids else 0

    def fail(self, reason: str, error: Exception | None) -> None:
        if reason == "withdrawn" or self._ended:
            return
        self._ended = True
        status, body = failure(error)
        if not self._client.begun:
            self._client.reply.answer(status, [JSON], body)
            return
        # The status is already sent; vLLM ends such a stream with an error event and no [DONE].
        try:
            self._client.send(as_event(body))
        finally:
            self._client.reply.end(status)


def _of_all_attempts(final: bytes, sample: DeliveredSample) -> bytes:
    """The event that ends a stream, with the versions of all tokens: the last attempt knows only
    those of its own."""
    fields = answers.read_object(final)
    fields["choices"][0]["weight_versions"] = weight_versions(sample)
    return msgspec.json.encode(fields)


class StreamReceiver:
    """Passes an exchange's bytes to its stream until the end; for the driver it is the attempt.

    Data after the end is dropped.
    """

    __slots__ = ("_error", "_over", "_owner", "_serves", "_status", "_stream", "upstream_call")

    def __init__(
        self, owner: StreamingCall, stream: Stream, over: Over, serves: tuple[str, ...]
    ) -> None:
        self._owner = owner
        self._serves = serves
        self._stream = stream
        self._over: Over | None = over
        self._status = 0
        self._error = b""
        self.upstream_call: UpstreamCall | None = None

    @property
    def held_back(self) -> bool:
        """Whether reading its answer is paused because the client does not read."""
        return self._owner.paused

    def cancel(self) -> None:
        self._let_go()
        if self.upstream_call is not None:
            self.upstream_call.cancel()

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if self._over is not None:
            self._status = status

    def on_data(self, data: bytes) -> None:
        if self._status != 200:
            self._receive_error(data)
            return
        try:
            done = self._stream.receive(data)
        except Exception as error:
            self._break_off(error)
        else:
            if done:
                self._complete()

    def on_end(self) -> None:
        if self._status == 200:
            self._complete()
        elif self._over is not None:
            self._fail(refusal_of_request(self._status, self._error, serves=self._serves))

    def on_error(self, error: Exception) -> None:
        if self._status == 200 and self._stream.end.finish is not None:
            self._complete()  # only events that the gateway can make itself are missing
        else:
            self._fail(error)

    def _receive_error(self, data: bytes) -> None:
        if self._over is None:
            return
        self._error += data
        if len(self._error) > _LONGEST_ERROR:
            self._fail(
                InstanceError(f"status {self._status} with more than {_LONGEST_ERROR} bytes")
            )

    def _break_off(self, error: Exception) -> None:
        """The last data of the stream is not valid."""
        ended = self._stream.end.finish is not None
        if isinstance(error, InstanceError) and not (ended and isinstance(error, AnswerUntrue)):
            if ended:
                self._complete()
                self.cancel()
                return
            if not isinstance(error, EnginePaused):
                error = error.within("the stream broke off: ")
        self._fail(error)

    def _complete(self) -> None:
        over = self._let_go()
        self._owner.learn()
        if over is None:
            return
        try:
            outcome = self._stream.outcome()
        except Exception as error:
            over(error)
        else:
            self._owner.reply.paced(over, outcome)

    def _fail(self, error: Exception) -> None:
        over = self._let_go()
        if over is not None:
            over(error)

    def _let_go(self) -> Over | None:
        over, self._over = self._over, None
        self._status = 0
        return over
