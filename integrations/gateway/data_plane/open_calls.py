"""The open calls of clients, counted against the limits."""

from __future__ import annotations

from typing import Protocol

from rollout_sched.integrations.gateway.data_plane.fields import BadRequest
from rollout_sched.integrations.gateway.data_plane.limits import Limits
from rollout_sched.integrations.gateway.data_plane.pacer import Pacer
from rollout_sched.integrations.gateway.data_plane.responses import Responses


class Unavailable(Exception):
    """The call cannot be accepted at present; the text says why."""


class OpenReply(Protocol):
    """Where the answer to an open call goes."""

    def fail(self, status: int, text: str) -> None: ...


class OpenCalls:
    """The open calls.

    requests    responses that clients wait for
    body_bytes  bytes of the bodies that are sent to instances for them
    replies     where their answers go, in order of arrival
    pacer       decides which work runs first
    responses   how ended calls ended
    """

    def __init__(self, limits: Limits, responses: Responses | None = None) -> None:
        self.limits = limits
        self.requests = 0
        self.body_bytes = 0
        self.replies: dict[OpenReply, None] = {}
        self.pacer = Pacer()
        self.responses = responses or Responses()

    def enter(self, reply: OpenReply, count: int, body_bytes: int) -> None:
        """Count a call of `count` responses and `body_bytes` bytes."""
        self.replies[reply] = None
        self.requests += count
        self.body_bytes += body_bytes

    def leave(self, reply: OpenReply, count: int, body_bytes: int) -> None:
        self.replies.pop(reply, None)
        self.requests -= count
        self.body_bytes -= body_bytes

    def check_room(self, count: int, body_bytes: int) -> None:
        """Raises Unavailable if a call of this size does not fit now, BadRequest if it never
        can."""
        limits = self.limits
        if body_bytes > limits.body_bytes:
            raise BadRequest(
                f"the bodies of the call's {count} responses have {body_bytes} bytes, the limit "
                f"for all bodies is {limits.body_bytes}; ask for fewer responses in one call",
                413,
            )
        if self.requests + count > limits.requests:
            raise Unavailable(
                f"too many requests: {self.requests} responses are pending, the limit is "
                f"{limits.requests}, the call asks for {count}"
            )
        if self.body_bytes + body_bytes > limits.body_bytes:
            raise Unavailable(
                f"too many bytes: pending bodies have {self.body_bytes}, the limit is "
                f"{limits.body_bytes}, the call has {body_bytes}"
            )
