"""The life of a group as a table, and all groups by their state.

A move that the table does not list is an error and changes nothing. Reading down: a group is
submitted FRESH, is *launched*, and is *completed* when enough of its requests have finished. On the
way it may *spend* the round's token budget, or be *set back* to a later round; a complete group
that has grown stale may be set back too. A group that is to be *judged* waits for the judgement
once it is whole, and is complete if it is *kept*. It is *delivered*, *fails* or is *filtered*
exactly once, and is then removed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import islice
from typing import Any, Final

from sortedcontainers import SortedKeyList

from rollout_sched.core.errors import IllegalMove
from rollout_sched.core.model.model import Group, GroupState

# Final, so that compiled code need not look them up.
FRESH: Final = GroupState.FRESH
ACTIVE: Final = GroupState.ACTIVE
SPENT: Final = GroupState.SPENT
DEFERRED: Final = GroupState.DEFERRED
JUDGING: Final = GroupState.JUDGING
COMPLETE: Final = GroupState.COMPLETE
DELIVERED: Final = GroupState.DELIVERED
FAILED: Final = GroupState.FAILED
FILTERED: Final = GroupState.FILTERED


class GroupMove(StrEnum):
    """The verbs of the table."""

    LAUNCH = "launch"  # its requests may be dispatched
    SPEND = "spend"  # all its unfinished requests have used up the round's budget
    SET_BACK = "set back"  # it waits for a later launch
    FILL = "fill"  # enough of its requests have finished
    JUDGE = "judge"  # likewise, and it is to be judged
    KEEP = "keep"  # it was judged worth training
    FILTER = "filter"  # it was not
    DELIVER = "deliver"
    FAIL = "fail"  # one of its requests cannot be made, or it cannot be judged


LAUNCH: Final = GroupMove.LAUNCH
SPEND: Final = GroupMove.SPEND
SET_BACK: Final = GroupMove.SET_BACK
FILL: Final = GroupMove.FILL
JUDGE: Final = GroupMove.JUDGE
KEEP: Final = GroupMove.KEEP
FILTER: Final = GroupMove.FILTER
DELIVER: Final = GroupMove.DELIVER
FAIL: Final = GroupMove.FAIL

MOVES: Final[dict[GroupState, dict[GroupMove, GroupState]]] = {
    FRESH: {LAUNCH: ACTIVE},
    ACTIVE: {SPEND: SPENT, SET_BACK: DEFERRED, FILL: COMPLETE, JUDGE: JUDGING, FAIL: FAILED},
    SPENT: {LAUNCH: ACTIVE, SET_BACK: DEFERRED},
    # The last request of a deferred group may finish after its round.
    DEFERRED: {LAUNCH: ACTIVE, FILL: COMPLETE, JUDGE: JUDGING, FAIL: FAILED},
    JUDGING: {KEEP: COMPLETE, FILTER: FILTERED, SET_BACK: DEFERRED, FAIL: FAILED},
    COMPLETE: {SET_BACK: DEFERRED, DELIVER: DELIVERED},
    DELIVERED: {},
    FAILED: {},
    FILTERED: {},
}

#: States of groups that are neither delivered nor lost.
HERE: Final = (FRESH, ACTIVE, SPENT, DEFERRED, JUDGING, COMPLETE)


class Groups:
    """Every group that is neither delivered nor lost; groups of one state in order of arrival.

    `touched` are the groups that arrived, moved or finished a request since the follower
    (`core.restart.facts`) last looked; None while there is no follower.
    """

    def __init__(self) -> None:
        self.touched: dict[Group, None] | None = None
        self._all: dict[str, Group] = {}
        # Not plain dicts: finding the first entry after many removals at the front scans the holes.
        self._by_state: dict[GroupState, OrderedDict[str, Group]] = {
            state: OrderedDict() for state in HERE
        }

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, group: str) -> bool:
        return group in self._all

    def __iter__(self) -> Iterator[Group]:
        return iter(self._all.values())

    def __getitem__(self, group: str) -> Group:
        return self._all[group]

    def get(self, group: str) -> Group | None:
        return self._all.get(group)

    def count(self, state: GroupState) -> int:
        return len(self._by_state[state])

    def first(self, state: GroupState) -> Group | None:
        """The group that has been in the state longest."""
        return next(iter(self._by_state[state].values()), None)

    def front(self, state: GroupState, limit: int) -> list[Group]:
        """The first `most` groups of a state, or all if there are fewer."""
        return list(islice(self._by_state[state].values(), limit))

    def in_state(self, state: GroupState) -> list[Group]:
        return list(self._by_state[state].values())

    def touch(self, group: Group) -> None:
        """Note a change of the group that no event or action names."""
        if self.touched is not None:
            self.touched[group] = None

    def add(self, group: Group) -> None:
        self.touch(group)
        self._all[group.id] = group
        self._by_state[group.state][group.id] = group

    def move(self, group: Group, verb: GroupMove) -> None:
        """Move a group, or raise IllegalMove and leave it as it is."""
        after = MOVES[group.state].get(verb)
        if after is None:
            raise IllegalMove(f"group {group.id} is {group.state}: it cannot {verb}")
        self.touch(group)
        del self._by_state[group.state][group.id]
        group.state = after
        if after in self._by_state:
            self._by_state[after][group.id] = group
        else:
            del self._all[group.id]


# ------------------------------------------------------------------------------------------
# The sample buffer: groups that hold tokens or will soon, by age, and the whole ones to deliver.
#
# A group is *started* from its launch (or its first kept token) until it is delivered or starts
# over. Finished members that wait for a slow sibling age too, so age belongs to the group: it is
# the oldest version that may have made any of its tokens.


def _oldest_first(group: Group) -> tuple[int, int]:
    return (group.oldest_version or 0, group.serial)


class SampleBuffer:
    """Started groups indexed by oldest version, and complete ones in order of delivery."""

    def __init__(self) -> None:
        # In order of start. The first is found at once: a dict walks over those that were removed.
        self._started: OrderedDict[str, Group] = OrderedDict()
        self._starts = 0
        self._numbers: dict[str, int] = {}  # which start was whose
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
        if group.id not in self._started:
            self._starts += 1
            self._numbers[group.id] = self._starts
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
        del self._started[group.id], self._numbers[group.id]
        self._complete.discard(group)
        self.set_version(group, None)

    def oldest_first(self, groups: int, window: int = 0) -> list[Group]:
        """The next complete groups to deliver, of those in the window (`Batching.window`). A
        scheduler that was restored counts the starts of the groups that it found."""
        waiting = (group for group in self._started.values() if group.state is not COMPLETE)
        first = next(waiting, None) if window else None
        if first is None:
            return list(islice(self._complete, groups))
        end = self._numbers[first.id] + window
        within = [group for group in self._complete if self._numbers[group.id] < end]
        return within[:groups]

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
