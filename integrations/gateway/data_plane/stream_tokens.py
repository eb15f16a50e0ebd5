"""Counts the tokens of a stream as cheaply as possible.

Of the events passed to the client only the token ids are kept, as they are written there, to resume
from. An event without ids counts as one token, and a stream with such an event cannot be resumed.
"""

from __future__ import annotations

import re

import msgspec

from rollout_sched.integrations.gateway.data_plane.answers import read_event
from rollout_sched.integrations.vllm.protocol.event_stream import data_of_each
from rollout_sched.live.ports import InstanceError

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

    @property
    def arrived(self) -> bool:
        """Whether there are tokens, read or unread."""
        return self.count > 0 or bool(self.unread)

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
