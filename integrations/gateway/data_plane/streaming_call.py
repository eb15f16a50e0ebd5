"""A call that is answered as a stream: events pass through as they come.

Only the end is held back: an event that says "abort" never reaches the client, who sees the stream
go on from another attempt instead; and the event that ends the stream waits for the scheduler,
which knows the versions that go with it. What a stream has brought is with the client already, so
of its own it keeps nothing but the token ids, to go on from.

Every stream ends with a finish_reason, the usage if the client asked for it, and [DONE], or with an
error: what no instance has said is made here.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import msgspec

from rollout_sched.core.actions import Dispatch
from rollout_sched.core.events import Spans
from rollout_sched.core.model import Sample
from rollout_sched.integrations.gateway.data_plane import answers, dialects
from rollout_sched.integrations.gateway.data_plane.answers import Event, EventChoice
from rollout_sched.integrations.gateway.data_plane.call import JSON, Call, Reply, Write, with_added
from rollout_sched.integrations.gateway.data_plane.dialects import Part
from rollout_sched.integrations.gateway.data_plane.envelope import are_token_ids, prompt_tokens
from rollout_sched.integrations.gateway.data_plane.unary_call import failure
from rollout_sched.integrations.gateway.data_plane.upstream import ProxyCall, Upstream
from rollout_sched.integrations.vllm.protocol.answers import spans_of
from rollout_sched.integrations.vllm.protocol.endpoints import Endpoint
from rollout_sched.integrations.vllm.protocol.event_stream import DONE, WholeEvents, payload_of
from rollout_sched.integrations.vllm.protocol.refusals import refusal_of_request
from rollout_sched.integrations.vllm.protocol.request_ids import names_another
from rollout_sched.live.ports import (
    AnswerUntrue,
    Attempting,
    InstanceError,
    Outcome,
    Over,
    RequestRejected,
)

log = logging.getLogger(__name__)

EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")

_IDS = re.compile(rb'"token_ids"\s*:\s*\[([\d,\s]*)\]')
_IDS_AS_VLLM = b'"token_ids":['
_ID_BYTES = b"0123456789, "

#: How a stream's events begin, as far as they are all alike: with the id, as OpenAI and vLLM do.
_OPENING = re.compile(rb'data: ?\{\s*"(?:request_)?id"\s*:\s*"[^"\\]*"')

#: What an event says that does not end the stream, as vLLM writes it.
_GOES_ON = b'"finish_reason":null'
_NEWLINE = ord("\n")

#: Events that are counted together. Streams that began together count at different times, for none
#: of them goes on while one counts.
_READ_TOGETHER = 32

#: Bytes of an answer that is an error.
_LONGEST_ERROR = 2**20


class Stream:
    """What one attempt has streamed so far.

    `given`: tokens of the response that it goes on from; `again`: the client has had events of
    earlier attempts; `segment`: its "length" is not the end; `labelled` as of its instance.
    """

    __slots__ = (
        "again",
        "cut",
        "done",
        "events",
        "final",
        "finish",
        "given",
        "ids",
        "labelled",
        "opening",
        "order_id",
        "segment",
        "spans",
        "unread",
        "until",
        "usage",
        "whole",
    )

    def __init__(
        self,
        attempt: int,
        order_id: str,
        *,
        given: int,
        again: bool,
        segment: bool,
        labelled: bool,
    ) -> None:
        self.order_id = order_id
        self.given = given
        self.again = again
        self.segment = segment
        self.labelled = labelled
        self.until = 1 + attempt % _READ_TOGETHER  # packets until the next count
        self.opening = b""  # how events begin that may pass unread; "" if none may
        self.whole = WholeEvents()
        self.cut = False  # an event is not complete yet
        self.ids = bytearray()  # "1,2,3," as they stood in the events
        self.events = 0  # that brought no ids: a token each
        self.unread: list[bytes] = []  # passed on, but not counted yet
        self.finish = ""
        self.spans: Spans = ()
        self.final = b""  # the event that ends it, held back
        self.usage = b""  # the one that tells the usage then
        self.done = False  # nothing that it says counts any more

    @property
    def tokens(self) -> int:
        """By their ids; where there are none each event is taken for a token."""
        return self.ids.count(b",") if self.ids else self.events

    @property
    def token_ids(self) -> list[int]:
        """What there is to go on from."""
        ids: list[int] = msgspec.json.decode(b"[" + self.ids[:-1] + b"]")
        return ids

    def read_up(self) -> None:
        """Count what was passed on: many events together cost little more than one."""
        if self.unread:
            data = b"".join(self.unread)
            self.unread.clear()
            self._count(data)

    def _count(self, data: bytes) -> None:
        found = data.count(b'"token_ids"')
        if not found:
            self.events += data.count(b'"choices"')
            return
        ids = bytearray()
        if data.count(_IDS_AS_VLLM) == found:
            for rest in data.split(_IDS_AS_VLLM)[1:]:
                some, closed, _ = rest.partition(b"]")
                if some and closed:
                    ids += some + b","
        else:
            for some in _IDS.findall(data):
                if some:
                    ids += some + b","
        if ids.translate(None, _ID_BYTES):
            self.events += found  # what are no ids is nothing to go on from
        else:
            self.ids += ids


class StreamTranscript:
    """The streams of the attempts so far (`live.ports.Transcript`): their ids stay where they are.

    `disbelieved`: the client has what nobody may go on from.
    """

    def __init__(self) -> None:
        self.disbelieved = False
        self._streams: dict[int, Stream] = {}

    def add(self, attempt: int, stream: Stream) -> None:
        self._streams[attempt] = stream

    def streams(self) -> list[Stream]:
        return list(self._streams.values())

    def streamed(self, attempt: int) -> int:
        """Only tokens one could go on from count."""
        stream = self._streams.get(attempt)
        if stream is None:
            return 0
        stream.read_up()
        return 0 if stream.events else stream.tokens

    def partial(self, attempt: int, tokens: int) -> None:
        """The ids stay where they are."""

    def keep(self, attempt: int, tokens: int, piece: None) -> None:
        """The client has it already."""

    def drop(self, attempt: int) -> None:
        if attempt:
            stream = self._streams.pop(attempt, None)
            self.disbelieved |= stream is not None and (stream.tokens > 0 or bool(stream.unread))
        else:
            self._streams.clear()


class ClientStream:
    """What the client has been told.

    prompt_ids  as an instance said them
    envelope    what the first event said of the response; None before it
    """

    def __init__(self, endpoint: Endpoint, reply: Reply) -> None:
        self.endpoint = endpoint
        self.reply = reply
        self.prompt_ids = b""
        self.envelope: dict[str, Any] | None = None
        self._write: Write | None = None  # where the events go, once there are any

    @property
    def begun(self) -> bool:
        return self._write is not None

    def send(self, events: bytes) -> None:
        write = self._write
        if write is None:
            write = self._write = self.reply.begin([EVENT_STREAM])
        write(events)

    def learn(self, event: Event, choice: EventChoice | None) -> None:
        """What the first event says of the response, all later ones say, whoever makes them."""
        if self.envelope is None:
            said = dialects.envelope(self.endpoint, "event")
            for name in said:
                value = getattr(event, name)
                if value is not None:
                    said[name] = value
            self.envelope = said
        if not self.prompt_ids:
            self.prompt_ids = event.prompt_ids or (b"" if choice is None else choice.prompt_ids)


class StreamingCall:
    """Passes events through, from as many attempts as it takes.

    Towards the reply it is the one upstream (`wire.ProxyCall`), whichever attempt is under way: one
    that begins while the client does not read begins paused.
    """

    def __init__(self, call: Call, reply: Reply, max_tokens: int) -> None:
        self.call = call
        self.reply = reply
        self.max_tokens = max_tokens
        self.transcript = StreamTranscript()
        self._client = ClientStream(call.endpoint, reply)
        self.responder = StreamResponder(call, self._client, self.transcript)
        self._upstream_call: ProxyCall | None = None
        self.paused = False

    def begin(self, client: Upstream, dispatch: Dispatch, order_id: str, over: Over) -> Attempting:
        for earlier in self.transcript.streams():
            if earlier.final:
                # It had ended when its instance was lost, and nobody had been told yet.
                outcome = Outcome(0, _finish_of(earlier), (), None)
                return asyncio.get_running_loop().call_soon(over, outcome)
        path, body = self._question(dispatch)
        given = dispatch.response_tokens
        stream = Stream(
            dispatch.attempt,
            order_id,
            given=given,
            again=self._client.envelope is not None,
            segment=dispatch.max_new_tokens < self.max_tokens - given,
            labelled=client.labelled,
        )
        self.transcript.add(dispatch.attempt, stream)
        receiver = Receiver(self, stream, over)
        upstream_call = self.call.pass_on(client, order_id, path, body, receiver)
        receiver.upstream_call = upstream_call
        if self._upstream_call is None:
            self.reply.upstream(self)
        self._upstream_call = upstream_call
        if self.paused:
            upstream_call.pause()
        return receiver

    # -- towards the reply: the upstream ---------------------------------------------------

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

    # -- what is sent ----------------------------------------------------------------------

    def _question(self, dispatch: Dispatch) -> tuple[bytes, bytes]:
        """(path, body): anew, or going on from what the client has already."""
        if self.transcript.disbelieved:
            raise RequestRejected("the stream broke off, and what it brought cannot be true", 502)
        streams = self.transcript.streams()
        for stream in streams:
            stream.read_up()
        part = Part([token for stream in streams for token in stream.token_ids])
        if self._client.prompt_ids:
            part.prompt_ids = msgspec.json.decode(self._client.prompt_ids)
        lost = any(stream.events for stream in streams)
        if not part.token_ids and not lost:
            return self.call.first(dispatch, self.max_tokens)
        prompt_ids = self.call.prompt_ids([part])
        if lost or prompt_ids is None:
            raise RequestRejected("the stream broke off, and gave no token_ids to go on from", 502)
        return self.call.resumed(dispatch, prompt_ids, [part])

    # -- what comes from an instance -------------------------------------------------------

    def receive(self, stream: Stream, data: bytes) -> bool:
        """Bytes of a stream of events, cut anywhere; true after its last.

        Raises InstanceError for what cannot be believed; the rest of these bytes is lost then.
        """
        if stream.opening and not stream.cut and _go_on(data, stream.opening):
            self._pass_unread(stream, data)
            return False
        data = stream.whole.feed(data)
        stream.cut = bool(stream.whole.rest)
        if stream.opening and _go_on(data, stream.opening):
            self._pass_unread(stream, data)
        elif data:
            stream.read_up()
            for event in data[:-2].split(b"\n\n"):
                self._one(stream, event)
        return stream.done

    def outcome(self, stream: Stream) -> Outcome:
        """Raises InstanceError if it has not ended."""
        if not stream.finish:
            raise InstanceError("the stream ended without a finish_reason")
        stream.read_up()
        return Outcome(stream.tokens, _finish_of(stream), stream.spans, None)

    def _pass_unread(self, stream: Stream, data: bytes) -> None:
        """Pass on events none of which ends the stream; they are counted later, many together."""
        self._client.send(data)
        stream.unread.append(data)
        if len(stream.unread) >= stream.until:
            stream.until = _READ_TOGETHER
            stream.read_up()

    def _one(self, stream: Stream, event: bytes) -> None:
        payload = payload_of(event)
        if stream.done or not payload:
            return
        if payload == DONE:
            stream.done = True
            stream.finish = stream.finish or "stop"  # not every server says why it ends
        elif stream.finish:
            self._one_after_the_end(stream, payload)
        else:
            self._one_before_the_end(stream, payload)

    def _one_before_the_end(self, stream: Stream, payload: bytes) -> None:
        event = self._believed(stream, payload)
        choice = event.choices[0] if event.choices else None
        ids = b"" if choice is None else choice.ids
        self._client.learn(event, choice)
        if stream.again:
            payload = self._translated(stream, payload)
        if choice is not None and choice.finish_reason is not None:
            self._end(stream, payload, choice, ids)
            return
        self._client.send(b"data: %b\n\n" % payload)
        if choice is not None:
            self._count_choice(stream, choice, ids)
        if ids and not stream.again:
            opening = _OPENING.match(b"data: " + payload)
            stream.opening = opening[0] if opening is not None else b""

    def _end(self, stream: Stream, payload: bytes, choice: EventChoice, ids: bytes) -> None:
        finish = choice.finish_reason or "stop"
        goes_on = finish == "abort" or (finish == "length" and stream.segment)
        if goes_on and (choice.speaks or ids):
            # It brings tokens that the instance had held back.
            fields = answers.read_object(payload)
            fields["choices"][0]["finish_reason"] = None
            self._client.send(b"data: %b\n\n" % msgspec.json.encode(fields))
        self._count_choice(stream, choice, ids)
        if choice.weight_versions:
            try:
                stream.spans = spans_of(
                    choice.weight_versions, stream.tokens, labelled=stream.labelled
                )
            except AnswerUntrue as error:
                # The client has the tokens, so nothing can be made good.
                text = f"the stream cannot be true: {error}"
                raise RequestRejected(text, 502, because=error) from None
        stream.opening = b""
        stream.finish = finish
        if not goes_on:
            stream.final = payload

    def _one_after_the_end(self, stream: Stream, payload: bytes) -> None:
        """Only the usage may follow; what is not understood is not passed on either."""
        try:
            event = self._believed(stream, payload)
        except InstanceError:
            return
        if event.choices:
            # The client has what came before, so nothing can be made good.
            raise RequestRejected("the stream said more after its end", 502)
        if event.usage is not None:
            stream.usage = self._translated(stream, payload) if stream.again else payload

    def _believed(self, stream: Stream, payload: bytes) -> Event:
        event = answers.read_event(payload)
        said = event.id or event.request_id or ""
        if names_another(said, stream.order_id):
            raise InstanceError(f"an event for {stream.order_id} is of {said[:80]!r}, another's")
        return event

    def _count_choice(self, stream: Stream, choice: EventChoice, ids: bytes) -> None:
        if ids:
            stream.ids += ids + b","
        elif choice.speaks:
            stream.events += 1

    def _translated(self, stream: Stream, payload: bytes) -> bytes:
        """An event of a later attempt as the client's own endpoint would have said it."""
        fields = answers.read_object(payload)
        try:
            self._translate(stream, fields)
            return msgspec.json.encode(fields)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise InstanceError(f"an event is not understood: {error!r}") from None

    def _translate(self, stream: Stream, fields: dict[str, Any]) -> None:
        chat = self.call.endpoint == "chat"
        from_chat = fields.get("object") == "chat.completion.chunk"
        fields.pop("prompt_token_ids", None)  # with what it goes on from
        fields |= self._client.envelope or {}
        for choice in fields.get("choices") or ():
            choice.pop("prompt_token_ids", None)
            if chat and from_chat:
                (choice.get("delta") or {}).pop("role", None)  # said already
            elif chat:
                choice["delta"] = {"content": choice.pop("text", "")}
                choice["logprobs"] = dialects.chat_logprobs([choice.get("logprobs")])
        usage = fields.get("usage")
        if usage:
            made = usage.get("completion_tokens", 0) + stream.given
            usage |= dialects.usage(usage.get("prompt_tokens", 0) - stream.given, made)


class StreamResponder:
    """Ends the client's stream (`live.ports.Responder`), once."""

    def __init__(self, call: Call, client: ClientStream, transcript: StreamTranscript) -> None:
        self._call = call
        self._client = client
        self._transcript = transcript
        self._ended = False

    def answer(self, sample: Sample) -> None:
        try:
            events = self._ending(sample)
            self._client.send(b"".join([b"data: %b\n\n" % event for event in events]))
        except Exception as error:
            log.exception("a stream could not be ended")
            self.fail("failed", error)
        else:
            self._ended = True
            self._client.reply.end()

    def _ending(self, sample: Sample) -> list[bytes]:
        """The last events; what no instance has said is made here."""
        said = self._client.envelope or dialects.envelope(self._call.endpoint, "event")
        final = usage = b""
        complete = False
        for stream in self._transcript.streams():
            if stream.final:
                final, usage, complete = stream.final, stream.usage, stream.done
        if not final:
            final = msgspec.json.encode(
                dialects.last_event(self._call.endpoint, said, sample.finish)
            )
        if not (usage or complete) and self._wants_usage():
            made = sum([segment.tokens for segment in sample.segments])
            told = {**said, "choices": [], "usage": dialects.usage(self._prompt_tokens(), made)}
            usage = msgspec.json.encode(told)
        events = [with_added(final, sample)]
        if usage:
            events.append(usage)
        return [*events, DONE]

    def _wants_usage(self) -> bool:
        if b"include_usage" not in self._call.body:
            return False
        options = answers.read_object(self._call.body).get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    def _prompt_tokens(self) -> int:
        """0 of a text whose tokens no instance has told."""
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
        # The status is out; an error event and no [DONE] is how vLLM ends such a stream.
        try:
            self._client.send(b"data: %b\n\n" % body)
        finally:
            self._client.reply.end()


class Receiver:
    """Hands an exchange's bytes to its stream, to the end; it is the attempt that the driver holds.

    What comes after the end is nobody's.
    """

    __slots__ = ("_error", "_over", "_owner", "_status", "_stream", "upstream_call")

    def __init__(self, owner: StreamingCall, stream: Stream, over: Over) -> None:
        self._owner = owner
        self._stream = stream
        self._over: Over | None = over
        self._status = 0
        self._error = b""
        self.upstream_call: ProxyCall | None = None

    @property
    def held_back(self) -> bool:
        """Whether its answer is not read for now, because nobody takes it."""
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
            done = self._owner.receive(self._stream, data)
        except Exception as error:
            self._break_off(error)
        else:
            if done:
                self._complete()

    def on_end(self) -> None:
        if self._status == 200:
            self._complete()
        elif self._over is not None:
            self._fail(refusal_of_request(self._status, bytes(self._error), names_model=True))

    def on_error(self, error: Exception) -> None:
        if self._status == 200 and self._stream.finish:
            self._complete()  # only what we can say ourselves is missing
        else:
            self._fail(error)

    def _receive_error(self, data: bytes) -> None:
        if self._over is None:
            return
        self._error += data
        if len(self._error) > _LONGEST_ERROR:
            self._fail(
                InstanceError(f"status {self._status}, and more than {_LONGEST_ERROR} bytes")
            )

    def _break_off(self, error: Exception) -> None:
        """What the stream brought last cannot be used."""
        if isinstance(error, InstanceError):
            if self._stream.finish:
                self._complete()
                self.cancel()
                return
            error = InstanceError(f"the stream broke off: {error}")
        self._fail(error)

    def _complete(self) -> None:
        over = self._let_go()
        if over is None:
            return
        try:
            outcome = self._owner.outcome(self._stream)
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


def _finish_of(stream: Stream) -> Any:
    """In the scheduler's words."""
    return stream.finish if stream.finish in ("abort", "length") else "stop"


def _go_on(data: bytes, opening: bytes) -> bool:
    """Whether these are whole events of this stream none of which ends it, as vLLM writes them."""
    if not data.endswith(b"\n\n"):
        return False
    if data.find(_NEWLINE) == len(data) - 2:  # a single one, as most packets bring
        return _goes_on(data, opening)
    events = data[:-2].split(b"\n\n")
    for event in events:
        if not _goes_on(event, opening):
            return False
    return data.count(b"\n") == 2 * len(events)


def _goes_on(event: bytes, opening: bytes) -> bool:
    return (
        event.rfind(_GOES_ON) > 0
        and event.startswith(opening)
        # What brings no ids, or no choice, is counted only when it is read.
        and event.find(b'"choices"') > 0
        and event.find(b'"token_ids"') > 0
    )
