"""Counts the bytes of request bodies in memory, over all connections of a server."""

from __future__ import annotations

from rollout_sched.integrations.http.errors import Malformed


class BodyBudget:
    """`used` bytes of at most `most`, of bodies that are being read or processed.

    Code that keeps bytes of a body adds them to `used` and subtracts them afterwards. `refused`
    counts the bodies for which there was no room.
    """

    __slots__ = ("most", "refused", "used")

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self.refused = 0

    def full(self) -> Malformed:
        """Count a refused body; returns the error for it."""
        self.refused += 1
        return Malformed(f"{self.used} bytes of request bodies are in memory", status=503)
