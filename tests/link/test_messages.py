"""Frames are read back as they were written, and anything else is refused."""

from __future__ import annotations

import msgspec
import pytest

from rollout_sched.core.model.actions import Answer, Discard, Dispatch, Interrupt
from rollout_sched.core.model.events import RequestFinished, RequestSubmitted, TokensArrived
from rollout_sched.core.model.model import DeliveredSample, Segment
from rollout_sched.link.protocol import (
    ContinueAttempt,
    Orders,
    PieceMade,
    Relinquished,
    Reports,
    Streamed,
    TakeGroup,
    encode,
    read_orders,
    read_reports,
)

DISPATCH = Dispatch("g/0", 3, "i0", 10, 20, 1, 4, draft=((0, 4),))


def test_orders() -> None:
    sample = DeliveredSample("r", "r", 0, 3, 2, (Segment(1, 2, "i0"),), 0, "stop")
    piece = PieceMade("g/0", 2, b"\x00\x01", (-0.5,))
    frame = Orders(
        "run",
        3,
        [
            DISPATCH,
            Interrupt("g/0", 3, "i0"),
            Discard("g/0", 4, "rejected", group="g"),
            Answer(sample),
            ContinueAttempt(3, DISPATCH),
            ContinueAttempt(3, None),
            TakeGroup("g", b"recipe", (piece,)),
        ],
    )
    assert read_orders(encode(frame)) == frame


def test_reports() -> None:
    frame = Reports(
        "run",
        3,
        [
            RequestSubmitted("r", "r", 3, 9),
            TokensArrived("r", 1, 2),
            Streamed("g/0", 2, 0, b""),
            PieceMade("g/0", 2, b"", start=2),
            RequestFinished("g/0", 2, 2, ((1, 2),), "length"),
            Relinquished("i0"),
        ],
    )
    assert read_reports(encode(frame)) == frame


@pytest.mark.parametrize("frame", [b"", b"\xc1", encode(Orders("run", 1, [DISPATCH]))])
def test_what_is_no_report(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_reports(frame)


def test_an_event_carries_no_tokens() -> None:
    """About a hundred bytes for each event, however many tokens were generated."""
    frame = encode(
        Reports("run", 1, [RequestFinished("run.f0.1234567", 1234567, 4096, ((1, 4096),))])
    )
    assert len(frame) < 120
