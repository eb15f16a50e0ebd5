"""Reads and validates vLLM's answers, whole or as events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Literal, TypeVar

import msgspec

from rollout_sched.core.model.events import Spans
from rollout_sched.core.model.records import Count
from rollout_sched.integrations.vllm.protocol.refusals import says_paused
from rollout_sched.live.ports import (
    AnswerUntrue,
    EnginePaused,
    InstanceError,
    WeightsUnknown,
    printable,
)

_T = TypeVar("_T")

#: Why an answer ended, in the scheduler's words.
Finish = Literal["stop", "length", "abort"]

_NO_STOP: dict[str, Finish] = {"length": "length", "abort": "abort"}

#: The weight label of a server that was not given another.
LABEL_OF_A_START = "default"
_LONGEST_LABEL = 15  # digits of a version; all such numbers are a `Serial`

_NULL = msgspec.Raw(b"null")


#: Of a token: finite (vLLM sends -9999 for -inf), and above 0 by rounding at most. A server started
#: with `--logprobs-mode raw_logits` or `processed_logits` sends something else.
Logprob = Annotated[float, msgspec.Meta(ge=-3.5e38, le=1e-3)]


class VersionSpan(msgspec.Struct):
    """Tokens `start` to `end` (exclusive) of an answer were made under the label `version`."""

    version: str
    start: Count
    end: Count


class _Failure(msgspec.Struct):
    error: msgspec.Raw = _NULL


_failure = msgspec.json.Decoder(_Failure)


def decoded(decode: Callable[[bytes], _T], data: bytes) -> _T:
    """An answer or an event, decoded by `decode`; it must be JSON in UTF-8 to the last byte.

    Raises AnswerUntrue if it is something else, InstanceError if it is the body of an error, as in
    a stream whose engine has died.
    """
    try:
        if not data.isascii():
            data.decode()  # the decoder does not check skipped texts
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if _says_failure(data):
            raise failure(data) from None
        text, why = data[:80].decode(errors="replace"), f"the answer is not valid ({error})"
        raise AnswerUntrue(f"{why}: {printable(text)!r}", unquoted=why) from None


def failure(data: bytes) -> InstanceError:
    """An error in place of an answer; tokens that were streamed before it stay valid."""
    if says_paused(data):
        return EnginePaused("it is paused")
    said = data[:200].decode(errors="replace")
    return InstanceError(f"it broke off: {said}", unquoted="it broke off with an error")


def _says_failure(data: bytes) -> bool:
    try:
        return _failure.decode(data).error != _NULL
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def finish_of(reason: str) -> Finish:
    """vLLM's finish_reason in the scheduler's words. Raises InstanceError for "error".

    "repetition" and "tool_calls" were added to vLLM, and more may follow. Each of them is a reason
    for which a response is complete, so an unknown one counts as "stop".
    """
    if reason == "error":
        raise InstanceError(
            "the instance failed in the middle of the answer: finish_reason 'error'"
        )
    return _NO_STOP.get(reason, "stop")


def version_of(label: object) -> int | None:
    """The policy version of a weight label; None for labels of other kinds ("default")."""
    if isinstance(label, str) and label.isascii() and label.isdigit():
        return int(label) if len(label) <= _LONGEST_LABEL else None
    return None


def spans_of(
    versions: Sequence[VersionSpan] | None, tokens: int, *, labelled: bool = False
) -> Spans:
    """(version, tokens) of an answer of `tokens` tokens, from its `weight_versions`; empty if there
    are none, or if any label is not a version.

    Raises AnswerUntrue if the spans do not cover the tokens without gap or overlap. `labelled`: the
    instance had been given a label before the request; raises WeightsUnknown if a span has the
    initial label.
    """
    if not versions:
        return ()
    bounds = [0, *(span.end for span in versions)]
    starts = [span.start for span in versions]
    if starts != bounds[:-1] or bounds[-1] != tokens or any(a >= b for a, b in pairwise(bounds)):
        places = [(span.start, span.end) for span in versions]  # the labels may say anything
        raise AnswerUntrue(f"weight_versions of {places} do not cover its {tokens} tokens")
    spans: list[tuple[int, int]] = []
    for span in versions:
        version = version_of(span.version)
        if version is None:
            if labelled and any(span.version == LABEL_OF_A_START for span in versions):
                raise WeightsUnknown(
                    f"its tokens have the label {LABEL_OF_A_START!r}, which it has only until it "
                    "is given another: it was restarted, and made them with its initial weights"
                )
            return ()
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + span.end - span.start)
        else:
            spans.append((version, span.end - span.start))
    return tuple(spans)


# ------------------------------------------------------------------------------------------
# Parses server-sent events: `data: ...` lines, separated by empty lines, cut anywhere.

#: Most bytes of one event; a chunk of a thousand tokens with log-probs has 0.2 MiB.
LONGEST_EVENT = 64 * 2**20

DONE = b"[DONE]"


class WholeEvents:
    """Buffers the event that is not complete yet; every byte is examined once."""

    def __init__(self) -> None:
        self.rest = bytearray()
        self._after_cr = False

    def feed(self, data: bytes) -> bytes:
        """The events that are now complete, each with its empty line, all line ends "\\n".

        Raises InstanceError for an event that does not end.
        """
        data = self._with_newlines(data)
        rest = self.rest
        known = max(0, len(rest) - 1)  # its last byte may be the first of an event's two line ends
        rest += data
        end = rest.rfind(b"\n\n", known) + 2
        whole = b""
        if end >= 2:
            whole = bytes(rest[:end])
            del rest[:end]
        if len(rest) > LONGEST_EVENT:
            raise InstanceError(f"it streamed an event of more than {LONGEST_EVENT} bytes")
        return whole

    def _with_newlines(self, data: bytes) -> bytes:
        """CRLF and CR also end lines; in JSON they occur nowhere else."""
        if self._after_cr:
            self._after_cr = False
            data = data.removeprefix(b"\n")
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return data


def data_of(event: bytes) -> bytes:
    """The data of an event, on one line; b"" if it has none, such as a comment."""
    if b"\n" not in event:
        return event[5:].strip() if event.startswith(b"data:") else b""
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b" ".join(lines)  # a line break in JSON is only white space


def data_of_each(events: bytes) -> list[bytes]:
    """The data of whole events, without those that have none."""
    told = [data_of(event) for event in events.split(b"\n\n")]
    return [data for data in told if data]


# Not `event`: CPython 3.11 calls methods of a local more slowly if an import has the same name.
def as_event(data: bytes) -> bytes:
    """An event with this data, which is on one line."""
    return b"data: %b\n\n" % data


class EventStream:
    """Takes bytes as they arrive, and returns the data of whole events, up to `[DONE]`."""

    def __init__(self) -> None:
        self._events = WholeEvents()
        self._done = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Raises InstanceError for an event that does not end."""
        for event_data in data_of_each(self._events.feed(data)):
            self._done = self._done or event_data == DONE
            if not self._done:
                yield event_data
