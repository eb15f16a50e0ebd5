"""Each frame is handled once and in order."""

from __future__ import annotations

import pytest

from rollout_sched.link.protocol import FrameMissing, FrameSequence, Orders, Reports


def test_one_after_the_other_and_each_once() -> None:
    frames = FrameSequence("now")
    assert frames.admits(Orders("now", 1, []))
    assert frames.admits(Reports("now", 2, []))
    assert not frames.admits(Reports("now", 2, []))
    assert not frames.admits(Orders("now", 1, []))
    assert not frames.admits(Orders("now", -1, []))
    assert frames.refused == 3
    assert frames.admits(Orders("now", 3, []))


def test_of_another_epoch_whatever_its_number() -> None:
    frames = FrameSequence("now")
    for number in (0, 1, 7):
        assert not frames.admits(Orders("before", number, []))
    assert frames.refused == 3
    assert frames.admits(Orders("now", 1, []))


def test_one_that_is_missing() -> None:
    frames = FrameSequence("now")
    with pytest.raises(FrameMissing, match="frames: 2 came after 0"):
        frames.admits(Orders("now", 2, []))
    assert frames.admits(Orders("now", 1, []))
