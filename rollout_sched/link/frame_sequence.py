"""Decides whether a frame of a link is handled: by its epoch, and whether it is the next one."""

from __future__ import annotations

from rollout_sched.core.errors import RolloutError
from rollout_sched.link.messages import Orders, Reports


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
