"""Rewards of a replay: how long the reward of a sample takes, and which groups are filtered.

The scenario defines both, except for groups whose verdict was recorded. They are drawn by sample
and by group, not by attempt: under every policy the same samples take equally long, and the same
groups are filtered.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Annotated

import msgspec

from rollout_sched.core import SchedulerView
from rollout_sched.core.model.actions import Deliver, Discard, Dispatch, Judge
from rollout_sched.core.model.events import Ending, Event, GroupJudged
from rollout_sched.core.model.records import DeliveredSample, Signed
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.traces.model import Duration


class RewardModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """seconds   that a reward takes, on average
    spread    standard deviation of their logarithm (they are lognormal); 0: all take equally long
    filtered  share of the groups that are not kept once their rewards are known
    seed      another seed draws other samples and groups, as does each of a replay's seeds
    """

    seconds: Duration = 0.0
    spread: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    filtered: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    seed: Signed = 0

    def seconds_of(self, sample: DeliveredSample, seed: int) -> float:
        if not self.spread:
            return self.seconds
        drawn = random.Random(f"{self.seed}/{seed}/{sample.group}/{sample.index}").gauss(0, 1)
        return self.seconds * math.exp(self.spread * (drawn - self.spread / 2))

    def keeps(self, group: str, seed: int) -> bool:
        return random.Random(f"{self.seed}/{seed}/{group}").random() >= self.filtered


class SimRewards:
    """When the reward of each finished sample is known, and the answer to each Judge.

    `verdict`: the recorded one on a group. `view`: that of the current scheduler.
    """

    def __init__(
        self,
        model: RewardModel,
        seed: int,
        verdict: Callable[[str], str | None],
        queue: EventQueue,
        view: Callable[[], SchedulerView],
        tell: Callable[[Event], None],
    ) -> None:
        self._model = model
        self._seed = seed
        self._verdict = verdict
        self._queue = queue
        self._view = view
        self._tell = tell
        self._known_at: dict[str, float] = {}  # by request

    def look(self, event: Event) -> None:
        """If the event finishes a request, its reward starts at once."""
        if isinstance(event, Ending):
            sample = self._view().to_judge(event.request)
            if sample is not None:
                self._begin(sample)

    def settle(self, action: Judge) -> None:
        """Answer when all rewards of the group are known."""
        at = max([self._begin(sample) for sample in action.samples])
        self._queue.at(max(at, self._queue.now), self._answer, action)

    def forget(self, action: Dispatch | Discard) -> None:
        """The request is discarded or continues, so its reward is void."""
        if isinstance(action, Dispatch) or not action.attempt:
            self._known_at.pop(action.request, None)

    def deliver(self, action: Deliver) -> None:
        for sample in action.samples:
            self._known_at.pop(sample.request, None)

    def _begin(self, sample: DeliveredSample) -> float:
        at = self._known_at.get(sample.request)
        if at is None:
            at = self._queue.now + self._model.seconds_of(sample, self._seed)
            self._known_at[sample.request] = at
        return at

    def _answer(self, action: Judge) -> None:
        if self._view().is_judged(action.group, action.judgement):
            recorded = self._verdict(action.group)
            drawn = self._model.keeps(action.group, self._seed)
            kept = drawn if recorded is None else recorded == "kept"
            verdict = GroupJudged(action.group, action.judgement, "kept" if kept else "filtered")
            self._tell(verdict)
