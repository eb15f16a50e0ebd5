"""Steps: from one delivery of a batch to the next, with their times, tokens and staleness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rollout_sched.core.model.actions import Answer, Deliver, Discard, Dispatch
from rollout_sched.core.model.events import (
    BatchRequested,
    RequestFinished,
    RequestInterrupted,
    TrajectoryEnded,
    TurnFinished,
)
from rollout_sched.metrics.attempts import AttemptIndex
from rollout_sched.metrics.bubbles import Bubbles
from rollout_sched.metrics.fold import TOKENS, Handler, Histogram, quantile, share
from rollout_sched.metrics.results import Step

#: Shares of a batch, evenly from 0 to 1.
CURVE = tuple([n / 50 for n in range(51)])


class Launches:
    """When groups were first dispatched.

    last_step   the last step with a first dispatch
    oldest_age  the most steps from a group's first dispatch to its delivery
    """

    def __init__(self) -> None:
        self.last_step = 0
        self.oldest_age = 0
        self._by_group: dict[str, tuple[int, float]] = {}

    def note(self, group: str, step: int, now: float) -> None:
        if group not in self._by_group:
            self.last_step = step
            self._by_group[group] = step, now

    def deliver(self, groups: Iterable[str], step: int, now: float) -> float:
        """The time of the first dispatch of any of these groups."""
        first = now
        for group in groups:
            launched, at = self._by_group.pop(group, (step, now))
            self.oldest_age = max(self.oldest_age, step - launched)
            first = min(first, at)
        return first


class Steps:
    """Folds events and actions into `delivered` steps and the `current` one.

    curves  for each delivered step and each share of CURVE: seconds from the step's first moment in
            flight until that share of its batch was finished

    A step ends with the last part of its batch. `train_s_per_token`: how long an earlier part keeps
    the trainer busy; the trainer does not count as waiting meanwhile.
    """

    __slots__ = (
        "_attempts",
        "_began",
        "_bubbles",
        "_finished_at",
        "_finished_s",
        "_idle_since",
        "_launched_at",
        "_train_s_per_token",
        "current",
        "curves",
        "delivered",
        "launches",
        "staleness",
    )

    def __init__(self, attempts: AttemptIndex, bubbles: Bubbles, train_s_per_token: float) -> None:
        self.delivered: list[Step] = []
        self.curves: list[list[float]] = []
        self.current = Step(0, 0.0)
        self.launches = Launches()
        self.staleness: Counter[int] = Counter()
        self._attempts = attempts
        self._bubbles = bubbles
        self._began: float | None = None  # the step's first moment in flight
        self._launched_at: float | None = None  # first dispatch of the batch's groups
        self._finished_at: dict[str, float] = {}
        self._finished_s: list[float] = []  # of the batch's samples, since the step began
        self._train_s_per_token = train_s_per_token
        self._idle_since: float | None = None  # the trainer, maybe in future; None: not asking

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            RequestFinished: self._finished,
            RequestInterrupted: self._answered,
            TurnFinished: self._answered,
            TrajectoryEnded: self._ended,
            BatchRequested: self._requested,
            Dispatch: self._dispatched,
            Discard: self._discarded,
            Answer: self._answered_client,
            Deliver: self._delivered,
        }

    def _answered(
        self, now: float, event: RequestFinished | RequestInterrupted | TurnFinished
    ) -> None:
        if self._attempts.closed is not None:
            self.current.generated_tokens += event.tokens

    def _finished(self, now: float, event: RequestFinished) -> None:
        self._answered(now, event)
        self._finished_at[event.request] = now

    def _ended(self, now: float, event: TrajectoryEnded) -> None:
        self._finished_at[event.request] = now

    def _requested(self, now: float, event: BatchRequested) -> None:
        if self._idle_since is None:
            self._idle_since = now

    def _dispatched(self, now: float, action: Dispatch) -> None:
        if self._began is None:
            self._began = now
        if action.group:
            self.launches.note(action.group, len(self.delivered), now)

    def _discarded(self, now: float, action: Discard) -> None:
        self.current.discarded_tokens += action.tokens
        self._finished_at.pop(action.request, None)

    def _answered_client(self, now: float, action: Answer) -> None:
        self._finished_at.pop(action.sample.request, None)

    def _delivered(self, now: float, action: Deliver) -> None:
        step = self.current
        step.version = action.version
        self._note_times(now, action)
        self._note_wait(step, now, action)
        self._note_tokens(step, action)
        if action.last:
            self._end_step(step, now)

    def _end_step(self, step: Step, now: float) -> None:
        finished = sorted(self._finished_s)
        step.t50_s, step.t90_s, step.t99_s = (quantile(finished, q) for q in (0.5, 0.9, 0.99))
        self.curves.append([quantile(finished, q) for q in CURVE])
        step.end_s = now
        step.span_s = now - (now if self._launched_at is None else self._launched_at)
        time = self._bubbles.close_step()
        step.rollout_s, step.capacity_s = time.rollout_s, time.capacity_s
        step.idle_s, step.vacant_s = time.idle_s, time.vacant_s
        self.delivered.append(step)
        self.current = Step(step.version + 1, now)
        self._began = now if self._attempts.open else None
        self._launched_at = self._idle_since = None
        self._finished_s = []

    def _note_times(self, now: float, action: Deliver) -> None:
        began = now if self._began is None else self._began
        pop = self._finished_at.pop
        ends = [pop(sample.request, None) for sample in action.samples]
        self.current.partial |= None in ends
        self._finished_s += [max(0.0, (now if end is None else end) - began) for end in ends]
        groups = dict.fromkeys(sample.group for sample in action.samples)
        first = self.launches.deliver(groups, len(self.delivered), now)
        if self._launched_at is None or first < self._launched_at:
            self._launched_at = first

    def _note_wait(self, step: Step, now: float, action: Deliver) -> None:
        if self._idle_since is not None:
            tokens = sum([s.prompt_tokens + s.response_tokens for s in action.samples])
            step.trainer_wait_s += max(0.0, now - self._idle_since)
            self._idle_since = max(now, self._idle_since) + self._train_s_per_token * tokens

    def _note_tokens(self, step: Step, action: Deliver) -> None:
        samples, version = action.samples, action.version
        masked = sum([sample.masked_tokens for sample in samples])
        step.samples += len(samples)
        step.tokens += sum([sample.response_tokens for sample in samples]) - masked
        step.masked_tokens += masked
        for sample in samples:
            for segment in sample.segments:
                if segment.version == version:
                    step.fresh_tokens += segment.tokens
        ages = Counter([sample.staleness for sample in samples])
        self.staleness.update(ages)
        step.max_staleness = max(step.max_staleness, max(ages, default=0))

    @property
    def steady(self) -> range:
        """The steps after the first, up to the last that launched a group; the rest is drain."""
        return range(1, min(self.launches.last_step, len(self.delivered) - 1) + 1)

    @property
    def steady_s(self) -> float:
        """How long the steady steps took, from the first delivery to that of the last of them."""
        steady = self.steady
        return self.delivered[steady[-1]].end_s - self.delivered[0].end_s if steady else 0.0

    def steady_tokens_per_s(self) -> float | None:
        """Tokens that the steady steps delivered per second; None if there are none."""
        seconds = self.steady_s
        tokens = sum(self.delivered[number].tokens for number in self.steady)
        return share(tokens, seconds) if seconds else None


#: Upper bounds of staleness, in versions.
STALENESS = (0, 1, 2, 3, 4, 6, 8, 12, 16)


class Trained:
    """Delivered samples: their staleness, their length, and whether long ones were left out.

    staleness  in versions
    tokens     of the responses
    """

    __slots__ = ("_thrown_samples", "_thrown_tokens", "staleness", "tokens")

    def __init__(self) -> None:
        self.staleness = Histogram(STALENESS)
        self.tokens = Histogram(TOKENS)
        self._thrown_samples = 0
        self._thrown_tokens = 0

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {Deliver: self._delivered, Discard: self._discarded}

    @property
    def length_ratio(self) -> float:
        """Mean length of delivered samples over that of all samples that are over; 1 before any.
        A discarded sample counts with its length so far, so a policy that breaks off long samples
        is in truth further below 1 than this value."""
        delivered = sum(self.tokens.counts)
        if not delivered:
            return 1.0
        every = self.tokens.sum + self._thrown_tokens
        samples = delivered + self._thrown_samples
        return share(self.tokens.sum / delivered, every / samples)

    def _delivered(self, now: float, action: Deliver) -> None:
        for sample in action.samples:
            self.staleness.add(sample.staleness)
            self.tokens.add(sample.response_tokens)

    def _discarded(self, now: float, action: Discard) -> None:
        if action.ends and action.group:
            self._thrown_samples += 1
            self._thrown_tokens += action.tokens
