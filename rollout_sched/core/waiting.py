"""The waiting queue: requests that may be dispatched, in the order the ordering role gives."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from sortedcontainers import SortedKeyList

from rollout_sched.core.model import Request


class WaitingQueue:
    """Requests sorted by (ordering key, serial): O(log n) to add, move and remove."""

    def __init__(self) -> None:
        self._requests: Any = SortedKeyList(key=attrgetter("rank"))

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def first(self) -> Request:
        request: Request = self._requests[0]
        return request

    def pop_first(self) -> None:
        self._requests.pop(0)

    def add(self, request: Request, key: Any) -> None:
        request.rank = (key, request.serial)
        self._requests.add(request)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def rerank(self, request: Request, key: Any) -> None:
        """Move a request whose key has changed."""
        if request.rank[0] != key:
            self._requests.remove(request)
            self.add(request, key)
