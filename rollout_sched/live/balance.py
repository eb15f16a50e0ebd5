"""Divides a batch into sets of about equal weight, because ranks wait for the fullest set.

The largest differencing method (Karmarkar and Karp 1982) for any number of sets: the two least even
partial divisions are merged, the fullest set of one with the emptiest of the other, until one
division is left. A merged division is at most as uneven as the less even of the two, so in the end
no two sets differ by more than the heaviest item.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from rollout_sched.core.errors import CallerError

#: (weight, items): a set. The items are a number, a nested pair of items, or None, so that joining
#: two sets costs nothing.
_Set = tuple[int, Any]


def balanced(weights: Sequence[int], sets: int) -> list[list[int]]:
    """Divide the indices of `weights` into `sets` lists, each ascending; some are empty if there
    are too few. Raises CallerError for less than one set."""
    if sets < 1:
        raise CallerError(f"a batch needs at least one rank, not {sets}")
    if not weights:
        return [[] for _ in range(sets)]
    empty: list[_Set] = [(0, None)] * (sets - 1)
    divisions: list[tuple[int, int, list[_Set]]] = [
        (-weight if sets > 1 else 0, place, [(weight, place), *empty])
        for place, weight in enumerate(weights)
    ]
    heapify(divisions)
    serial = len(weights)
    while len(divisions) > 1:
        first, second = heappop(divisions)[2], heappop(divisions)[2]
        laid = [_joined(full, lean) for full, lean in zip(first, reversed(second), strict=True)]
        laid.sort(key=_weight, reverse=True)
        heappush(divisions, (laid[-1][0] - laid[0][0], serial, laid))
        serial += 1
    return [sorted(_places(items)) for _, items in divisions[0][2]]


def _weight(one: _Set) -> int:
    return one[0]


def _joined(first: _Set, second: _Set) -> _Set:
    if first[1] is None or second[1] is None:
        return first if second[1] is None else second
    return first[0] + second[0], (first[1], second[1])


def _places(items: Any) -> list[int]:
    places, todo = [], [items]
    while todo:
        one = todo.pop()
        if isinstance(one, tuple):
            todo += one
        elif one is not None:
            places.append(one)
    return places
