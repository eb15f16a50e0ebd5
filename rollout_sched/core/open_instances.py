"""The open instances, and which of them is least loaded.

`least()` must not cost more as the fleet grows, so open instances are in a heap of (load, serial,
heap version). A change increases the instance's heap version, which makes its entry stale, and
marks it as moved. The new entry is made at the next query, because no dispatch follows most
changes. Stale entries are dropped when they reach the top, and the heap is rebuilt when they
outnumber live ones, so every operation is O(log instances) amortised.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from rollout_sched.core.model import Instance

Heap = list[tuple[Any, int, int, Instance]]


class OpenInstances:
    """`open` lists the open instances by their `open_index`, which is -1 for all others."""

    def __init__(self, load: Callable[[Instance], Any]) -> None:
        self.open: list[Instance] = []
        self._load = load
        self._heap: Heap = []
        self._moved: set[Instance] = set()  # open or not: their entries are stale

    def least(self) -> Instance | None:
        """The open instance of least load; among equals, the one that joined first."""
        if self._moved:
            self._settle()
        heap = self._heap
        while heap:
            _, _, version, instance = heap[0]
            if version == instance.heap_version and instance.open_index >= 0:
                return instance
            heappop(heap)
        return None

    def put(self, instance: Instance) -> None:
        """The instance is open, and its load may have changed."""
        if instance.open_index < 0:
            instance.open_index = len(self.open)
            self.open.append(instance)
        self._moved.add(instance)

    def remove(self, instance: Instance) -> None:
        """The instance is no longer open; the last of the list takes its place."""
        last = self.open.pop()
        if last is not instance:
            self.open[instance.open_index] = last
            last.open_index = instance.open_index
        instance.open_index = -1

    def _settle(self) -> None:
        """Make new heap entries for the instances that have moved."""
        heap, moved = self._heap, self._moved
        if len(heap) + len(moved) > 64 + 4 * len(self.open):
            heap[:] = [(self._load(i), i.serial, i.heap_version, i) for i in self.open]
            heapify(heap)
            moved.clear()
            return
        for instance in moved:
            if instance.open_index < 0:
                continue
            entry = (self._load(instance), instance.serial, instance.heap_version, instance)
            if heap and heap[0][3] is instance:
                heapreplace(heap, entry)  # its old entry is stale: saves the pop
            else:
                heappush(heap, entry)
        moved.clear()
