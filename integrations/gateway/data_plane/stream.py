"""The stream of one attempt: events are passed on to the client as they arrive, except its end.

An event with "abort", or with "length" where it ends only a segment, never reaches the client. The
event that ends the response waits for the scheduler, which adds the versions.
"""

from __future__ import annotations

import re

import msgspec

from rollout_sched.core.events import Spans
from rollout_sched.integrations.gateway.data_plane import answers, dialects
from rollout_sched.integrations.gateway.data_plane.answers import Event, EventChoice
from rollout_sched.integrations.gateway.data_plane.client_stream import ClientStream
from rollout_sched.integrations.gateway.data_plane.stream_tokens import StreamTokens
from rollout_sched.integrations.vllm.protocol.answers import Finish, finish_of, spans_of
from rollout_sched.integrations.vllm.protocol.event_stream import (
    DONE,
    WholeEvents,
    as_event,
    data_of_each,
)
from rollout_sched.integrations.vllm.protocol.request_ids import names_another
from rollout_sched.live.ports import AnswerUntrue, InstanceError, Outcome, RequestRejected

#: The beginning that all events of a stream share: the id comes first, as in OpenAI and vLLM.
_OPENING = re.compile(rb'data: ?\{\s*"(?:request_)?id"\s*:\s*"[^"\\]*"')

#: The text of an event that does not end the stream, as vLLM writes it.
_GOES_ON = b'"finish_reason":null'
_NEWLINE = ord("\n")


class StreamEnd:
    """How a stream has ended.

    finish  the reason, in the scheduler's words; None before the end
    event   the event with the reason, held back; b"" if the response continues in another attempt
    usage   the event with the usage, after that
    done    all later events are ignored
    """

    __slots__ = ("done", "event", "finish", "spans", "usage")

    def __init__(self) -> None:
        self.finish: Finish | None = None
        self.spans: Spans = ()
        self.event = b""
        self.usage = b""
        self.done = False


class Stream:
    """One attempt's stream of events to `client`; the attempt may be the first or a later one.

    resumes   tokens of the response that it resumes from, if the client has received events of
              earlier attempts; else None
    segment   its "length" is not the end of the response
    labelled  as its instance's `labelled`
    """

    __slots__ = (
        "_client",
        "_cut",
        "_events",
        "_labelled",
        "_opening",
        "_order_id",
        "_resumes",
        "_segment",
        "end",
        "tokens",
    )

    def __init__(
        self,
        client: ClientStream,
        attempt: int,
        order_id: str,
        *,
        resumes: int | None,
        segment: bool,
        labelled: bool,
    ) -> None:
        self.tokens = StreamTokens(attempt)
        self.end = StreamEnd()
        self._client = client
        self._order_id = order_id
        self._resumes = resumes
        self._segment = segment
        self._labelled = labelled
        self._events = WholeEvents()
        self._cut = False  # an event is not complete yet
        self._opening = b""  # beginning of events that may pass unread; b"" if none may

    def receive(self, data: bytes) -> bool:
        """Take bytes of the stream, cut anywhere; returns True after its last event.

        Raises InstanceError for invalid events; the rest of these bytes is then dropped.
        """
        if self._opening and not self._cut and go_on(data, self._opening):
            self._client.send(data)
            self.tokens.add_unread(data)
            return False
        data = self._events.feed(data)
        self._cut = bool(self._events.rest)
        if self._opening and go_on(data, self._opening):
            self._client.send(data)
            self.tokens.add_unread(data)
        elif data:
            self.tokens.read_up()
            for event_data in data_of_each(data):
                self._read(event_data)
        return self.end.done

    def outcome(self) -> Outcome:
        """Raises InstanceError if it has not ended."""
        finish = self.end.finish
        if finish is None:
            raise InstanceError("the stream ended without a finish_reason")
        self.tokens.read_up()
        return Outcome(self.tokens.count, finish, self.end.spans, None)

    def _read(self, data: bytes) -> None:
        end = self.end
        if end.done:
            return
        if data == DONE:
            end.done = True
            if end.finish is None:
                end.finish = "stop"  # some servers give no finish_reason
        elif end.finish is not None:
            self._read_after_the_end(data)
        else:
            self._read_before_the_end(data)

    def _read_before_the_end(self, data: bytes) -> None:
        told = self._believed(data)
        choice = told.choices[0] if told.choices else None
        ids = b"" if choice is None else choice.ids
        self._client.learn(told, choice)
        data = self._translated(data)
        if choice is not None and choice.finish_reason is not None:
            self._read_end(data, choice, ids, finish_of(choice.finish_reason))
            return
        passed = as_event(data)
        self._client.send(passed)
        if choice is not None:
            self.tokens.add(ids, speaks=choice.speaks)
        if ids and self._resumes is None:
            opening = _OPENING.match(passed)
            self._opening = opening[0] if opening is not None else b""

    def _read_end(self, data: bytes, choice: EventChoice, ids: bytes, finish: Finish) -> None:
        goes_on = finish == "abort" or (finish == "length" and self._segment)
        if goes_on and (choice.speaks or ids):
            # The event has tokens that the instance had held back.
            fields = answers.read_object(data)
            fields["choices"][0]["finish_reason"] = None
            self._client.send(as_event(msgspec.json.encode(fields)))
        self.tokens.add(ids, speaks=choice.speaks)
        try:
            self.end.spans = spans_of(
                choice.weight_versions, self.tokens.count, labelled=self._labelled
            )
        except AnswerUntrue as error:
            # The client already has the tokens, so they cannot be corrected.
            text = f"the stream is not valid: {error}"
            raise RequestRejected(text, 502, because=error) from None
        self._opening = b""
        self.end.finish = finish
        if not goes_on:
            self.end.event = data

    def _read_after_the_end(self, data: bytes) -> None:
        """Only the usage may follow; invalid events are dropped."""
        try:
            told = self._believed(data)
        except InstanceError:
            return
        if told.choices:
            # The client already has the earlier events, so they cannot be corrected.
            raise RequestRejected("the stream continued after its finish_reason", 502)
        if told.usage is not None:
            self.end.usage = self._translated(data)

    def _believed(self, data: bytes) -> Event:
        told = answers.read_event(data)
        named = told.id or told.request_id or ""
        if names_another(named, self._order_id):
            raise InstanceError(f"an event for {self._order_id} belongs to another, {named[:80]!r}")
        return told

    def _translated(self, data: bytes) -> bytes:
        """An event in the client's format."""
        if self._resumes is None:
            return data
        fields = answers.read_object(data)
        try:
            dialects.translate_event(
                self._client.endpoint, self._client.envelope or {}, self._resumes, fields
            )
            return msgspec.json.encode(fields)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise InstanceError(f"invalid event: {error!r}") from None


def go_on(data: bytes, opening: bytes) -> bool:
    """Whether these are whole events of this stream, as vLLM writes them, and none ends it."""
    if not data.endswith(b"\n\n"):
        return False
    if data.find(_NEWLINE) == len(data) - 2:  # a single event, as in most packets
        return _goes_on(data, opening)
    events = data[:-2].split(b"\n\n")
    for one in events:
        if not _goes_on(one, opening):
            return False
    return data.count(b"\n") == 2 * len(events)


def _goes_on(event: bytes, opening: bytes) -> bool:
    return (
        event.rfind(_GOES_ON) > 0
        and event.startswith(opening)
        # An event without ids, or without a choice, must be read to be counted.
        and event.find(b'"choices"') > 0
        and event.find(b'"token_ids"') > 0
    )
