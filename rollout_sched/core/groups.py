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
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from typing import Final

from rollout_sched.core.errors import IllegalMove
from rollout_sched.core.model import Group, GroupState

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
    (`core.facts`) last looked; None while there is no follower.
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

    def front(self, state: GroupState, most: int) -> list[Group]:
        """The first `most` groups of a state, or all if there are fewer."""
        return list(islice(self._by_state[state].values(), most))

    def of(self, state: GroupState) -> list[Group]:
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
