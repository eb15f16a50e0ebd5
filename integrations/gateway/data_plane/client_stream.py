"""The single stream that a client receives, from all attempts of its request."""

from __future__ import annotations

from typing import Any

from rollout_sched.integrations.gateway.data_plane import dialects
from rollout_sched.integrations.gateway.data_plane.answers import Event, EventChoice
from rollout_sched.integrations.gateway.data_plane.call import Reply, Write
from rollout_sched.integrations.gateway.data_plane.token_names import both_spellings
from rollout_sched.integrations.vllm.protocol.endpoints import Endpoint

EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")


class ClientStream:
    """What the client has received.

    prompt_ids  the prompt's token ids, as an instance sent them
    envelope    the fields of the first event that describe the response; None before it
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
        """Send whole events."""
        if self.endpoint == "generate":
            events = both_spellings(events)
        write = self._write
        if write is None:
            write = self._write = self.reply.begin([EVENT_STREAM])
        write(events)

    def learn(self, event: Event, choice: EventChoice | None) -> None:
        """Keep what the first event says about the response: all later events repeat it, whichever
        instance sends them."""
        if self.envelope is None:
            said = dialects.envelope(self.endpoint, "event")
            for name in said:
                value = getattr(event, name)
                if value is not None:
                    said[name] = value
            self.envelope = said
        if not self.prompt_ids:
            self.prompt_ids = event.prompt_ids or (b"" if choice is None else choice.prompt_ids)
