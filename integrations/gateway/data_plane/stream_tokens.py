"""The tokens that a stream has brought, counted as cheaply as can be.

Of what passes to the client nothing is kept but the token ids, as they stand in the events, to go
on from. Where an event brings none it is taken for one token, and nobody can go on from that.
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

#: Packets that are counted together, which costs little more than one. Streams that began together
#: count at different times, for none of them goes on while one counts.
READ_TOGETHER = 32


class StreamTokens:
    """Of one attempt, whose number spreads the counting.

    ids     "1,2,3," as they stood in the events
    events  that brought no ids: a token each
    unread  what was passed on, but not counted yet
    """

    __slots__ = ("_until", "events", "ids", "unread")

    def __init__(self, attempt: int) -> None:
        self.ids = bytearray()
        self.events = 0
        self.unread: list[bytes] = []
        self._until = 1 + attempt % READ_TOGETHER  # packets until the next count

    @property
    def count(self) -> int:
        """Of what has been read."""
        return self.ids.count(b",") if self.ids else self.events

    @property
    def arrived(self) -> bool:
        """Whether it has brought some, read or unread."""
        return self.count > 0 or bool(self.unread)

    def to_go_on_from(self) -> list[int]:
        """The ids of what has been read."""
        ids: list[int] = msgspec.json.decode(b"[" + self.ids[:-1] + b"]")
        return ids

    def add(self, ids: bytes, *, speaks: bool) -> None:
        """An event that was read: its ids as "1,2", and whether it brings anything else."""
        if ids:
            self.ids += ids + b","
        elif speaks:
            self.events += 1

    def add_unread(self, data: bytes) -> None:
        """Whole events."""
        unread = self.unread
        unread.append(data)
        if len(unread) >= self._until:
            self._until = READ_TOGETHER
            self.read_up()

    def read_up(self) -> None:
        """Count what is unread."""
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
            self.events += found  # what are no ids is nothing to go on from
        elif ids:
            self.ids += ids + b","

    def _read(self, data: bytes) -> None:
        """An event that brings no ids may yet bring text, of which they would be missing."""
        for event in data_of_each(data):
            try:
                choices = read_event(event).choices
                choice = choices[0] if choices else None
                if choice is not None:
                    self.add(choice.ids, speaks=choice.speaks)
            except InstanceError:
                self.events += 1
