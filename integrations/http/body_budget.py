"""How many bytes of request bodies are here, over all connections of a server."""

from __future__ import annotations

from rollout_sched.integrations.http.errors import Malformed


class BodyBudget:
    """`used` of at most `most` bytes, being read or being worked on.

    Whoever keeps bytes of a body adds them to `used` and takes them off again. `refused` counts the
    bodies for which there was no room.
    """

    __slots__ = ("most", "refused", "used")

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self.refused = 0

    def full(self) -> Malformed:
        """Why a body is turned away that there is no room for."""
        self.refused += 1
        return Malformed(f"{self.used} bytes of bodies are here already", status=503)
