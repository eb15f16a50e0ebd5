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
    """Asks the batching how many groups make a batch, or a part of it, and the freshness whether
    they may go: whatever stays behind can still go in time. The end of a batch is that of a round.
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
        """The trainer waits: hand over its batch, or a part of it, if the batching says so and
        what stays behind can still go in time."""
        progress = self._progress
        missing = progress.missing
        if not missing:
            if progress.in_batch:
                self._hand_over([], last=True)  # what it lacked will never come
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
        """Whether some that stay behind could no longer go in time if these went."""
        progress = self._progress
        remaining = self._sample_buffer.remaining(groups, progress.fleet_version)
        places = progress.missing - len(groups)
        return self._roles.freshness.must_wait(progress, remaining, places)

    def _start_late_over(self) -> bool:
        """Where a version took no batch, its places are lost, and more is open than can go in time,
        whatever waits: what is too much starts over, of the oldest the unfinished first, and of
        those the last to be launched. Returns whether there was any.

        Nobody starts over again and again while the trainer waits. What is open has a bound that
        versions and places alone say (`policies.freshness.Bounded`), and what is open changes no
        place: groups that have spent a budget are open, and the batch lacks as many whatever state
        the others are in. Once what was too much has gone, only a launch opens more, and that asks
        for room first; a batch, or a part of it, takes as many places as groups. So it is too much
        again only after a version that took no batch, or where an instance made older tokens than
        it was said to.

        And then the run comes to an end of every batch. As long as it lacks groups, some are under
        way: who has spent a budget goes on where nobody else can (`Launcher.renew_budgets`), and if
        the batch must wait, the oldest of those set back do (`Launcher.recall_oldest`), among which
        is who is due if nothing due is under way. Each that goes on makes a token or finishes, none
        is thrown away, and a response has a limit.
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
        """Those that were never dispatched may yet be of the newest version."""
        progress = self._progress
        remaining = self._sample_buffer.remaining([], progress.version)
        return self._roles.freshness.must_wait(progress, remaining, progress.lacking)

    def _fewer(self, groups: list[Group]) -> list[Group]:
        """As many of these, which may not all go, as may: each more takes the place of one that
        stays behind, so if so many may go, fewer may."""
        may, may_not = 0, len(groups)
        while may_not - may > 1:
            middle = (may + may_not) // 2
            if self._leaves_too_old(groups[:middle]):
                may_not = middle
            else:
                may = middle
        return groups[:may]

    def _hand_over(self, groups: list[Group], *, last: bool) -> None:
        """A batch, or the next part of it."""
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
