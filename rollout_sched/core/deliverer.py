"""Deliveries: which complete groups go to the trainer, and when."""

from __future__ import annotations

from rollout_sched.core.actions import Action, Deliver
from rollout_sched.core.errors import PolicyError
from rollout_sched.core.finished_samples import FinishedSamples
from rollout_sched.core.group_outcomes import GroupOutcomes
from rollout_sched.core.groups import ACTIVE, COMPLETE, JUDGING, SPENT
from rollout_sched.core.launcher import Launcher
from rollout_sched.core.lender import Lender
from rollout_sched.core.model import Group
from rollout_sched.core.progress import RunProgress
from rollout_sched.core.roles import Roles
from rollout_sched.core.sample_buffer import SampleBuffer


class Deliverer:
    """Asks the batching how many groups make a batch or a part of it, and the freshness whether the
    groups that stay behind could still be delivered in time. The end of a batch is the end of its
    round.
    """

    def __init__(
        self,
        roles: Roles,
        samples: SampleBuffer,
        finished: FinishedSamples,
        progress: RunProgress,
        outcomes: GroupOutcomes,
        launcher: Launcher,
        lender: Lender,
        out: list[Action],
    ) -> None:
        self._roles = roles
        self._carries_over = roles.carries_over
        self._part_prompts = roles.batching.part_prompts
        self._sample_buffer = samples
        self._finished = finished
        self._progress = progress
        self._outcomes = outcomes
        self._launcher = launcher
        self._lender = lender
        self._out = out

    def deliver(self) -> None:
        """The trainer waits: deliver its batch, or a part of it, if the batching says so and the
        groups that stay behind can still be delivered in time."""
        progress = self._progress
        missing = progress.missing
        if not missing:
            if progress.in_batch:
                self._hand_over([], last=True)  # the missing groups will never come
            return
        size = self._roles.batching.batch(progress)
        if not size:
            return
        groups = self._sample_buffer.oldest_first(size)
        if len(groups) < size or size > missing:
            raise PolicyError(
                f"batching asked for {size} of {len(groups)} complete groups, for a batch that "
                f"lacks {missing}"
            )
        if size < missing and not progress.takes_parts:
            return
        if self._carries_over and self._leaves_too_old(groups):
            if self._start_late_over():
                self.deliver()
                return
            self._launcher.recall_oldest()
            if not (self._part_prompts and progress.takes_parts):
                return
            groups = self._fewer(groups)
            if len(groups) < self._part_prompts:
                return
        self._hand_over(groups, last=len(groups) == missing)

    def _leaves_too_old(self, groups: list[Group]) -> bool:
        """Whether delivering these groups would leave others that can no longer go in time."""
        progress = self._progress
        remaining = self._sample_buffer.remaining(groups, progress.fleet_version)
        places = progress.missing - len(groups)
        return self._roles.freshness.must_wait(progress, remaining, places)

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
        open_groups = self._sample_buffer.older_than(self._progress.version + 1)
        for group in sorted(open_groups, key=_most_dispensable_first):
            self._outcomes.start_over(group)
            if not self._too_many_open():
                break
        return True

    def _too_many_open(self) -> bool:
        """Groups that were never dispatched may still get the newest version."""
        progress = self._progress
        remaining = self._sample_buffer.remaining([], progress.version)
        return self._roles.freshness.must_wait(progress, remaining, progress.lacking)

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
        progress, sample = self._progress, self._finished.of
        samples = tuple(sample(request) for group in groups for request in group.finished)
        short = progress.lacking - len(groups) if last else 0
        self._out.append(
            Deliver(progress.batches, progress.version, samples, progress.parts, last, short)
        )
        for group in groups:
            self._outcomes.deliver(group)
        progress.part_delivered(len(groups))
        if last:
            self._end_round()

    def _end_round(self) -> None:
        progress = self._progress
        progress.batch_delivered()
        self._lender.call_off()
        if self._roles.batching.stops_at_delivery and progress.active + progress.spent:
            for group in self._sample_buffer.groups():
                if group.state is ACTIVE or group.state is SPENT:
                    self._outcomes.set_back(group)


def _most_dispensable_first(group: Group) -> tuple[int, bool, int]:
    whole = group.state is COMPLETE or group.state is JUDGING
    return (group.oldest_version or 0, whole, -group.serial)
