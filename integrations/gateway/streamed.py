"""A call that is answered as a stream: events pass through as they come.

Only the end is held back: an event that says "abort" never reaches the client, who sees the stream
go on from another attempt instead; and the event that ends the stream waits for the scheduler,
which knows the versions that go with it. What a stream has brought is with the client already, so
of its own it keeps nothing but the token ids, to go on from.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from rollout_sched.core.actions import Dispatch
from rollout_sched.core.events import Spans
from rollout_sched.core.model import Sample
from rollout_sched.integrations.gateway import dialects
from rollout_sched.integrations.gateway.call import JSON, Call, Reply, Write, error_body, with_added
from rollout_sched.integrations.gateway.dialects import Part
from rollout_sched.integrations.gateway.wire import Forwarding, refuse
from rollout_sched.live.ports import Attempting, InstanceError, Outcome, Over, RequestRejected

EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
DONE = b"data: [DONE]"
ERROR = b'data: {"error"'

_IDS = re.compile(rb'"token_ids"\s*:\s*\[([^\]]*)\]')
_IDS_AS_VLLM = b'"token_ids":['
_PROMPT_IDS = re.compile(rb'"prompt_token_ids"\s*:\s*(\[[^\]]*\])')
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"([^"]*)"')
_ID = re.compile(rb'"id"\s*:\s*"([^"]*)"')

#: What an event says that does not end the stream, as vLLM writes it.
_GOES_ON = b'"finish_reason":null'
_NEWLINE = ord("\n")

#: Events that are counted together. Streams that began together count at different times, for none
#: of them goes on while one counts.
_READ_TOGETHER = 32

#: Longest event that may come in pieces.
_MAX_EVENT = 64 * 2**20


class Stream:
    """What one attempt has streamed so far."""

    __slots__ = ("events", "finish", "held", "ids", "rest", "tail", "unread", "until")

    def __init__(self, attempt: int) -> None:
        self.until = 1 + attempt % _READ_TOGETHER  # packets until the next count
        self.ids = bytearray()  # "1,2,3," as they stood in the events
        self.events = 0  # that brought no ids: a token each
        self.unread: list[bytes] = []  # passed on, but not counted yet
        self.rest = b""  # an event that is not complete yet
        self.held: list[bytes] = []  # from the event that ends the stream on
        self.finish = ""
        self.tail: dict[str, Any] = {}  # the event that ended it

    @property
    def tokens(self) -> int:
        return self.ids.count(b",") + self.events

    @property
    def token_ids(self) -> list[int]:
        """What there is to go on from."""
        ids: list[int] = msgspec.json.decode(b"[" + self.ids[:-1] + b"]")
        return ids


class Streamed:
    """Passes events through, from as many attempts as it takes."""

    def __init__(self, call: Call, reply: Reply, max_tokens: int) -> None:
        self.call = call
        self.reply = reply
        self.max_tokens = max_tokens
        self._streams: dict[int, Stream] = {}
        self._prompt_ids: list[int] | None = None
        self._write: Write | None = None  # where the events go, once there are any
        self._id = b""

    def begin(
        self, client: Forwarding, dispatch: Dispatch, order_id: str, over: Over
    ) -> Attempting:
        path, body = self._question(dispatch)
        stream = self._streams[dispatch.attempt] = Stream(dispatch.attempt)
        receiver = Receiver(self, stream, over, resumed=dispatch.response_tokens > 0)
        passing = self.call.pass_on(client, order_id, path, body, receiver)
        self.reply.upstream(passing)
        return passing

    def _question(self, dispatch: Dispatch) -> tuple[bytes, bytes]:
        """(path, body): anew, or going on from what the client has already."""
        streams = self._streams.values()
        for stream in streams:
            self._read_up(stream)
        part = Part([token for stream in streams for token in stream.token_ids])
        part.prompt_ids = self._prompt_ids
        if not part.token_ids and not any(stream.events for stream in streams):
            return self.call.first(dispatch, self.max_tokens)
        prompt_ids = self.call.prompt_ids([part])
        if not part.token_ids or prompt_ids is None:
            raise RequestRejected("the stream broke off, and gave no token_ids to go on from", 502)
        return self.call.resumed(dispatch, prompt_ids, [part])

    def outcome(self, stream: Stream) -> Outcome:
        if not stream.finish:
            raise InstanceError("the stream ended without a finish_reason")
        self._read_up(stream)
        spans: Spans = dialects.spans_of(stream.tail) if stream.tail.get("choices") else ()
        finish: Any = stream.finish if stream.finish in ("abort", "length") else "stop"
        return Outcome(stream.tokens, finish, spans, None)

    # -- what comes from an instance -------------------------------------------------------

    def receive(self, stream: Stream, data: bytes, *, resumed: bool) -> None:
        """Bytes of a stream of events, cut anywhere."""
        if stream.rest:
            data = stream.rest + data
            stream.rest = b""
        plain = not (stream.finish or resumed)
        if plain and _go_on(data):
            self._pass_unread(stream, data)
            return
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            end = 0
        data, stream.rest = data[:end], data[end:]
        if len(stream.rest) > _MAX_EVENT:
            raise InstanceError(f"an event is longer than {_MAX_EVENT} bytes")
        if plain and _go_on(data):
            self._pass_unread(stream, data)
        elif data:
            self._read_up(stream)
            for event in data[:-2].split(b"\n\n"):
                self._one(stream, event, resumed=resumed)

    def _pass_unread(self, stream: Stream, data: bytes) -> None:
        """Pass on events none of which ends the stream; they are counted later, many together."""
        self._pass(data)
        stream.unread.append(data)
        if len(stream.unread) >= stream.until:
            stream.until = _READ_TOGETHER
            self._read_up(stream)

    def _one(self, stream: Stream, event: bytes, *, resumed: bool) -> None:
        if event.startswith(ERROR):
            raise InstanceError(event[6:206].decode(errors="replace"))
        if stream.finish and _FINISH.search(event) is not None:
            # The client has what came before, so nothing can be made good.
            raise RequestRejected("the stream said more after its end", 502)
        if stream.finish or event.startswith(DONE):
            stream.finish = stream.finish or "stop"  # not every server says why it ends
            stream.held.append(event)
            return
        self._count(stream, event)
        found = _FINISH.search(event)
        if found is not None:
            stream.finish = found[1].decode()
            stream.tail = _decode(event)
            if stream.finish == "abort":
                # It may bring tokens that the instance had held back.
                stream.tail["choices"][0]["finish_reason"] = None
                event = _event(stream.tail)
        if resumed:
            event = self._translated(event)
        if stream.finish and stream.finish != "abort":
            stream.held.append(event)
        else:
            self._pass(event + b"\n\n")

    def _read_up(self, stream: Stream) -> None:
        """Count what was passed on: many events together cost little more than one."""
        if stream.unread:
            data = b"".join(stream.unread)
            stream.unread.clear()
            self._count(stream, data)

    def _count(self, stream: Stream, data: bytes) -> None:
        found = data.count(b'"token_ids"')
        if not found:
            stream.events += data.count(b"data: {")
        elif data.count(_IDS_AS_VLLM) == found:
            for rest in data.split(_IDS_AS_VLLM)[1:]:
                ids, closed, _ = rest.partition(b"]")
                if ids and closed:
                    stream.ids += ids + b","
        else:
            for ids in _IDS.findall(data):
                if ids:
                    stream.ids += ids + b","
        if not self._id:
            self._id = (_ID.search(data) or [b"", b""])[1]
        if self._prompt_ids is None and b'"prompt_token_ids"' in data:
            prompt = _PROMPT_IDS.search(data)
            self._prompt_ids = None if prompt is None else msgspec.json.decode(prompt[1])

    def _translated(self, event: bytes) -> bytes:
        """An event of a later attempt as the client's own endpoint would have said it."""
        fields = _decode(event)
        if self._id:
            fields["id"] = self._id.decode()
        if self.call.endpoint == "chat" and fields.get("object") != "chat.completion.chunk":
            fields["object"] = "chat.completion.chunk"
            for choice in fields.get("choices", ()):
                choice["delta"] = {"content": choice.pop("text", "")}
                choice["logprobs"] = dialects.chat_logprobs([choice.get("logprobs")])
        return _event(fields)

    def _pass(self, events: bytes) -> None:
        write = self._write
        if write is None:
            write = self._write = self.reply.begin([EVENT_STREAM])
        write(events)

    # -- the driver's store ----------------------------------------------------------------

    def streamed(self, attempt: int) -> int:
        """Only tokens one could go on from count."""
        stream = self._streams.get(attempt)
        if stream is None:
            return 0
        self._read_up(stream)
        return stream.tokens if stream.ids else 0

    def partial(self, attempt: int, tokens: int) -> None:
        """The ids stay where they are."""

    def keep(self, attempt: int, tokens: int, piece: None) -> None:
        """The client has it already."""

    def drop(self, attempt: int) -> None:
        if attempt:
            self._streams.pop(attempt, None)
        else:
            self._streams.clear()

    # -- answering -------------------------------------------------------------------------

    def answer(self, sample: Sample) -> None:
        last = list(self._streams.values())[-1]
        events = last.held
        if last.finish == "abort":
            choice = last.tail["choices"][0]
            choice |= {"finish_reason": sample.finish, "token_ids": []}
            choice |= {"text": "", "delta": {}}
            del choice["delta" if self.call.endpoint == "completions" else "text"]
            events = [self._translated(_event(last.tail)), DONE]
        if not events[0].startswith(DONE):
            events = [with_added(events[0], sample), *events[1:]]
        self._pass(b"\n\n".join([*events, b""]))
        self.reply.end()

    def fail(self, reason: str, error: Exception | None) -> None:
        if reason == "withdrawn":
            return
        status = error.status if isinstance(error, RequestRejected) else 502
        text = f"no instance could answer: {error}"
        body = getattr(error, "body", b"") or error_body(status, text)
        if self._write is not None:
            # The status is out; an error event and no [DONE] is how vLLM ends such a stream.
            self._write(b"data: " + body + b"\n\n")
            self.reply.end()
        else:
            self.reply.answer(status, [JSON], body)


class Receiver:
    """Hands an exchange's bytes to its stream."""

    __slots__ = ("_error_body", "_over", "_owner", "_resumed", "_status", "_stream")

    def __init__(self, owner: Streamed, stream: Stream, over: Over, *, resumed: bool) -> None:
        self._owner = owner
        self._stream = stream
        self._over = over
        self._resumed = resumed
        self._status = 0
        self._error_body = b""

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        if self._status != 200:
            self._error_body += data
            return
        try:
            self._owner.receive(self._stream, data, resumed=self._resumed)
        except RequestRejected as error:
            self.on_error(error)
        except (InstanceError, msgspec.DecodeError) as error:
            self.on_error(InstanceError(f"the stream broke off: {error}"))

    def on_end(self) -> None:
        try:
            if self._status != 200:
                raise refuse(self._status, self._error_body)
            outcome = self._owner.outcome(self._stream)
        except Exception as error:
            self._over(error)
        else:
            self._owner.reply.in_turn(self._over, outcome)

    def on_error(self, error: Exception) -> None:
        self._over(error)


def _go_on(data: bytes) -> bool:
    """Whether these are whole events none of which ends its stream, as vLLM writes them."""
    if data.find(_NEWLINE) == len(data) - 2:  # a single one, as most packets bring
        return data[-1] == _NEWLINE and data.rfind(_GOES_ON) > 0
    return data.endswith(b"\n\n") and data.count(_GOES_ON) == data.count(b"\n\n")


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(fields)


def _decode(event: bytes) -> dict[str, Any]:
    fields = msgspec.json.decode(event.removeprefix(b"data:"))
    if not isinstance(fields, dict):
        raise InstanceError("an event is not a JSON object")
    return fields
