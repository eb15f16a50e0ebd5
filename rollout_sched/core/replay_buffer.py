"""The replay buffer: interrupted requests that wait to go on, with the tokens they have."""

from __future__ import annotations

from collections.abc import Iterator

from rollout_sched.core.lifecycle import PARKED
from rollout_sched.core.model import Group, Request


class ReplayBuffer:
    """Parked requests in the order they came; they leave group by group (Kimi k1.5, 2.6.2)."""

    def __init__(self) -> None:
        self._parked: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._parked)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._parked.values())

    def __contains__(self, request: Request) -> bool:
        return request.id in self._parked

    def add(self, request: Request) -> None:
        self._parked[request.id] = request

    def remove(self, request: Request) -> None:
        del self._parked[request.id]

    def discard(self, request: Request) -> None:
        """Remove it if it is here."""
        self._parked.pop(request.id, None)

    def of(self, group: Group) -> list[Request]:
        """The parked requests of one group."""
        return [r for r in group.requests if r.state is PARKED]
