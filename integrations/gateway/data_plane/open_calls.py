"""The calls that clients wait for, counted against what may be here at once."""

from __future__ import annotations

from typing import Protocol

from rollout_sched.integrations.gateway.data_plane.fields import BadRequest
from rollout_sched.integrations.gateway.data_plane.limits import Limits
from rollout_sched.integrations.gateway.data_plane.pacer import Pacer
from rollout_sched.integrations.gateway.data_plane.responses import Responses


class NotNow(Exception):
    """The call cannot be taken at present; the text says why."""


class OpenReply(Protocol):
    """Where the answer to an open call goes."""

    def fail(self, status: int, text: str) -> None: ...


class OpenCalls:
    """Who is here.

    requests    responses that clients wait for
    body_bytes  of the bodies that go to instances for them
    replies     where their answers go, in the order in which they came
    pacer       who of them goes first
    responses   how those ended that are over
    """

    def __init__(self, limits: Limits, responses: Responses | None = None) -> None:
        self.limits = limits
        self.requests = 0
        self.body_bytes = 0
        self.replies: dict[OpenReply, None] = {}
        self.pacer = Pacer()
        self.responses = responses or Responses()

    def enter(self, reply: OpenReply, count: int, body_bytes: int) -> None:
        """A call of so many responses and bytes."""
        self.replies[reply] = None
        self.requests += count
        self.body_bytes += body_bytes

    def leave(self, reply: OpenReply, count: int, body_bytes: int) -> None:
        self.replies.pop(reply, None)
        self.requests -= count
        self.body_bytes -= body_bytes

    def check_room(self, count: int, body_bytes: int) -> None:
        """Raises NotNow if a call of so many responses and bytes cannot be taken at present."""
        limits = self.limits
        if body_bytes > limits.body_bytes:
            raise BadRequest(
                f"the bodies of the call's {count} responses come to {body_bytes} bytes, and all "
                f"bodies here may have {limits.body_bytes}; ask for fewer responses in one call",
                413,
            )
        if self.requests + count > limits.requests:
            raise NotNow(
                f"{self.requests} responses are waited for here, of at most "
                f"{limits.requests}, and the call asks for {count}"
            )
        if self.body_bytes + body_bytes > limits.body_bytes:
            raise NotNow(
                f"bodies of {self.body_bytes} bytes are here, of at most {limits.body_bytes}, and "
                f"the call has {body_bytes}"
            )
