"""The waiting queue: requests that may be dispatched, in the order the ordering role gives.

A key that grows (the request should go later) is only noted, and looked at when the request comes
to the front; until then its old place is never behind its true one, so the order is exact. That
matters when a group's first answer moves all its other members back at once. Newcomers are only
gathered until somebody looks at the front: a launch brings thousands, and sorting them together is
cheaper than looking up a place for each.

A request that fits into none of the open instances is set aside, so that it holds up nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from sortedcontainers import SortedKeyList

from rollout_sched.core.model import Request


class WaitingQueue:
    """Requests sorted by (ordering key, serial): O(log n) to add, move and remove.

    size  how many wait, those set aside included
    """

    def __init__(self) -> None:
        self._requests: Any = SortedKeyList(key=attrgetter("rank"))
        self._new: list[Request] = []
        self._later: dict[str, Any] = {}
        self._aside: dict[str, Request] = {}
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Request]:
        requests = self._sorted()
        for request in [r for r in requests if r.id in self._later]:
            requests.remove(request)
            request.rank = (self._later.pop(request.id), request.serial)
            requests.add(request)
        return iter([*requests, *self._aside.values()])

    def __contains__(self, request: Request) -> bool:
        if request.rank is None:
            return False
        return request.id in self._aside or request in self._sorted()

    def first(self) -> Request | None:
        """Who goes next; None if nobody waits but those set aside."""
        if self.size == len(self._aside):
            return None
        if self.size == 1 and self._new:  # alone, so there is nothing to sort
            return self._new[0]
        requests, later = self._sorted(), self._later
        request: Request = requests[0]
        while later and request.id in later:
            requests.pop(0)
            request.rank = (later.pop(request.id), request.serial)
            requests.add(request)
            request = requests[0]
        return request

    def pop_first(self) -> None:
        """Take out what `first` has just returned."""
        if self._new:
            request: Request = self._new.pop()
            self._later.pop(request.id, None)
        else:
            request = self._requests.pop(0)
        request.rank = None
        self.size -= 1

    @property
    def aside(self) -> list[Request]:
        return list(self._aside.values())

    def set_aside_first(self) -> None:
        """Pass over what `first` has just returned, until `recall`."""
        request = self.first()
        assert request is not None, "somebody waits"
        rank = request.rank
        self.pop_first()
        request.rank = rank
        self._aside[request.id] = request
        self.size += 1

    def recall(self) -> None:
        """Those set aside wait in their places again."""
        if self._aside:
            self._new.extend(self._aside.values())
            self._aside.clear()

    def add(self, request: Request, key: Any) -> None:
        request.rank = (key, request.serial)
        self._new.append(request)
        self.size += 1

    def remove(self, request: Request) -> None:
        if self._aside.pop(request.id, None) is None:
            self._sorted().remove(request)
        self._later.pop(request.id, None)
        self.size -= 1
        request.rank = None

    def rerank(self, request: Request, key: Any) -> None:
        """Move a request whose key has changed."""
        assert request.rank is not None, "only who waits can move"
        before: Any = request.rank[0]
        if request.id in self._aside:
            request.rank = (key, request.serial)
            return
        if key > before:
            self._later[request.id] = key
            return
        self._later.pop(request.id, None)
        if key != before:
            self.remove(request)
            self.add(request, key)

    def _sorted(self) -> Any:
        if self._new:
            self._requests.update(self._new)
            self._new.clear()
        return self._requests
