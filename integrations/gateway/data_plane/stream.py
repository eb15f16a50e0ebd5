"""The stream of one attempt: events are passed on to the client as they arrive, except its end.

An event with "abort", or with "length" where it ends only a segment, never reaches the client. The
event that ends the response waits for the scheduler, which adds the versions.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from rollout_sched.core.model.events import Spans
from rollout_sched.integrations.gateway.data_plane import answers
from rollout_sched.integrations.gateway.data_plane import resume as dialects
from rollout_sched.integrations.gateway.data_plane.answers import (
    Event,
    EventChoice,
    both_spellings,
    read_event,
)
from rollout_sched.integrations.gateway.data_plane.call import KEEP_ALIVE, Reply, Write
from rollout_sched.integrations.gateway.data_plane.resume import Repetition
from rollout_sched.integrations.vllm.protocol.answers import (
    DONE,
    Finish,
    WholeEvents,
    as_event,
    data_of_each,
    finish_of,
    spans_of,
)
from rollout_sched.integrations.vllm.protocol.endpoints import Endpoint
from rollout_sched.live.ports import AnswerUntrue, InstanceError, Outcome, RequestRejected

#: The packets whose text is searched for in what the next attempt repeats.
_SENT = 8

EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")


class ClientStream:
    """The single stream that a client receives, made from all attempts of its request.

    prompt_ids  the prompt's token ids, as an instance sent them
    envelope    the fields of the first event that describe the response; None before it
    parsed      the field, such as "reasoning", that a server parsed from the response so far; ""
                if none
    last        the events that were sent last, with the end of the text so far
    tops        the most likely tokens that a chat wants in its log-probs
    """

    def __init__(self, endpoint: Endpoint, reply: Reply, tops: int = 0) -> None:
        self.endpoint = endpoint
        self.tops = tops
        self.reply = reply
        self.last: deque[bytes] = deque(maxlen=_SENT)
        self._write: Write | None = None  # where the events go, once there are any
        self.start_over()

    def start_over(self) -> None:
        """Forget what an attempt said of which the client has received nothing."""
        self.prompt_ids = b""
        self.envelope: dict[str, Any] | None = None
        self.parsed = ""

    @property
    def begun(self) -> bool:
        return self._write is not None

    def send(self, events: bytes) -> None:
        """Send whole events."""
        if self.endpoint == "generate":
            events = both_spellings(events)
        self.last.append(events)
        write = self._write
        if write is None:
            write = self._write = self.reply.begin([EVENT_STREAM])
        write(events)

    def last_choices(self) -> list[dict[str, Any]]:
        """The choices of the events that were sent last; unread ones may be invalid."""
        choices: list[dict[str, Any]] = []
        for data in data_of_each(b"".join(self.last)):
            with suppress(InstanceError):
                read_event(data)
                choices += answers.read_object(data).get("choices") or ()
        return choices

    def keep_alive(self) -> None:
        """Send a comment, if the stream has begun: before that, its status is not known."""
        if self._write is not None:
            self._write(KEEP_ALIVE)

    def learn(self, event: Event, choice: EventChoice | None) -> None:
        """Keep what the first event says about the response: all later events repeat it, whichever
        instance sends them. Any event, also the last of an attempt, may show that it is parsed."""
        if self.envelope is None:
            said = dialects.envelope(self.endpoint, "event")
            for name in said:
                value = getattr(event, name)
                if value is not None:
                    said[name] = value
            self.envelope = said
        if not self.prompt_ids:
            self.prompt_ids = event.prompt_ids or (b"" if choice is None else choice.prompt_ids)
        if choice is not None:
            self.parsed = self.parsed or choice.parsed


# ------------------------------------------------------------------------------------------
# Counts the tokens of a stream as cheaply as possible.
#
# Of the events passed to the client only the token ids are kept, as they are written there, to
# resume from. An event without ids counts as one token, and a stream with such an event cannot be
# resumed.

_IDS = re.compile(rb'"token_ids"\s*:\s*\[([\d,\s]*)\]')
_IDS_AS_VLLM = b'"token_ids":['
_ID_BYTES = b"0123456789, "

#: Packets that are counted together, which costs little more than counting one. Streams that began
#: together count at different times, because counting one stream delays the others.
READ_TOGETHER = 32


class StreamTokens:
    """The tokens of one attempt; its number decides when they are counted.

    ids     "1,2,3," as written in the events
    events  number of events without ids: one token each
    unread  data that was passed on but is not counted yet
    """

    __slots__ = ("_until", "events", "ids", "unread")

    def __init__(self, attempt: int) -> None:
        self.ids = bytearray()
        self.events = 0
        self.unread: list[bytes] = []
        self._until = 1 + attempt % READ_TOGETHER  # packets until the next count

    @property
    def count(self) -> int:
        """Tokens of the data that has been read."""
        return self.ids.count(b",") if self.ids else self.events

    def to_go_on_from(self) -> list[int]:
        """The token ids of the data that has been read."""
        ids: list[int] = msgspec.json.decode(b"[" + self.ids[:-1] + b"]")
        return ids

    def add(self, ids: bytes, *, speaks: bool) -> None:
        """Count an event that was read: its ids as "1,2", and whether it has other output."""
        if ids:
            self.ids += ids + b","
        elif speaks:
            self.events += 1

    def add_unread(self, data: bytes) -> None:
        """Add whole events that were passed on unread."""
        unread = self.unread
        unread.append(data)
        if len(unread) >= self._until:
            self._until = READ_TOGETHER
            self.read_up()

    def read_up(self) -> None:
        """Count the unread data."""
        if self.unread:
            data = b"".join(self.unread)
            self.unread.clear()
            self._count(data)

    def _count(self, data: bytes) -> None:
        found = data.count(b'"token_ids"')
        if not found:
            self.events += data.count(b'"choices"')
            return
        if data.count(_IDS_AS_VLLM) == found:
            parts = [rest.partition(b"]") for rest in data.split(_IDS_AS_VLLM)[1:]]
            lists = [some for some, closed, _ in parts if closed]
        else:
            lists = _IDS.findall(data)
        if not all(lists):
            self._read(data)
            return
        ids = b",".join(lists)
        if ids.translate(None, _ID_BYTES):
            self.events += found  # these are not ids, so the stream cannot be resumed
        elif ids:
            self.ids += ids + b","

    def _read(self, data: bytes) -> None:
        """Read each event: one without ids may still have text, whose ids are then missing."""
        for event in data_of_each(data):
            try:
                choices = read_event(event).choices
                choice = choices[0] if choices else None
                if choice is not None:
                    self.add(choice.ids, speaks=choice.speaks)
            except InstanceError:
                self.events += 1


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

    resumes      tokens of the response that it resumes from, if the client has received events of
                 earlier attempts; else None
    text_offset  characters of the text of those tokens; 0 if unknown
    repetition   what the first text of an attempt that resumes may repeat
    segment      its "length" is not the end of the response
    resumable    whether another attempt can go on from its tokens
    labelled     as its instance's `labelled`
    recognize    its call's `InstanceCall.recognize`, set when the call was made
    passed       the client has received tokens of this attempt
    """

    __slots__ = (
        "_client",
        "_cut",
        "_dropped",
        "_events",
        "_held",
        "_labelled",
        "_opening",
        "_repetition",
        "_resumable",
        "_resumes",
        "_segment",
        "_text_offset",
        "_texts",
        "end",
        "passed",
        "recognize",
        "tokens",
    )

    def __init__(
        self,
        client: ClientStream,
        attempt: int,
        *,
        resumes: int | None,
        text_offset: int = 0,
        repetition: Repetition | None = None,
        segment: bool,
        resumable: bool,
        labelled: bool,
    ) -> None:
        self.recognize: Callable[[str], None]
        self.passed = False
        self.tokens = StreamTokens(attempt)
        self.end = StreamEnd()
        self._client = client
        self._resumes = resumes
        self._text_offset = text_offset
        self._repetition = repetition
        self._segment = segment
        self._resumable = resumable
        self._labelled = labelled
        self._events = WholeEvents()
        self._texts = client.endpoint != "generate"  # its events have the tokens' text
        self._held = b""  # events whose tokens have no text yet
        self._dropped = False  # tokens that had none when it ended
        self._cut = False  # an event is not complete yet
        self._opening = b""  # beginning of events that may pass unread; b"" if none may

    def receive(self, data: bytes) -> bool:
        """Take bytes of the stream, cut anywhere; returns True after its last event.

        Raises InstanceError for invalid events; the rest of these bytes is then dropped.
        """
        if self._opening and not self._cut and are_plain_events(data, self._opening):
            self._pass_on(data)
            return False
        data = self._events.feed(data)
        self._cut = bool(self._events.rest)
        if self._opening and are_plain_events(data, self._opening):
            self._pass_on(data)
        elif data:
            self.tokens.read_up()
            if data.startswith(b":"):  # a comment, by which a silent server keeps the connection
                self._client.keep_alive()
            for event_data in data_of_each(data):
                self._read(event_data)
        return self.end.done

    def outcome(self) -> Outcome:
        """Raises InstanceError if it has not ended."""
        finish = self.end.finish
        if finish is None:
            raise InstanceError("the stream ended without a finish_reason")
        self.tokens.read_up()
        ended = "segment" if self._dropped and finish == "length" else finish
        return Outcome(self.tokens.count, ended, self.end.spans, None)

    def _pass_on(self, events: bytes) -> None:
        """Send plain events, but hold back the last ones as long as their tokens have no text."""
        if self._held or (self._texts and is_mute(events)):
            events = self._held + events
            spoken = end_of_text(events)
            events, self._held = events[:spoken], events[spoken:]
            if not events:
                return
        self._send(events)
        self.tokens.add_unread(events)

    def _send(self, events: bytes) -> None:
        """Send events with tokens."""
        self.passed = True
        self._client.send(events)

    def _release(self) -> None:
        """Send the events that were held back."""
        if self._held:
            self._send(self._held)
            self.tokens.add_unread(self._held)
            self.tokens.read_up()
            self._held = b""

    def _read(self, data: bytes) -> None:
        end = self.end
        if end.done:
            return
        if data == DONE:
            end.done = True
            self._release()
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
        data = self._translated(data, ids.count(b",") + 1)
        if choice is not None and choice.finish_reason is not None:
            self._read_end(data, choice, ids, finish_of(choice.finish_reason))
            return
        passed = as_event(data)
        if self._texts and is_mute(passed):
            self._pass_on(passed)
            return
        self._release()
        speaks = choice is not None and choice.speaks
        self.passed = self.passed or speaks or bool(ids)
        self._client.send(passed)
        self.tokens.add(ids, speaks=speaks)
        if ids and self._resumes is None:
            opening = _OPENING.match(passed)
            self._opening = opening[0] if opening is not None else b""

    def _read_end(self, data: bytes, choice: EventChoice, ids: bytes, finish: Finish) -> None:
        aborted = finish == "abort" and not self._client.reply.aborted
        goes_on = aborted or (finish == "length" and self._segment)
        self._opening = b""
        self.end.finish = finish
        mute = self._texts and (self._held or is_mute(data)) and not choice.speaks
        # An instance that aborts gives out what it held back, which may begin a stop string.
        if goes_on and (not self._resumable or (mute and (finish == "abort" or self.tokens.count))):
            self._dropped, self._held = True, b""
            return
        # A segment of nothing else goes on all the same, as another would be of the same tokens.
        self._release()
        if goes_on and (choice.speaks or ids):
            # The event has tokens that the instance had held back.
            fields = answers.read_object(data)
            fields["choices"][0]["finish_reason"] = None
            self._send(as_event(msgspec.json.encode(fields)))
        self.tokens.add(ids, speaks=choice.speaks)
        try:
            # Without ids the number of tokens is a guess, which versions need not agree with.
            versions = choice.weight_versions if self.tokens.ids else None
            self.end.spans = spans_of(versions, self.tokens.count, labelled=self._labelled)
        except AnswerUntrue as error:
            raise self._too_late(error) from None
        if not goes_on:
            self.end.event = data

    def _read_after_the_end(self, data: bytes) -> None:
        """Only the usage may follow; invalid events are dropped."""
        try:
            told = self._believed(data)
        except InstanceError:
            return
        if told.choices:
            raise self._too_late(AnswerUntrue("the stream continued after its finish_reason"))
        if told.usage is not None:
            self.end.usage = self._translated(data)

    def _too_late(self, error: AnswerUntrue) -> AnswerUntrue | RequestRejected:
        """The error for a stream that turns out to be untrue at its end: the tokens that the client
        already has cannot be corrected."""
        if not self.passed:
            return error
        text = f"the stream is not valid: {error.unquoted}"
        return RequestRejected(text, 502, because=error)

    def _believed(self, data: bytes) -> Event:
        told = answers.read_event(data)
        self.recognize(told.id or told.request_id or "")
        return told

    def _translated(self, data: bytes, tokens: int = 0) -> bytes:
        """An event in the client's format."""
        resumes = self._resumes
        if resumes is None:
            return data
        fields = answers.read_object(data)
        try:
            self._remove_repetition(fields, tokens)
            dialects.translate_event(
                self._client.endpoint,
                self._client.envelope or {},
                resumes,
                self._text_offset,
                fields,
                self._client.tops,
            )
            return msgspec.json.encode(fields)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise InstanceError(f"invalid event: {type(error).__name__}") from None

    def _remove_repetition(self, fields: dict[str, Any], tokens: int) -> None:
        """Remove a repetition of prompt and response from the first text."""
        texts = [choice for choice in fields.get("choices") or () if choice.get("text")]
        if self._repetition is None or not texts:
            return
        (choice,) = texts
        choice["text"] = choice["text"][self._repetition.length(choice["text"], tokens) :]
        self._repetition = None


# ------------------------------------------------------------------------------------------
# Tokens without text: a part of a character, whose text comes with the token that completes it.
#
# From another attempt it would not come, or, before vLLM 48853 is mended, with the text of the
# prompt. So such tokens are held back, and a response is resumed from those before them. A busy
# server joins tokens to one event, whose last tokens may then have no text: see `Repetition`.

_NO_TEXT = re.compile(rb'"(?:text|content)"\s*:\s*""')
_SOME_IDS = re.compile(rb'"token_ids"\s*:\s*\[\s*\d')

#: Tokens of a character but the last. If more have no text, they are no part of one.
_PARTS = 3


def is_mute(events: bytes) -> bool:
    """Whether one of these events of a stream has tokens without text."""
    if events.find(b'""') < 0:
        return False
    return _NO_TEXT.search(events) is not None and _SOME_IDS.search(events) is not None


def end_of_text(events: bytes) -> int:
    """Where the last event with text ends; where all end, if too many have none."""
    mute = 0
    each = events[:-2].split(b"\n\n")
    while mute < len(each) and is_mute(each[-1 - mute]):
        mute += 1
    if mute > _PARTS:
        return len(events)
    return len(events) - sum([len(event) + 2 for event in each[len(each) - mute :]])


def are_plain_events(data: bytes, opening: bytes) -> bool:
    """Whether these are whole events of this stream, as vLLM writes them, and none ends it."""
    if not data.endswith(b"\n\n"):
        return False
    if data.find(_NEWLINE) == len(data) - 2:  # a single event, as in most packets
        return _is_plain_event(data, opening)
    events = data[:-2].split(b"\n\n")
    for one in events:
        if not _is_plain_event(one, opening):
            return False
    return data.count(b"\n") == 2 * len(events)


def _is_plain_event(event: bytes, opening: bytes) -> bool:
    return (
        event.rfind(_GOES_ON) > 0
        and event.startswith(opening)
        # An event without ids, or without a choice, must be read to be counted.
        and event.find(b'"choices"') > 0
        and event.find(b'"token_ids"') > 0
    )
