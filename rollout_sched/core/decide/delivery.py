"""Deliveries: which complete groups go to the trainer, and when.

Batches are pulled: the trainer asks, and gets one. Batches that are pushed would age in a queue
after their staleness was checked.

A batch may go in parts. The trainer says whether it takes parts, the batching when one goes. All
else (the round, what is set back, versions, staleness) knows only batches, which end with the last
part. Parts are pushed: within a batch the version cannot change, so nothing ages; if each were
requested, the next round would wait until the trainer has trained the part before. New weights are
refused while a batch is delivered in part: its parts would be of two versions, and the places kept
in it for groups that are due would be lost. The last part may be empty, so that "the batch is
whole" is always reported, whatever caused it.
"""

from __future__ import annotations

from rollout_sched.core.decide.lending import Lender
from rollout_sched.core.errors import PolicyError
from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.model import Group
from rollout_sched.core.state.groups import (
    ACTIVE,
    COMPLETE,
    DEFERRED,
    JUDGING,
    SPENT,
)
from rollout_sched.core.work.parts import Parts


class Launcher:
    """Asks the batching how many groups to launch, the freshness how many may be launched, and the
    selection which ones. Groups that were set back come before fresh ones."""

    def __init__(self, parts: Parts) -> None:
        self._state = parts.state
        self._carries_over = parts.state.roles.carries_over
        self._outcomes = parts.group_outcomes

    def launch(self) -> None:
        """Launch what the batching asks for, as far as the freshness has room."""
        state = self._state
        progress, roles, groups = state.progress, state.roles, state.groups
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
        restarted: list[Group] = []  # groups that were set back and hold no tokens
        while deferred > 0 and progress.deferred:
            group = groups.first(DEFERRED)
            assert group is not None
            if group not in state.sample_buffer:
                if allowed <= 0:
                    break
                allowed -= 1
                restarted.append(group)
            self._outcomes.launch(group, launch.oversample)
            launched.append(group)
            deferred -= 1
        fresh = min(fresh, allowed, progress.fresh)
        if fresh > 0:
            for group in state.selection_window.take(fresh, restarted):
                self._outcomes.launch(group, launch.oversample)
                launched.append(group)
        progress.launched(launch, len(launched))
        for place, group in enumerate(launched):
            group.launch_place, group.launch_size = place, len(launched)

    def renew_budgets(self) -> None:
        """If nothing else can fill the batch, groups that have spent their budget go on."""
        progress = self._state.progress
        while progress.spent and progress.in_progress < progress.prompts_per_step:
            group = self._state.groups.first(SPENT)
            assert group is not None
            self._outcomes.launch(group, 1.0)

    def recall_oldest(self) -> None:
        """The batch may wait for groups that were set back: the oldest of these go on."""
        state = self._state
        groups = state.groups.in_state(DEFERRED) + state.groups.in_state(SPENT)
        set_back = [group for group in groups if group in state.sample_buffer]
        newest = state.progress.fleet_version
        ages = [newest if g.oldest_version is None else g.oldest_version for g in set_back]
        for group, age in zip(set_back, ages, strict=True):
            if age == min(ages):
                self._outcomes.launch(group, 1.0)


class Deliverer:
    """Asks the batching how many groups make a batch or a part of it, and the freshness whether the
    groups that stay behind could still be delivered in time. The end of a batch is the end of its
    round.
    """

    def __init__(self, parts: Parts, launcher: Launcher, lender: Lender) -> None:
        self._state = parts.state
        self._carries_over = parts.state.roles.carries_over
        self._finished = parts.finished
        self._outcomes = parts.group_outcomes
        self._launcher = launcher
        self._lender = lender

    def deliver(self) -> None:
        """The trainer waits: deliver its batch, or a part of it, if the batching says so and the
        groups that stay behind can still be delivered in time."""
        state, progress = self._state, self._state.progress
        batching, missing = state.roles.batching, progress.missing
        if not missing:
            if progress.in_batch:
                self._hand_over([], last=True)  # the missing groups will never come
            return
        size = batching.batch(progress)
        if not size:
            return
        if size > min(progress.complete, missing):
            raise PolicyError(
                f"batching asked for {size} of {progress.complete} complete groups, for a batch "
                f"that lacks {missing}"
            )
        if size < missing and not progress.takes_parts:
            return
        groups = state.sample_buffer.oldest_first(size, batching.window(progress))
        if self._carries_over and self._leaves_too_old(groups):
            if self._start_late_over():
                self.deliver()
                return
            self._launcher.recall_oldest()
            groups = self._fewer(groups)
        in_parts = batching.part_prompts and progress.takes_parts
        if len(groups) >= (min(batching.part_prompts, size) if in_parts else size):
            self._hand_over(groups, last=len(groups) == missing)

    def _leaves_too_old(self, groups: list[Group]) -> bool:
        """Whether delivering these groups would leave others that can no longer go in time."""
        progress = self._state.progress
        remaining = self._state.sample_buffer.remaining(groups, progress.fleet_version)
        places = progress.missing - len(groups)
        return self._state.roles.freshness.must_wait(progress, remaining, places)

    def _start_late_over(self) -> bool:
        """Start over the groups that cannot be delivered in time, whichever groups wait.

        If a version took no batch, its places are lost, and more groups are open than can be
        delivered in time. Of these the excess starts over: of the groups with the oldest version
        first the unfinished ones, and among those the last to be launched. Returns whether any
        group started over.

        No group starts over again and again while the trainer waits. The bound on open groups
        depends on versions and places alone (`policies.freshness.Bounded`), and open groups do not
        change the number of places: groups that have spent a budget are open, and the batch lacks
        the same number whatever state the others are in. Once the excess has started over, only a
        launch opens more groups, and a launch first asks for room; a batch, or a part of it, takes
        as many places as groups. So an excess comes back only after another version that took no
        batch, or if an instance made older tokens than it reported.

        So every batch completes. As long as the batch lacks groups, some run: groups that have
        spent a budget continue if no others can (`Launcher.renew_budgets`). If the batch must
        wait, the oldest groups that were set back continue (`Launcher.recall_oldest`); these
        include the one that is due if no group that is due runs. Each request that continues makes
        a token or finishes, no token is thrown away, and a response has a limit.
        """
        if not self._too_many_open():
            return False
        newer = self._state.progress.version + 1
        open_groups = self._state.sample_buffer.older_than(newer)
        for group in sorted(open_groups, key=_most_dispensable_first):
            self._outcomes.start_over(group)
            if not self._too_many_open():
                break
        return True

    def _too_many_open(self) -> bool:
        """Groups that were never dispatched may still get the newest version."""
        progress = self._state.progress
        remaining = self._state.sample_buffer.remaining([], progress.version)
        return self._state.roles.freshness.must_wait(progress, remaining, progress.wanted)

    def _fewer(self, groups: list[Group]) -> list[Group]:
        """The largest number of these groups that may go, if not all may. Each delivered group
        takes the place of one that stays behind, so if n groups may go, fewer may go too."""
        may, may_not = 0, len(groups)
        while may_not - may > 1:
            middle = (may + may_not) // 2
            if self._leaves_too_old(groups[:middle]):
                may_not = middle
            else:
                may = middle
        return groups[:may]

    def _hand_over(self, groups: list[Group], *, last: bool) -> None:
        """Deliver a batch, or the next part of it."""
        progress, sample = self._state.progress, self._finished.sample_of
        samples = tuple(sample(request) for group in groups for request in group.finished)
        short = progress.wanted - len(groups) if last else 0
        self._state.orders.append(
            Deliver(progress.batches, progress.version, samples, progress.parts, last, short)
        )
        for group in groups:
            self._outcomes.deliver(group)
        progress.part_delivered(len(groups))
        if last:
            self._end_round()

    def _end_round(self) -> None:
        progress = self._state.progress
        progress.batch_delivered()
        self._lender.call_off()
        if self._state.roles.batching.stops_at_delivery and progress.active + progress.spent:
            for group in self._state.sample_buffer.groups():
                if group.state is ACTIVE or group.state is SPENT:
                    self._outcomes.set_back(group)


def _most_dispensable_first(group: Group) -> tuple[int, bool, int]:
    whole = group.state is COMPLETE or group.state is JUDGING
    return (group.oldest_version or 0, whole, -group.serial)
