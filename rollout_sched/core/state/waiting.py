"""The waiting queue: requests that may be dispatched, in the order the ordering role gives.

A launch adds thousands of requests: those are sorted together and taken from the end of a list. A
single new request, or one with a new key, goes to a heap beside it. Neither is searched: an entry
is valid while it is its request's `rank`, and is dropped at the front if it is not.

A request that fits no open instance is set aside, so that it does not block others.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any

from rollout_sched.core.model.model import Group, Request
from rollout_sched.core.state.lifecycle import PARKED

#: (key, serial, request). Typed as a tuple, the compiler would copy it, and it loses its identity.
Entry = Any


class WaitingQueue:
    """Requests by (ordering key, serial): O(log n) to add and to move, O(1) to remove.

    size  number of waiting requests, including those set aside
    """

    def __init__(self) -> None:
        self.size = 0
        self._sorted: list[Entry] = []  # lowest key last
        self._heap: list[Entry] = []
        self._new: list[Entry] = []  # entries since the last look
        self._aside: dict[str, Request] = {}

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Request]:
        self._sort_all()
        return iter([entry[2] for entry in reversed(self._sorted)] + self.aside)

    def __contains__(self, request: Request) -> bool:
        return request.rank is not None

    def first(self) -> Request | None:
        """The request that goes next; None if none waits except those set aside."""
        if self._new:
            self._sort_in()
        entries, heap = self._sorted, self._heap
        while entries and entries[-1][2].rank is not entries[-1]:
            entries.pop()
        while heap and heap[0][2].rank is not heap[0]:
            heappop(heap)
        if heap and not (entries and entries[-1] < heap[0]):
            first: Request = heap[0][2]
            return first
        return entries[-1][2] if entries else None

    @property
    def aside(self) -> list[Request]:
        return list(self._aside.values())

    def set_aside(self, request: Request) -> None:
        """Skip a waiting request until `recall`."""
        assert request.rank is not None, "only waiting requests can be set aside"
        request.rank = (request.rank[0], request.serial, request)
        self._aside[request.id] = request

    def recall(self) -> None:
        """Requests that were set aside wait in their places again."""
        if self._aside:
            self._new.extend([request.rank for request in self._aside.values()])
            self._aside.clear()

    def add(self, request: Request, key: Any) -> None:
        entry: Entry = (key, request.serial, request)
        request.rank = entry
        self._new.append(entry)
        self.size += 1

    def remove(self, request: Request) -> None:
        request.rank = None
        self.size -= 1
        if self._aside:
            self._aside.pop(request.id, None)

    def rerank(self, request: Request, key: Any) -> None:
        """Move a request whose key has changed."""
        assert request.rank is not None, "only waiting requests can move"
        if key == request.rank[0]:
            return
        entry: Entry = (key, request.serial, request)
        request.rank = entry
        if request.id not in self._aside:
            self._new.append(entry)

    def rebuild(self) -> None:
        """Keys have a new type, which cannot be compared with that of invalid entries."""
        self._sort_all()

    # -- inside ----------------------------------------------------------------------------

    def _sort_in(self) -> None:
        """Merge new entries; sort all if many are new or too many entries are invalid."""
        new, entries = self._new, len(self._sorted) + len(self._heap)
        if 4 * len(new) > entries or entries > 64 + 4 * self.size:
            self._sort_all()
            return
        for entry in new:
            heappush(self._heap, entry)
        new.clear()

    def _sort_all(self) -> None:
        entries = [*self._sorted, *self._heap, *self._new]
        self._sorted = [entry for entry in entries if entry[2].rank is entry]
        self._sorted.sort(reverse=True)
        self._heap.clear()
        self._new.clear()


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
        """Remove the request if the buffer has it."""
        self._parked.pop(request.id, None)

    def parked_of(self, group: Group) -> list[Request]:
        """The parked requests of one group."""
        return [r for r in group.requests if r.state is PARKED]
