"""Frames are read back as they were written, and anything else is refused."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rollout_sched.core.model.actions import Answer, Discard, Dispatch, Interrupt
from rollout_sched.core.model.events import RequestFinished, RequestSubmitted, TokensArrived
from rollout_sched.core.model.model import DeliveredSample, Segment
from rollout_sched.link.protocol import (
    Accepted,
    FrameMissing,
    FrameSequence,
    InstanceReleased,
    Orders,
    Outbox,
    PieceMade,
    Reports,
    Streamed,
    TakeGroup,
    encode,
    read_accepted,
    read_orders,
    read_reports,
)
from rollout_sched.live.settings import Settings
from rollout_sched.live.trainer.samples import Prompt

DISPATCH = Dispatch("g/0", 3, "i0", 10, 20, 1, 4)


def test_orders() -> None:
    sample = DeliveredSample("r", "r", 0, 3, 2, (Segment(1, 2, "i0"),), 0, "stop")
    piece = PieceMade("g/0", 2, b"\x00\x01")
    frame = Orders(
        "run",
        3,
        [
            DISPATCH,
            Interrupt("g/0", 3, "i0"),
            Discard("g/0", 4, "stale", group="g"),
            Answer(sample),
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
            InstanceReleased("i0"),
        ],
    )
    assert read_reports(encode(frame)) == frame


@pytest.mark.parametrize("frame", [b"", b"\xc1", encode(Orders("run", 1, [DISPATCH]))])
def test_malformed_report_is_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_reports(frame)


def test_an_event_carries_no_tokens() -> None:
    """About a hundred bytes for each event, however many tokens were generated."""
    frame = encode(
        Reports("run", 1, [RequestFinished("run.f0.1234567", 1234567, 4096, ((1, 4096),))])
    )
    assert len(frame) < 120


WELCOME = Accepted("run", Settings(stream_s=0.5), True, 8)


def test_a_welcome_is_read_as_it_was_written() -> None:
    assert read_accepted(encode(WELCOME)) == WELCOME


@pytest.mark.parametrize("frame", [b"", b"\xc1", encode(Prompt("a", [1], 1, 9))])
def test_malformed_welcome_is_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_accepted(frame)


def test_samples_are_made_of_their_prompt() -> None:
    prompt = Prompt("a", [4, 5], 2, 9, sampling={"temperature": 0.5, "seed": 3})
    payload = WELCOME.factory(encode(prompt))(1)
    assert payload.prompt_ids == [4, 5]
    assert payload.stream_every == 8
    assert payload.sampling == prompt.sampling_of(1)


def test_malformed_prompt_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        WELCOME.factory(b"\xc1")


def test_frames_are_admitted_in_order_and_once() -> None:
    frames = FrameSequence("now")
    assert frames.admits(Orders("now", 1, []))
    assert frames.admits(Reports("now", 2, []))
    assert not frames.admits(Reports("now", 2, []))
    assert not frames.admits(Orders("now", 1, []))
    assert not frames.admits(Orders("now", -1, []))
    assert frames.refused == 3
    assert frames.admits(Orders("now", 3, []))


def test_frames_of_another_epoch_are_refused() -> None:
    frames = FrameSequence("now")
    for number in (0, 1, 7):
        assert not frames.admits(Orders("before", number, []))
    assert frames.refused == 3
    assert frames.admits(Orders("now", 1, []))


def test_missing_frame_is_an_error() -> None:
    frames = FrameSequence("now")
    with pytest.raises(FrameMissing, match="frames: 2 came after 0"):
        frames.admits(Orders("now", 2, []))
    assert frames.admits(Orders("now", 1, []))


async def test_one_frame_a_turn_in_order_and_none_after_the_end() -> None:
    sent: list[bytes] = []
    outbox = Outbox(Orders, "now", sent.append)
    one, two, three = (Interrupt("r", number, "i0") for number in (1, 2, 3))
    outbox.put(one)
    outbox.put(two)
    assert sent == []
    await asyncio.sleep(0)
    outbox.put(three)
    await asyncio.sleep(0)
    frames = [Orders("now", 1, [one, two]), Orders("now", 2, [three])]
    assert [read_orders(frame) for frame in sent] == frames
    outbox.put(one)
    outbox.close()
    await asyncio.sleep(0)
    assert len(sent) == 2
