"""Judged groups: kept, filtered or failed.

The core knows neither rewards nor their purpose. It knows that a whole group waits for an answer
whether it is to be trained, and that the group holds no slot meanwhile, but ages.
"""

from __future__ import annotations

from collections import Counter

from rollout_sched.core.events import GroupJudged
from rollout_sched.core.group_outcomes import GroupOutcomes
from rollout_sched.core.groups import KEEP, Groups
from rollout_sched.core.progress import RunProgress
from rollout_sched.core.sample_buffer import SampleBuffer


class Judgement:
    """Takes the answers to Judge; an answer to an earlier question about the group is ignored."""

    def __init__(
        self,
        groups: Groups,
        samples: SampleBuffer,
        outcomes: GroupOutcomes,
        progress: RunProgress,
        anomalies: Counter[str],
    ) -> None:
        self._groups = groups
        self._samples = samples
        self._outcomes = outcomes
        self._progress = progress
        self._anomalies = anomalies

    def judged(self, event: GroupJudged, now: float) -> None:
        group = self._groups.get(event.group)
        if group is None or not event.judgement or group.judgement != event.judgement:
            self._anomalies["unknown_judgement"] += 1
            return
        group.judgement = 0
        if event.verdict == "kept":
            self._progress.dirty = True
            self._groups.move(group, KEEP)
            self._samples.completed(group)
        else:
            self._outcomes.lose(group, event.verdict)
