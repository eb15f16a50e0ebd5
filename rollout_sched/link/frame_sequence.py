"""What makes a frame of a link one to act on: its epoch, and that it is the next."""

from __future__ import annotations

from rollout_sched.core.errors import RolloutError
from rollout_sched.link.messages import Orders, Reports


class FrameMissing(RolloutError, RuntimeError):
    """The link has lost a frame: only another connection helps, over which all is told again."""


class FrameSequence:
    """Of what comes over one connection. `refused`: frames of another epoch of the scheduler, and
    those that have come before."""

    def __init__(self, epoch: str) -> None:
        self.refused = 0
        self._epoch = epoch
        self._last = 0

    def admits(self, frame: Orders | Reports) -> bool:
        """Whether it is to be acted on. Raises FrameMissing where one before it never came."""
        if frame.epoch != self._epoch or frame.number <= self._last:
            self.refused += 1
            return False
        if frame.number > self._last + 1:
            raise FrameMissing(f"frame {frame.number} of a link came after {self._last}")
        self._last = frame.number
        return True
