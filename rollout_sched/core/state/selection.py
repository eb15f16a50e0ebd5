"""The window of fresh groups from which the selection chooses those that start together.

The window takes in several rounds of groups at once, in order of arrival, and every group in it
starts before any group that came later. So no group is passed over for more rounds than the window
holds, whatever the policy prefers, and all its rounds together are what the trainer submitted.

A sliding window would fill up with the prompts that the policy avoids, and its rounds would drift
away from what was submitted. As it is, the window *is* the first fresh groups, so its book is one
number.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout_sched.core.errors import PolicyError
from rollout_sched.core.model.model import Group
from rollout_sched.core.model.roles import Selection
from rollout_sched.core.state.groups import FRESH, Groups


class SelectionWindow:
    """The first `left` fresh groups are the groups of the window that have not started.

    selection  the role that is asked
    """

    def __init__(self, selection: Selection, groups: Groups, prompts_per_step: int) -> None:
        self.left = 0
        self._selection = selection
        self._groups = groups
        self._prompts_per_step = prompts_per_step

    def take(self, wanted: int, beside: Sequence[Group]) -> list[Group]:
        """`wanted` fresh groups (there are enough) to start now; `beside` start with them."""
        rounds = self._selection.window
        if not rounds:
            return self._groups.front(FRESH, wanted)
        overdue: list[Group] = []
        if self.left < wanted:
            overdue = self._groups.front(FRESH, self.left)
            room = rounds * max(wanted, self._prompts_per_step)
            self.left = min(len(overdue) + room, self._groups.count(FRESH))
        window = self._groups.front(FRESH, self.left)[len(overdue) :]
        chosen = overdue + self._choose(window, wanted - len(overdue), [*beside, *overdue])
        self.left -= len(chosen)
        return chosen

    def _choose(self, window: Sequence[Group], wanted: int, beside: Sequence[Group]) -> list[Group]:
        if wanted >= len(window):
            return list(window)
        chosen = list(self._selection.choose(window, wanted, beside))
        known = {group.id for group in window}
        names = {group.id for group in chosen}
        if len(chosen) != wanted or len(names) != wanted or not names <= known:
            raise PolicyError(
                f"selection chose {len(chosen)} group(s), {len(names & known)} of the window's "
                f"{len(window)}; it must choose {wanted} different ones of the window"
            )
        return chosen
