"""The messages between a front and its scheduler: events one way, orders the other, in frames.

A frame holds all messages of one turn of an event loop, in order, and the scheduler's epoch: a
frame of another epoch, or a repeated one, is refused. Events and actions carry no tokens; the
tokens of groups are sent separately (`PieceMade`), before the event that counts them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from rollout_sched.core.errors import RolloutError
from rollout_sched.core.model.actions import Answer, Discard, Dispatch, Interrupt
from rollout_sched.core.model.events import (
    OfRequest,
    RequestSubmitted,
    RequestWithdrawn,
    SessionEnded,
)
from rollout_sched.core.model.records import Count, Serial
from rollout_sched.live import Settings
from rollout_sched.live.ports import Suspicion
from rollout_sched.live.requests import PayloadFactory
from rollout_sched.live.trainer import SamplePayloads
from rollout_sched.live.trainer.samples import Prompt


class _Message(msgspec.Struct, frozen=True, gc=False, tag=True):
    pass


# -- from the scheduler ----------------------------------------------------------------------


class CallTool(_Message, frozen=True):
    """The answer to a TurnFinished: call the tool."""

    request: str
    attempt: Serial


class StopAttempt(_Message, frozen=True):
    """Stop an attempt for a reason of the scheduler's host, not of its policy."""

    attempt: Serial
    reason: str


class RejectStreamed(_Message, frozen=True):
    """Fail an attempt if its stream has brought tokens: they may be of unknown weights."""

    attempt: Serial


class Lose(_Message, frozen=True):
    """An instance is gone: report its streamed tokens, and then InstanceReleased."""

    instance: str


class PieceMade(_Message, frozen=True):
    """The tokens of an attempt of a group's request, encoded by `store.transaction`, from token
    `start` on: those before it were Streamed."""

    request: str
    attempt: Serial
    tokens: bytes
    start: Count = 0


class Streamed(_Message, frozen=True):
    """The streamed tokens of an attempt of a group's request from token `start` on, as
    `store.transaction` encodes them; sent before the TokensArrived that counts them."""

    request: str
    attempt: Serial
    start: Count
    tokens: bytes


class TakeGroup(_Message, frozen=True):
    """The front that gets this now owns a group's requests. `spec`: what their payloads are made
    from; `pieces`: the tokens that were made elsewhere."""

    group: str
    spec: bytes
    pieces: tuple[PieceMade, ...] = ()


class ReleaseGroup(_Message, frozen=True):
    """A group is over: delivered, failed, or not accepted; `requests`: those that the front still
    holds."""

    group: str
    requests: tuple[str, ...] = ()


class RejectRequest(_Message, frozen=True):
    """The scheduler has refused a request that this front submitted."""

    request: str
    reason: str


class ConnectInstance(_Message, frozen=True):
    """An instance has joined, perhaps again; sent before the first Dispatch to it, so that the
    front detects its capabilities. `key`: its API key; "": as in the front's own settings."""

    instance: str
    key: str


class DisconnectInstance(_Message, frozen=True):
    """A reached instance is gone; nothing is sent to it until another ConnectInstance."""

    instance: str


class InstanceVersion(_Message, frozen=True):
    """The version of an instance's weights; sent before the first Dispatch under it."""

    instance: str
    version: Serial


class FleetChanged(_Message, frozen=True):
    """Tokens of prompt and response that some instance takes; 0 without instances."""

    max_model_len: Count


Order = (
    Dispatch
    | Interrupt
    | Answer
    | Discard
    | CallTool
    | StopAttempt
    | RejectStreamed
    | Lose
    | TakeGroup
    | ReleaseGroup
    | RejectRequest
    | FleetChanged
    | ConnectInstance
    | DisconnectInstance
    | InstanceVersion
)

# -- from a front ----------------------------------------------------------------------------


class InstanceSuspected(_Message, frozen=True):
    """An attempt has failed in a way that suggests something about its instance."""

    instance: str
    of: Suspicion


class InstanceReleased(_Message, frozen=True):
    """The answer to Lose: there are no more reports about attempts on the instance."""

    instance: str


Report = (
    RequestSubmitted
    | RequestWithdrawn
    | SessionEnded
    | OfRequest
    | PieceMade
    | Streamed
    | InstanceSuspected
    | InstanceReleased
)

# -- frames ----------------------------------------------------------------------------------


class Orders(msgspec.Struct, frozen=True, array_like=True):
    """`number` counts the frames of a connection in this direction, from 1."""

    epoch: str
    number: Serial
    orders: list[Order]


class Reports(msgspec.Struct, frozen=True, array_like=True):
    """`number`: as in `Orders`."""

    epoch: str
    number: Serial
    reports: list[Report]


# ------------------------------------------------------------------------------------------
# Specs: what the scheduler's process sends so that a front can make the samples of a group.


class Accepted(msgspec.Struct, frozen=True):
    """The answer to a front that connects.

    epoch         of the scheduler
    settings      of its driver, also used by the front
    keeps_partial whether the tokens of an interrupted response are kept
    stream_every  tokens between partial results of an instance
    """

    epoch: str
    settings: Settings
    keeps_partial: bool
    stream_every: Count

    def factory(self, spec: bytes) -> PayloadFactory:
        """The factory of a group's payloads. Raises msgspec.DecodeError."""
        prompt = msgspec.msgpack.decode(spec, type=Prompt)
        return partial(SamplePayloads(self.stream_every, lambda: 0).new, prompt)


#: Every message and spec as bytes; to read them raises msgspec.DecodeError.
encode: Final = msgspec.msgpack.Encoder().encode
read_orders: Final = msgspec.msgpack.Decoder(Orders).decode
read_reports: Final = msgspec.msgpack.Decoder(Reports).decode
read_accepted: Final = msgspec.msgpack.Decoder(Accepted).decode


class Outbox:
    """Sends messages in the order of `put`, in one frame per turn of the event loop; sends nothing
    after `close`. Events go one way and orders the other, about a hundred bytes each."""

    def __init__(
        self, frame: type[Orders] | type[Reports], epoch: str, send: Callable[[bytes], None]
    ) -> None:
        self._frame: Callable[[str, int, list[Any]], Orders | Reports] = frame
        self._epoch = epoch
        self._send = send
        self._sent = 0
        self._loop = asyncio.get_running_loop()
        self._messages: list[Any] = []
        self._closed = False

    def put(self, message: Order | Report) -> None:
        if not self._messages:
            self._loop.call_soon(self._flush)
        self._messages.append(message)

    def _flush(self) -> None:
        messages, self._messages = self._messages, []
        if not self._closed:
            self._sent += 1
            self._send(encode(self._frame(self._epoch, self._sent, messages)))

    def close(self) -> None:
        self._closed = True


# ------------------------------------------------------------------------------------------
# Decides whether a frame of a link is handled: by its epoch, and whether it is the next one.


class FrameMissing(RolloutError, RuntimeError):
    """The link has lost a frame: the peers must reconnect and send everything again."""


class FrameSequence:
    """The frames received over one connection. `refused`: number of frames of another epoch of the
    scheduler, and of repeated frames."""

    def __init__(self, epoch: str) -> None:
        self.refused = 0
        self._epoch = epoch
        self._last = 0

    def admits(self, frame: Orders | Reports) -> bool:
        """Whether to handle the frame. Raises FrameMissing if a frame before it never came."""
        if frame.epoch != self._epoch or frame.number <= self._last:
            self.refused += 1
            return False
        if frame.number > self._last + 1:
            raise FrameMissing(f"a link lost frames: {frame.number} came after {self._last}")
        self._last = frame.number
        return True
