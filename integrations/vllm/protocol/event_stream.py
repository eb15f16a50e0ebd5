"""Parses server-sent events: `data: ...` lines, separated by empty lines, cut anywhere."""

from __future__ import annotations

from collections.abc import Iterator

from rollout_sched.live.ports import InstanceError

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
