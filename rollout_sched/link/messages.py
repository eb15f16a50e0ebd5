"""What a front and its scheduler say to each other: events one way, orders the other, in frames.

A frame holds all that was said in a turn of an event loop, in order, and the epoch of the scheduler
that it is from or for: what is of another epoch, or comes twice, is refused. Events and actions
carry no tokens; those of groups travel beside them (`PieceMade`), ahead of the event that counts
them.
"""

from __future__ import annotations

import msgspec

from rollout_sched.core.actions import Answer, Discard, Dispatch, Interrupt
from rollout_sched.core.events import (
    PrefixVerified,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestSubmitted,
    RequestWithdrawn,
    SessionEnded,
    TokensArrived,
    ToolReturned,
    TrajectoryEnded,
    TurnFinished,
)


class _Message(msgspec.Struct, frozen=True, gc=False, tag=True):
    pass


# -- from the scheduler ----------------------------------------------------------------------


class GoesOn(_Message, frozen=True):
    """The answer to a PrefixVerified: how the attempt goes on, or None: it is to stop."""

    attempt: int
    dispatch: Dispatch | None


class Act(_Message, frozen=True):
    """The answer to a TurnFinished: a tool is wanted."""

    request: str
    attempt: int


class BreakOff(_Message, frozen=True):
    """Stop an attempt, for a reason that its scheduler's host has, not its policy."""

    attempt: int
    reason: str


class Disbelieve(_Message, frozen=True):
    """Nothing that the stream of an attempt has brought is gone on from."""

    attempt: int


class Lose(_Message, frozen=True):
    """An instance is gone: say how far its streams have come, and then Relinquished."""

    instance: str


class PieceMade(_Message, frozen=True):
    """What an attempt of a group's request has made, as `store.tokens` writes it, from token
    `start` on: those before it were Streamed. `verified`: the log-probabilities of the request's
    leading tokens, where newer weights have passed them."""

    request: str
    attempt: int
    tokens: bytes
    verified: tuple[float, ...] = ()
    start: int = 0


class Streamed(_Message, frozen=True):
    """What the stream of an attempt of a group's request has brought from token `start` on, as
    `store.tokens` writes it: ahead of the TokensArrived that counts it."""

    request: str
    attempt: int
    start: int
    tokens: bytes


class TakeGroup(_Message, frozen=True):
    """A group's requests are this front's: `recipe` says what their payloads are made from,
    `pieces` what was made of them elsewhere."""

    group: str
    recipe: bytes
    pieces: tuple[PieceMade, ...] = ()


class LetGo(_Message, frozen=True):
    """A group is over: delivered, failed, or not taken; `requests` are what is left of it here."""

    group: str
    requests: tuple[str, ...] = ()


class Refused(_Message, frozen=True):
    """A request that this front has submitted is none, and why."""

    request: str
    reason: str


class Reach(_Message, frozen=True):
    """An instance has joined, perhaps anew, before the first Dispatch there: what it offers is to
    be found out. `key` is what it is sent; "": as the front's own settings say."""

    instance: str
    key: str


class Departed(_Message, frozen=True):
    """An instance that was reached is gone; nothing is sent there, unless it is reached anew."""

    instance: str


class Serves(_Message, frozen=True):
    """The version of an instance's weights, before the first Dispatch there that it is for."""

    instance: str
    version: int


class FleetChanged(_Message, frozen=True):
    """Tokens of prompt and response that every instance takes; 0 without instances."""

    max_model_len: int


Order = (
    Dispatch
    | Interrupt
    | Answer
    | Discard
    | GoesOn
    | Act
    | BreakOff
    | Disbelieve
    | Lose
    | TakeGroup
    | LetGo
    | Refused
    | FleetChanged
    | Reach
    | Departed
    | Serves
)

# -- from a front ----------------------------------------------------------------------------


class RestartSuspected(_Message, frozen=True):
    """An attempt has failed as it would if its instance were restarted."""

    instance: str


class Relinquished(_Message, frozen=True):
    """The answer to Lose: nothing more will be said of attempts there."""

    instance: str


#: What a front says of one attempt.
OfAttempt = (
    TokensArrived
    | PrefixVerified
    | RequestFinished
    | TurnFinished
    | RequestInterrupted
    | RequestFailed
)

Report = (
    RequestSubmitted
    | RequestWithdrawn
    | SessionEnded
    | OfAttempt
    | ToolReturned
    | TrajectoryEnded
    | PieceMade
    | Streamed
    | RestartSuspected
    | Relinquished
)

# -- frames ----------------------------------------------------------------------------------


class Orders(msgspec.Struct, frozen=True, array_like=True):
    """`number` counts the frames of a connection, each way, from 1 on."""

    epoch: str
    number: int
    orders: list[Order]


class Reports(msgspec.Struct, frozen=True, array_like=True):
    """Likewise."""

    epoch: str
    number: int
    reports: list[Report]


_ENCODER = msgspec.msgpack.Encoder()
_ORDERS = msgspec.msgpack.Decoder(Orders)
_REPORTS = msgspec.msgpack.Decoder(Reports)


def encode(frame: Orders | Reports) -> bytes:
    return _ENCODER.encode(frame)


def read_orders(frame: bytes) -> Orders:
    """Raises msgspec.DecodeError."""
    return _ORDERS.decode(frame)


def read_reports(frame: bytes) -> Reports:
    """Raises msgspec.DecodeError."""
    return _REPORTS.decode(frame)
