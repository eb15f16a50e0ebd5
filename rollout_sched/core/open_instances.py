"""The open instances, and which of them is least loaded.

`least()` must not cost more as the fleet grows, so they sit in a heap of (load, serial, heap
version). A change bumps the instance's, which makes its entry stale, and notes that it has moved;
the new entry is made when somebody next asks, for most changes are answers after which nothing is
dispatched. Stale entries are dropped when they surface, and the heap is rebuilt when they outnumber
live ones, so every operation is O(log instances) amortised.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from rollout_sched.core.model import Instance

Heap = list[tuple[Any, int, int, Instance]]


class OpenInstances:
    """`open` lists them, each at its `open_index`, which is -1 for all others."""

    def __init__(self, load: Callable[[Instance], Any]) -> None:
        self.open: list[Instance] = []
        self._load = load
        self._heap: Heap = []
        self._moved: set[Instance] = set()  # open or not, their entries are stale

    def least(self) -> Instance | None:
        """The one of least load; the one that joined first among equals."""
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
        """It is open, and its load may be another."""
        if instance.open_index < 0:
            instance.open_index = len(self.open)
            self.open.append(instance)
        self._moved.add(instance)

    def remove(self, instance: Instance) -> None:
        """It is open no more; the last of the list takes its place."""
        last = self.open.pop()
        if last is not instance:
            self.open[instance.open_index] = last
            last.open_index = instance.open_index
        instance.open_index = -1

    def _settle(self) -> None:
        """Give those that have moved their new place in the heap."""
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
                heapreplace(heap, entry)  # its old entry is stale: spare the pop
            else:
                heappush(heap, entry)
        moved.clear()
