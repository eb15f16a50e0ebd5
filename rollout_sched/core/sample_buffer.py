"""The sample buffer: groups that hold tokens or will soon, by age, and the whole ones to deliver.

A group is *started* from its launch (or its first kept token) until it is delivered or starts over.
Finished members that wait for a slow sibling age too, so age belongs to the group: it is the oldest
version that may have made any of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from sortedcontainers import SortedKeyList

from rollout_sched.core.model import Group


def _oldest_first(group: Group) -> tuple[int, int]:
    return (group.oldest_version or 0, group.serial)


class SampleBuffer:
    """Started groups indexed by oldest version, and complete ones in order of delivery."""

    def __init__(self) -> None:
        self._started: dict[str, Group] = {}
        self._by_version: dict[int, dict[str, Group]] = {}
        self._complete: Any = SortedKeyList(key=_oldest_first)

    @property
    def started(self) -> int:
        return len(self._started)

    @property
    def complete(self) -> int:
        return len(self._complete)

    def __contains__(self, group: Group) -> bool:
        return group.id in self._started

    def groups(self) -> list[Group]:
        """Every started group, in order of launch."""
        return list(self._started.values())

    def add(self, group: Group) -> None:
        self._started[group.id] = group

    def note_version(self, group: Group, version: int) -> None:
        """The group may now have tokens as old as `version`."""
        known = group.oldest_version
        if known is None or known > version:
            self.set_version(group, version)

    def set_version(self, group: Group, version: int | None) -> None:
        """Set the oldest version the group may have tokens of; None: it has none that count."""
        if group.oldest_version is not None:
            self._forget_version(group)
        group.oldest_version = version
        if version is not None:
            self._by_version.setdefault(version, {})[group.id] = group

    def completed(self, group: Group) -> None:
        self._complete.add(group)

    def remove(self, group: Group) -> None:
        """The group was delivered or starts over: it no longer ages."""
        self._started.pop(group.id, None)  # a group of drafts is not started, but may fail too
        self._complete.discard(group)
        self.set_version(group, None)

    def oldest_first(self, groups: int) -> list[Group]:
        """The next complete groups to deliver."""
        return list(islice(self._complete, groups))

    def older_than(self, version: int) -> list[Group]:
        """Started groups with tokens older than `version`."""
        return [
            group
            for known in sorted(self._by_version)
            if known < version
            for group in self._by_version[known].values()
        ]

    def unfinished(self, since: int) -> list[Group]:
        """Started groups that lack samples and hold no tokens older than `since`."""
        return [
            group
            for group in self._started.values()
            if len(group.finished) < group.samples
            and (group.oldest_version is None or group.oldest_version >= since)
        ]

    def remaining(self, taken: Iterable[Group], undated: int) -> dict[int, int]:
        """Groups left per oldest version after `taken` were delivered.

        Groups launched but never dispatched count as `undated`, the oldest version they can get.
        """
        left = {version: len(groups) for version, groups in self._by_version.items()}
        waiting = len(self._started) - sum(left.values())
        for group in taken:
            if group.oldest_version is None:
                waiting -= 1  # a group whose answers have no tokens has no age
            else:
                left[group.oldest_version] -= 1
        if waiting:
            left[undated] = left.get(undated, 0) + waiting
        return {version: count for version, count in left.items() if count}

    def _forget_version(self, group: Group) -> None:
        version = group.oldest_version
        assert version is not None
        groups = self._by_version[version]
        del groups[group.id]
        if not groups:
            del self._by_version[version]
