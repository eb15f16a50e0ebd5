"""The work of a training step that begins before its batch is whole, on any share of the GPUs."""

from __future__ import annotations


class PartTraining:
    """Work in seconds (the time on all GPUs) that arrives in parts and is done as it arrives.

    Gradients accumulate, so the order of the parts and their boundaries do not matter.

    share  of the GPUs that trains at the beginning
    """

    __slots__ = ("_done_s", "_share", "_since", "_work_s")

    def __init__(self, share: float) -> None:
        self._work_s = 0.0
        self._done_s = 0.0
        self._share = share
        self._since = 0.0

    def add(self, seconds: float, now: float) -> None:
        """More work has arrived."""
        self._settle(now)
        self._work_s += seconds

    def set_share(self, share: float, now: float) -> None:
        """This share of the GPUs trains from now on."""
        self._settle(now)
        self._share = share

    def left_s(self, now: float) -> float:
        """The work left of all that has arrived, in seconds on all GPUs."""
        self._settle(now)
        return self._work_s - self._done_s

    def _settle(self, now: float) -> None:
        self._done_s = min(self._work_s, self._done_s + (now - self._since) * self._share)
        self._since = now
