"""Launches: which groups start or go on, and when."""

from __future__ import annotations

from rollout_sched.core.groups import DEFERRED, SPENT, Groups
from rollout_sched.core.model import Group
from rollout_sched.core.outcomes import Outcomes
from rollout_sched.core.progress import RunProgress
from rollout_sched.core.roles import Roles
from rollout_sched.core.sample_buffer import SampleBuffer
from rollout_sched.core.selection_window import SelectionWindow


class Launcher:
    """Asks the batching how many groups to launch, the freshness how many may be launched, and the
    selection which ones. Groups that were set back come before fresh ones."""

    def __init__(
        self,
        roles: Roles,
        groups: Groups,
        samples: SampleBuffer,
        window: SelectionWindow,
        progress: RunProgress,
        outcomes: Outcomes,
    ) -> None:
        self._roles = roles
        self._carries_over = roles.carries_over
        self._groups = groups
        self._sample_buffer = samples
        self._selection_window = window
        self._progress = progress
        self._outcomes = outcomes

    def launch(self) -> None:
        """Launch what the batching asks for, as far as the freshness has room."""
        progress, roles, groups = self._progress, self._roles, self._groups
        launch = roles.batching.launch(progress)
        if launch is None:
            return
        deferred, fresh = launch.deferred, launch.fresh
        if self._carries_over:
            allowed = roles.freshness.room(progress)
        elif progress.fleet_version >= roles.freshness.oldest_allowed(progress.version):
            allowed = deferred + fresh
        else:
            return  # instances that have not been updated yet still make older tokens
        launched: list[Group] = []
        anew: list[Group] = []  # groups that were set back and hold no tokens
        while deferred > 0 and progress.deferred:
            group = groups.first(DEFERRED)
            assert group is not None
            if group not in self._sample_buffer:
                if allowed <= 0:
                    break
                allowed -= 1
                anew.append(group)
            self._outcomes.launch(group, launch.oversample)
            launched.append(group)
            deferred -= 1
        fresh = min(fresh, allowed, progress.fresh)
        if fresh > 0:
            for group in self._selection_window.take(fresh, anew):
                self._outcomes.launch(group, launch.oversample)
                launched.append(group)
        progress.launched(launch, len(launched))
        for place, group in enumerate(launched):
            group.launch_place, group.launch_size = place, len(launched)

    def renew_budgets(self) -> None:
        """If nothing else can fill the batch, groups that have spent their budget go on."""
        progress = self._progress
        while progress.spent and progress.on_the_way < progress.prompts_per_step:
            group = self._groups.first(SPENT)
            assert group is not None
            self._outcomes.launch(group, 1.0)

    def recall_oldest(self) -> None:
        """The batch may wait for groups that were set back: the oldest of these go on."""
        groups = self._groups.of(DEFERRED) + self._groups.of(SPENT)
        set_back = [group for group in groups if group in self._sample_buffer]
        newest = self._progress.fleet_version
        ages = [newest if g.oldest_version is None else g.oldest_version for g in set_back]
        for group, age in zip(set_back, ages, strict=True):
            if age == min(ages):
                self._outcomes.launch(group, 1.0)
