"""Work that was done again (preemptions and re-prefill inside instances, attempts that went on
elsewhere), and work that was thrown away: by the scheduler, or drafted tokens by the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollout_sched.core.model.actions import Discard, Dispatch
from rollout_sched.core.model.events import (
    GroupJudged,
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    Restored,
)
from rollout_sched.metrics.fold import Handler, share


class Waste:
    """Sums over all instances so far, by the last report of each.

    resumed_attempts  attempts that went on from earlier tokens
    discarded         tokens thrown away, by the reason of the Discard
    filtered_groups   groups that were judged and not kept
    """

    def __init__(self) -> None:
        self.resumed_attempts = 0
        self.discarded: Counter[str] = Counter()
        self.filtered_groups = 0
        self._reports: dict[str, InstanceReported | None] = {}  # of the current instances
        self._last_reports: list[InstanceReported] = []  # of instances that have gone
        self._counting: dict[str, InstanceReported | None] = {}  # before the scheduler restarted

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            Dispatch: self._dispatched,
            Discard: self._discarded,
            GroupJudged: self._judged,
            InstanceJoined: self._joined,
            InstanceLost: self._gone,
            InstanceReported: self._reported,
            Restored: self._restored,
        }

    @property
    def preemptions(self) -> int:
        return sum(report.preemptions for report in self._all())

    @property
    def reprefilled_tokens(self) -> int:
        return sum(report.reprefilled_tokens for report in self._all())

    @property
    def drafted_tokens(self) -> int:
        return sum(report.drafted_tokens for report in self._all())

    @property
    def draft_acceptance(self) -> float:
        """The share of them that was accepted."""
        return share(sum(report.accepted_tokens for report in self._all()), self.drafted_tokens)

    def _all(self) -> list[InstanceReported]:
        here = [*self._reports.values(), *self._counting.values()]
        return [*self._last_reports, *[report for report in here if report is not None]]

    def _dispatched(self, now: float, action: Dispatch) -> None:
        if action.computed_tokens:
            self.resumed_attempts += 1

    def _discarded(self, now: float, action: Discard) -> None:
        self.discarded[action.reason] += action.tokens

    def _judged(self, now: float, event: GroupJudged) -> None:
        self.filtered_groups += event.verdict == "filtered"

    def _joined(self, now: float, event: InstanceJoined) -> None:
        self._gone(now, event)
        self._reports[event.instance] = self._counting.pop(event.instance, None)

    def _gone(self, now: float, event: InstanceJoined | InstanceLost) -> None:
        report = self._reports.pop(event.instance, None)
        if report is not None:
            self._last_reports.append(report)

    def _reported(self, now: float, event: InstanceReported) -> None:
        if event.instance in self._reports:
            self._reports[event.instance] = event

    def _restored(self, now: float, event: Restored) -> None:
        """The counters of an instance continue across schedulers."""
        self._counting.update(self._reports)
        self._reports.clear()
