"""The fields that the gateway reads from instances' whole answers and stream events.

An answer is accepted only if all of it is valid: JSON to the last byte, in the endpoint's format,
with consistent counts. Passing on, joining and counting it later then cannot fail. Other fields are
skipped: they are checked to be JSON but not decoded.

Of a stream, the first event and the end are read this way; events that begin like the first one, id
included, and do not end the stream pass unread. What cannot be true fails the attempt, which is
made elsewhere before the client has seen any of it.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

import msgspec

from rollout_sched.core.model.events import Spans
from rollout_sched.core.model.records import Count, Serial
from rollout_sched.integrations.vllm.protocol.answers import (
    Finish,
    Logprob,
    VersionSpan,
    decoded,
    failure,
    finish_of,
    spans_of,
)
from rollout_sched.integrations.vllm.protocol.endpoints import Endpoint
from rollout_sched.live.ports import AnswerUntrue, InstanceError

try:
    from rollout_sched.integrations.gateway.data_plane.answer_scan import (  # type: ignore[import-not-found]
        scan,
    )
except ImportError:  # not a compiled build
    scan = None

_NULL = msgspec.Raw(b"null")

#: Fields of a chat's message, or of a delta, that a server parses from the text.
REASONING = ("reasoning", "reasoning_content")
PARSED = (*REASONING, "tool_calls")


class _Usage(msgspec.Struct):
    completion_tokens: Count
    prompt_tokens: Count = 0


class _Likely(msgspec.Struct):
    logprob: Logprob


class _TokenLogprob(_Likely):
    top_logprobs: list[_Likely] | None = None


class _Logprobs(msgspec.Struct):
    """`content` is that of chats and of /inference/v1/generate, the others are of completions."""

    content: list[_TokenLogprob] | None = None
    token_logprobs: msgspec.Raw = _NULL
    top_logprobs: list[dict[str, Logprob | None] | None] | None = None

    def check(self) -> None:
        """Raises AnswerUntrue if its `token_logprobs` are something else."""
        text = bytes(self.token_logprobs)
        if text != b"null" and not _are_logprobs(text):
            decoded(_token_logprobs.decode, text)


class _Message(msgspec.Struct):
    """A chat's message."""

    content: msgspec.Raw = _NULL
    reasoning: msgspec.Raw = _NULL
    reasoning_content: msgspec.Raw = _NULL
    tool_calls: msgspec.Raw = _NULL

    @property
    def is_valid(self) -> bool:
        """Whether its texts are texts, and its tool calls a list."""
        texts = (self.content, self.reasoning, self.reasoning_content)
        return _begins(self.tool_calls, b"[n") and all(_begins(text, b'"n') for text in texts)


class _Choice(msgspec.Struct):
    finish_reason: str
    text: msgspec.Raw = _NULL
    message: _Message | None = None
    token_ids: msgspec.Raw = _NULL
    logprobs: _Logprobs | None = None
    weight_versions: list[VersionSpan] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage
    id: str | None = None
    request_id: str | None = None


class WholeAnswer(msgspec.Struct):
    """A whole answer. `id` is the id of the request that it claims to answer."""

    tokens: int
    finish: Finish
    spans: Spans
    id: str


class EventChoice(msgspec.Struct):
    """The choice of an event."""

    finish_reason: str | None = None
    token_ids: msgspec.Raw = _NULL
    prompt_token_ids: msgspec.Raw = _NULL
    text: str | None = None
    delta: dict[str, Any] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[VersionSpan] | None = None

    @property
    def ids(self) -> bytes:
        """The token ids of the choice as "1,2"; b"" if it gives none. Raises AnswerUntrue if they
        are invalid."""
        return _ids(self.token_ids)[1:-1]

    @property
    def prompt_ids(self) -> bytes:
        """The prompt's token ids as a JSON list; b"" if it gives none."""
        return _prompt_ids(self.prompt_token_ids)

    @property
    def parsed(self) -> str:
        """The field of the delta that the server has parsed from the text; "" if none."""
        delta = self.delta or {}
        return next((name for name in PARSED if delta.get(name)), "")

    @property
    def speaks(self) -> bool:
        """Whether it has more than the role that opens a chat."""
        delta = self.delta or {}
        return bool(self.text) or any(delta[key] for key in delta if key != "role")


class EventUsage(msgspec.Struct):
    completion_tokens: Count = 0
    prompt_tokens: Count = 0


class Event(msgspec.Struct):
    """An event of a stream of any endpoint; an event with only the usage has no choices."""

    choices: Annotated[list[EventChoice], msgspec.Meta(max_length=1)] | None = None
    id: str | None = None
    request_id: str | None = None
    object: str | None = None
    created: Serial | float | None = None
    model: str | None = None
    prompt_token_ids: msgspec.Raw = _NULL
    usage: EventUsage | None = None
    error: msgspec.Raw = _NULL

    @property
    def prompt_ids(self) -> bytes:
        """The prompt's token ids as a JSON list; b"" if it gives none."""
        return _prompt_ids(self.prompt_token_ids)


_answer = msgspec.json.Decoder(_Answer)
_event = msgspec.json.Decoder(Event)
_token_logprobs = msgspec.json.Decoder(list[Logprob | None] | None)
_object = msgspec.json.Decoder(dict[str, Any])


def _as_written(number: str) -> float | msgspec.Raw:
    """A number too large for a double, in a field that nobody checks, stays what it is."""
    value = float(number)
    return msgspec.Raw(number.encode()) if math.isinf(value) else value


_any_number = msgspec.json.Decoder(dict[str, Any], float_hook=_as_written)
_versions = msgspec.json.Decoder(list[VersionSpan] | None)

#: Tokens, finish_reason, id, number of token ids (-1: it has none), whether it has a text, whether
#: a message, and its weight_versions in JSON.
Scanned = tuple[int, str, str, int, bool, bool, bytes]

#: The field that has the response.
_HOLDS = {"completions": "text", "chat": "message", "generate": "token_ids"}
_WHITE = b" \t\r\n"
_DIGITS = b"0123456789" + _WHITE


def read_answer(
    body: bytes, upstream_endpoint: Endpoint, *, labelled: bool = False, beams: int = 1
) -> WholeAnswer:
    """Raises AnswerUntrue if it is not a whole answer of the endpoint `spoken`; `labelled` as in
    `spans_of`. Of several beams, the tokens are those of one, on average."""
    scanned: Scanned | None = scan(body) if scan is not None and beams == 1 else None
    if scanned is not None:
        answer = from_scan(scanned, upstream_endpoint, labelled=labelled)
        if answer is not None:
            return answer
    return read_by_msgspec(body, upstream_endpoint, labelled=labelled, beams=beams)


def from_scan(
    scanned: Scanned, upstream_endpoint: Endpoint, *, labelled: bool
) -> WholeAnswer | None:
    """The answer that `answer_scan.c` has read, nine times as fast as msgspec; None if it may not
    be valid for the endpoint."""
    tokens, finish, name, ids, text, message, versions = scanned
    holds = {"completions": text, "chat": message, "generate": ids >= 0}[upstream_endpoint]
    if not holds or finish == "error" or ids not in (-1, tokens):
        return None
    spans: Spans = ()
    if versions != b"null":
        try:
            spans = spans_of(_versions.decode(versions), tokens, labelled=labelled)
        except (msgspec.DecodeError, InstanceError):
            return None
    return WholeAnswer(tokens, finish_of(finish), spans, name)


def read_by_msgspec(
    body: bytes, upstream_endpoint: Endpoint, *, labelled: bool = False, beams: int = 1
) -> WholeAnswer:
    """As `read_answer`."""
    answer = decoded(_answer.decode, body)
    if len(answer.choices) != beams:
        raise AnswerUntrue(f"the answer has {len(answer.choices)} choices instead of {beams}")
    choice = answer.choices[0]
    for each in answer.choices:
        if each.logprobs is not None:
            each.logprobs.check()
    if not all(_has_response(each, upstream_endpoint) for each in answer.choices):
        holder = _HOLDS[upstream_endpoint]
        raise AnswerUntrue(f"the answer's {holder!r} is missing or has the wrong type")
    tokens = answer.usage.completion_tokens // beams
    if beams == 1 and choice.token_ids != _NULL and not _are_ids(bytes(choice.token_ids), tokens):
        raise AnswerUntrue(f"the answer's token_ids are not the {tokens} ids that its usage counts")
    finish = finish_of(choice.finish_reason)
    spans = spans_of(choice.weight_versions, tokens, labelled=labelled)
    return WholeAnswer(tokens, finish, spans, answer.id or answer.request_id or "")


def _has_response(choice: _Choice, upstream_endpoint: Endpoint) -> bool:
    if upstream_endpoint == "chat":
        return choice.message is not None and choice.message.is_valid
    if upstream_endpoint == "completions":
        return _begins(choice.text, b'"')
    return _begins(choice.token_ids, b"[")


def _begins(value: msgspec.Raw, types: bytes) -> bool:
    """Whether a JSON value is of one of these types, by its first byte."""
    return memoryview(value)[0] in types


def read_event(data: bytes) -> Event:
    """Raises InstanceError if it is not an event, or if it reports an error."""
    event = decoded(_event.decode, data)
    if event.error != _NULL:
        raise failure(data)
    for choice in event.choices or ():
        if choice.logprobs is not None:
            choice.logprobs.check()
        if choice.finish_reason is not None:
            finish_of(choice.finish_reason)
        if choice.delta is not None and not _is_valid(choice.delta):
            raise AnswerUntrue("an event's delta has fields of the wrong type")
    return event


def _is_valid(delta: dict[str, Any]) -> bool:
    """As `_Message.is_valid`."""
    texts = [delta.get(name) for name in ("content", *REASONING)]
    tools = delta.get("tool_calls")
    return isinstance(tools, list | None) and all(isinstance(text, str | None) for text in texts)


def read_object(data: bytes) -> dict[str, Any]:
    """All fields of a JSON object. Raises AnswerUntrue if it is not one."""
    try:
        return decoded(_object.decode, data)
    except AnswerUntrue:
        return decoded(_any_number.decode, data)


def _are_ids(ids: bytes, count: int) -> bool:
    """Whether this JSON value is a list of `count` integers."""
    if not count or len(ids) < 3:
        return not count and ids.translate(None, _WHITE) == b"[]"
    if len(ids) <= 2 * count:  # before anything is sized by a server's number
        return False
    return ids.translate(None, _DIGITS) == b"[%b]" % (b"," * (count - 1))


#: An item that is not negative, 0.0 or null, as vLLM writes log-probs; an exponent above 0.
_ODD_ITEM = re.compile(rb",[^-](?<!,0(?=\.0[,\]]))(?<!,n)")
_LARGE = re.compile(rb"e[^-]")


def _are_logprobs(text: bytes) -> bool:
    """Whether this JSON value is a list of plain log-probs; if not, they have to be decoded to
    know. Takes a third of the time of that."""
    if text[:1] != b"[" or _ODD_ITEM.search(b"," + text[1:]) is not None:
        return False
    return b"E" not in text and (b"e" not in text or _LARGE.search(text) is None)


def _prompt_ids(value: msgspec.Raw) -> bytes:
    """A prompt is never empty: with an empty list the response would resume from nothing."""
    ids = _ids(value)
    return b"" if ids == b"[]" else ids


def _ids(value: msgspec.Raw) -> bytes:
    if value == _NULL:
        return b""
    ids = bytes(value).translate(None, _WHITE)
    if not _are_ids(ids, ids.count(b",") + (len(ids) > 2)):
        raise AnswerUntrue("an event's token_ids are not a list of integers")
    return ids


# ------------------------------------------------------------------------------------------
# Adds the missing spelling of a token to the log-probabilities of /inference/v1/generate.
#
# vLLM wrote `"token":"token_id:5"`, and writes `"token_id":5` in 0.32 (its pull requests 57574 and
# 58181). Clients need one or the other: renderers 0.1.12 raises an error without the name. The
# missing field is written next to the existing one, without decoding. An answer with both, or with
# another `token`, stays unchanged.
#
# Decoding an answer for this costs more than twice as much. It is done before partial answers are
# joined, because two instances may run two versions of vLLM.

#: A quote within a text is escaped, so these always match keys. The first is vLLM's own spelling.
_IDS = (re.compile(rb'"token_id":(\d+)'), re.compile(rb'"token_id"\s*:\s*(\d+)'))
_NAMES = (re.compile(rb'"token"\s*:\s*"token_id:(\d+)"'),)


def both_spellings(data: bytes) -> bytes:
    """`data` is a whole answer, or whole events of a stream.

    Costs 0.2 microseconds per named token and per candidate; without log-probs, one search.
    """
    if data.find(b'"logprob"') < 0:
        return data
    has_id, has_name = data.find(b'"token_id"') >= 0, data.find(b'"token"') >= 0
    if has_id != has_name:
        for pattern in _IDS if has_id else _NAMES:
            pieces = pattern.split(data)
            if len(pieces) > 1:
                return _told_twice(pieces)
    return data


def _told_twice(pieces: list[bytes]) -> bytes:
    """`pieces` alternates between other text and ids. Uses slices to avoid a loop over tokens."""
    ids = pieces[1::2]
    parts = [b""] * (5 * len(ids) + 1)
    parts[0::5] = pieces[0::2]
    parts[1::5] = [b'"token":"token_id:'] * len(ids)
    parts[2::5] = ids
    parts[3::5] = [b'","token_id":'] * len(ids)
    parts[4::5] = ids
    return b"".join(parts)
