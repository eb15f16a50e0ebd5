"""Metrics: a fold over the journal. What it is shown is all there is, live and simulated alike.

Two bubbles, both shares of the fleet's instance-seconds. The *idle bubble* counts instances with
nothing in flight. That alone misleads: a straggler keeps its instance "busy" at batch 1. The
*occupancy bubble* counts empty places in a reference batch, 1 - U with verl's utilisation
U = sum(dt * S * min(1, A / S)) / sum(dt * S). Each is split by cause:

    weight_update  the instance is paused for, or loading, weights
    barrier        nothing is in flight anywhere: everybody waits for the trainer (or, where
                   trainer and instances share GPUs, the trainer has them)
    tool_wait      its trajectories wait for their tools
    kv_stall       requests wait inside the instance although it has places (by its last report)
    queue_empty    others work, but there is nothing left for this one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from rollout_sched.core.actions import (
    Action,
    Answer,
    Deliver,
    Discard,
    Dispatch,
    Pause,
    UpdateWeights,
)
from rollout_sched.core.events import (
    BatchRequested,
    Event,
    InstanceJoined,
    InstanceLost,
    InstanceReported,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    ToolReturned,
    TurnFinished,
    WeightsPublished,
    WeightsUpdated,
)

SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")
Lengths = npt.NDArray[np.int64]

CAUSES = ("weight_update", "barrier", "tool_wait", "kv_stall", "queue_empty")

#: What an instance may add per second; "other" is barrier or queue_empty, as the fleet decides.
SHARES = (
    ("idle", "weight_update"),
    ("idle", "tool_wait"),
    ("idle", "other"),
    ("vacant", "weight_update"),
    ("vacant", "tool_wait"),
    ("vacant", "kv_stall"),
    ("vacant", "other"),
)
_IDLE_OTHER, _VACANT_OTHER = 2, 6


class LengthBias(msgspec.Struct, frozen=True):
    """Trained against offered response lengths: does the policy prefer short answers?

    `mean_ratio` and `ks` (Kolmogorov-Smirnov distance) compare everything trained with everything
    offered; `step_ks` is the mean over the steps, which sees a policy that trains short answers
    first; `group_ratio` is the mean over groups of trained over offered mean, which sees one that
    takes the shortest samples of each.
    """

    mean_ratio: float
    ks: float
    step_ks: float
    group_ratio: float


class Step(msgspec.Struct):
    """One batch: from the delivery before it to its own (seconds, tokens, instance-seconds).

    `rollout_s` is how long anything was in flight; the t's count from the step's first moment in
    flight to that share of the batch being finished; `span_s` is from the first dispatch of any of
    the batch's groups, which may lie in an earlier step, to its delivery.
    """

    version: int
    start_s: float
    end_s: float = 0.0
    rollout_s: float = 0.0
    span_s: float = 0.0
    t50_s: float = 0.0
    t90_s: float = 0.0
    t99_s: float = 0.0
    trainer_wait_s: float = 0.0
    samples: int = 0
    tokens: int = 0
    fresh_tokens: int = 0
    generated_tokens: int = 0
    discarded_tokens: int = 0
    max_staleness: int = 0
    capacity_s: float = 0.0
    idle_s: dict[str, float] = msgspec.field(default_factory=dict)
    vacant_s: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def idle_bubble(self) -> float:
        return _share(sum(self.idle_s.values()), self.capacity_s)

    @property
    def occupancy_bubble(self) -> float:
        return _share(sum(self.vacant_s.values()), self.capacity_s)


class Summary(msgspec.Struct, frozen=True):
    """All steps together. Rates are per second of the whole run, `steady_*` without the first step
    and the steps after the last group was launched."""

    total_s: float
    rollout_s: float
    t50_s: float
    t90_s: float
    t99_s: float
    tokens_per_s: float
    accepted_tokens_per_s: float
    fresh_tokens_per_s: float
    steady_accepted_tokens_per_s: float | None
    idle_bubble: float
    idle_bubble_by_cause: dict[str, float]
    occupancy_bubble: float
    occupancy_bubble_by_cause: dict[str, float]
    preemptions: int
    resumed_attempts: int
    reprefilled_tokens: int
    discarded_tokens: int
    trainer_wait_s: float
    staleness_mean: float
    staleness_max: int
    staleness_histogram: dict[int, int]
    length_bias: LengthBias
    oldest_prompt_age_steps: int
    samples_delivered: int
    steps: int


class _Gauge:
    """What the fold knows of one instance.

    `shares` is what it adds to the bubbles per second, in the order of SHARES. An instance that
    neither updates, nor waits for tools, nor reports a queue is *plain* and adds to two of them
    only; `shares` is None then, since it follows from `in_flight`.
    """

    __slots__ = ("acting", "gone", "in_flight", "queued", "report", "shares", "updating")

    def __init__(self) -> None:
        self.in_flight = self.acting = self.queued = 0
        self.updating = self.gone = False
        self.shares: list[float] | None = None
        self.report: InstanceReported | None = None


class Metrics:
    """Folds (now, event, actions), in order, into steps and a summary.

    `reference_batch`: the places of an instance for the occupancy bubble, such as its even share of
    a batch. `offered(group)`: the
    response lengths the trainer asked for (length bias). `colocated`: training takes the
    instances' GPUs, so the fleet counts as waiting at the barrier meanwhile.
    """

    def __init__(
        self,
        reference_batch: float,
        offered: Callable[[str], Sequence[int]] | None = None,
        *,
        colocated: bool = False,
    ) -> None:
        self.steps: list[Step] = []
        self.reference_batch = reference_batch
        self._offered = offered
        self._colocated = colocated
        self._now = 0.0
        self._step = Step(0, 0.0)
        self._gauges: dict[str, _Gauge] = {}
        self._in_flight = self._acting = 0
        self._shares = [0.0] * len(SHARES)
        self._spent = [0.0] * len(SHARES)
        self._spent_at_barrier = [0.0] * len(SHARES)
        self._barrier_s = 0.0
        self._attempts: dict[int, _Gauge] = {}
        self._homes: dict[str, _Gauge] = {}
        self._finished_at: dict[str, float] = {}
        self._launched: dict[str, tuple[int, float]] = {}
        self._resumed = 0
        self._ages: list[int] = []
        self._last_launch_step = 0
        self._began: float | None = None
        self._wanted_since: float | None = None
        self._training = False
        self._trained_at = 0.0
        self._staleness: Counter[int] = Counter()
        self._lengths: list[list[int]] = []
        self._group_ratios: list[float] = []
        self._offered_lengths: list[int] = []
        self._lost: Counter[str] = Counter()

    def observe(self, now: float, event: Event, actions: Iterable[Action]) -> None:
        """Take the next entry of the journal and what the scheduler answered."""
        if now > self._now:
            self._integrate(now)
        on_event = self._ON_EVENT.get(type(event))
        if on_event is not None:
            on_event(self, event)
        for action in actions:
            on_action = self._ON_ACTION.get(type(action))
            if on_action is not None:
                on_action(self, action)

    def summary(self, total_s: float) -> Summary:
        """The run, of which `total_s` seconds have passed when its last step was trained."""
        steps = self.steps
        tokens = sum(step.tokens for step in steps)
        generated = sum(step.generated_tokens for step in steps) + self._step.generated_tokens
        idle, vacant, capacity = self._bubbles(total_s)
        reports = [g.report for g in self._gauges.values() if g.report is not None]
        return Summary(
            total_s=total_s,
            rollout_s=_mean([step.rollout_s for step in steps]),
            t50_s=_mean([step.t50_s for step in steps]),
            t90_s=_mean([step.t90_s for step in steps]),
            t99_s=_mean([step.t99_s for step in steps]),
            tokens_per_s=_share(generated, total_s),
            accepted_tokens_per_s=_share(tokens, total_s),
            fresh_tokens_per_s=_share(sum(step.fresh_tokens for step in steps), total_s),
            steady_accepted_tokens_per_s=self._steady(),
            idle_bubble=_share(sum(idle.values()), capacity),
            idle_bubble_by_cause={cause: _share(idle[cause], capacity) for cause in CAUSES},
            occupancy_bubble=_share(sum(vacant.values()), capacity),
            occupancy_bubble_by_cause={cause: _share(vacant[cause], capacity) for cause in CAUSES},
            preemptions=self._lost["preemptions"] + sum(r.preemptions for r in reports),
            resumed_attempts=self._resumed,
            reprefilled_tokens=self._lost["reprefilled_tokens"]
            + sum(r.reprefilled_tokens for r in reports),
            discarded_tokens=sum(step.discarded_tokens for step in steps)
            + self._step.discarded_tokens,
            trainer_wait_s=sum(step.trainer_wait_s for step in steps),
            staleness_mean=_share(
                sum(age * count for age, count in self._staleness.items()),
                self._staleness.total(),
            ),
            staleness_max=max(self._staleness, default=0),
            staleness_histogram=dict(sorted(self._staleness.items())),
            length_bias=self._length_bias(),
            oldest_prompt_age_steps=max(self._ages, default=0),
            samples_delivered=sum(step.samples for step in steps),
            steps=len(steps),
        )

    # -- time passes -----------------------------------------------------------------------

    def _integrate(self, now: float) -> None:
        seconds = now - self._now
        self._now = now
        step = self._step
        step.capacity_s += seconds * len(self._gauges)
        if self._training and self._colocated:
            self._barrier_s += seconds * len(self._gauges)
            return
        if self._in_flight:
            step.rollout_s += seconds
        spent = self._spent if self._in_flight or self._acting else self._spent_at_barrier
        for place, share in enumerate(self._shares):
            if share:
                spent[place] += seconds * share

    def _close_books(self) -> None:
        """Turn the seconds gathered since the last step into the step's causes."""
        step = self._step
        for spent, other in ((self._spent, "queue_empty"), (self._spent_at_barrier, "barrier")):
            for place, (bubble, cause) in enumerate(SHARES):
                totals = step.idle_s if bubble == "idle" else step.vacant_s
                _add(totals, other if cause == "other" else cause, max(0.0, spent[place]))
                spent[place] = 0.0
        for totals in (step.idle_s, step.vacant_s):
            _add(totals, "barrier", self._barrier_s)
        self._barrier_s = 0.0

    def _load(self, gauge: _Gauge, by: int) -> None:
        """So many more requests are in flight on the instance."""
        before = gauge.in_flight
        gauge.in_flight = after = before + by
        self._in_flight += by
        if gauge.shares is not None:
            self._change(gauge)
            return
        totals = self._shares
        if not (before and after):
            totals[_IDLE_OTHER] += (not after) - (not before)
        totals[_VACANT_OTHER] += self._vacant(after) - self._vacant(before)

    def _vacant(self, in_flight: int) -> float:
        """The empty part of the reference batch."""
        places = self.reference_batch
        return 1.0 - in_flight / places if in_flight < places else 0.0

    def _change(self, gauge: _Gauge) -> None:
        """Put what the instance adds to the bubbles in step with its state."""
        if gauge.gone:
            return  # a tool outlived the instance that it worked for
        before = gauge.shares or self._plain_shares(gauge)
        if gauge.updating or gauge.acting or gauge.queued:
            after = gauge.shares = self._shares_of(gauge)
        else:
            gauge.shares = None
            after = self._plain_shares(gauge)
        for place, share in enumerate(after):
            self._shares[place] += share - before[place]

    def _plain_shares(self, gauge: _Gauge) -> list[float]:
        shares = [0.0] * len(SHARES)
        shares[_IDLE_OTHER] = float(not gauge.in_flight)
        shares[_VACANT_OTHER] = self._vacant(gauge.in_flight)
        return shares

    def _shares_of(self, gauge: _Gauge) -> list[float]:
        if gauge.updating:
            return [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
        places = self.reference_batch
        stalled = min(gauge.queued, gauge.in_flight)
        empty = max(0.0, places - gauge.in_flight + stalled)
        stall = min(stalled, empty)
        tools = min(gauge.acting, empty - stall)
        rest = empty - stall - tools
        idle, acting = not gauge.in_flight, gauge.acting > 0
        return [
            0.0,
            float(idle and acting),
            float(idle and not acting),
            0.0,
            tools / places,
            stall / places,
            rest / places,
        ]

    # -- events ----------------------------------------------------------------------------

    def _joined(self, event: InstanceJoined) -> None:
        self._gone(event)
        self._gauges[event.instance] = gauge = _Gauge()
        for place, share in enumerate(self._plain_shares(gauge)):
            self._shares[place] += share

    def _gone(self, event: InstanceJoined | InstanceLost) -> None:
        gauge = self._gauges.pop(event.instance, None)
        if gauge is None:
            return
        gauge.gone = True
        for place, share in enumerate(gauge.shares or self._plain_shares(gauge)):
            self._shares[place] -= share
        if gauge.report is not None:
            self._lost["preemptions"] += gauge.report.preemptions
            self._lost["reprefilled_tokens"] += gauge.report.reprefilled_tokens
        held = [attempt for attempt, home in self._attempts.items() if home is gauge]
        for attempt in held:
            del self._attempts[attempt]
        self._in_flight -= len(held)

    def _reported(self, event: InstanceReported) -> None:
        gauge = self._gauges.get(event.instance)
        if gauge is None:
            return
        gauge.report = event
        if gauge.queued != event.waiting:
            gauge.queued = event.waiting
            self._change(gauge)

    def _answered(self, event: RequestFinished | RequestInterrupted | TurnFinished) -> None:
        if self._free(event.attempt):
            self._step.generated_tokens += event.tokens
        if type(event) is RequestFinished:
            self._finished_at[event.request] = self._now

    def _turn(self, event: TurnFinished) -> None:
        gauge = self._attempts.get(event.attempt)
        self._answered(event)
        if gauge is not None:
            gauge.acting += 1
            self._acting += 1
            self._homes[event.request] = gauge
            self._change(gauge)

    def _tool(self, event: ToolReturned) -> None:
        gauge = self._homes.pop(event.request, None)
        if gauge is not None:
            gauge.acting -= 1
            self._acting -= 1
            self._change(gauge)

    def _failed(self, event: RequestFailed) -> None:
        self._free(event.attempt)

    def _free(self, attempt: int) -> bool:
        gauge = self._attempts.pop(attempt, None)
        if gauge is None:
            return False
        self._load(gauge, -1)
        return True

    def _published(self, event: WeightsPublished) -> None:
        self._training = False
        self._trained_at = self._now

    def _updated(self, event: WeightsUpdated) -> None:
        self._set_updating(event.instance, False)

    def _requested(self, event: BatchRequested) -> None:
        self._wanted_since = self._now

    # -- actions ---------------------------------------------------------------------------

    def _dispatched(self, action: Dispatch) -> None:
        gauge = self._gauges[action.instance]
        self._attempts[action.attempt] = gauge
        self._load(gauge, +1)
        if self._began is None:
            self._began = self._now
        group = action.request.rpartition("/")[0]
        if action.computed_tokens:
            self._resumed += 1
        if group not in self._launched:
            self._last_launch_step = len(self.steps)
            self._launched[group] = self._last_launch_step, self._now

    def _discarded(self, action: Discard) -> None:
        self._step.discarded_tokens += action.tokens
        self._finished_at.pop(action.request, None)

    def _loading(self, action: Pause | UpdateWeights) -> None:
        self._set_updating(action.instance, True)

    def _set_updating(self, instance: str, updating: bool) -> None:
        gauge = self._gauges.get(instance)
        if gauge is not None and gauge.updating != updating:
            gauge.updating = updating
            self._change(gauge)

    def _answered_client(self, action: Answer) -> None:
        self._finished_at.pop(action.sample.request, None)

    def _delivered(self, action: Deliver) -> None:
        step, now = self._step, self._now
        began = now if self._began is None else self._began
        pop = self._finished_at.pop
        times = [pop(sample.request, now) - began for sample in action.samples]
        finished = sorted([max(0.0, seconds) for seconds in times])
        step.t50_s, step.t90_s, step.t99_s = (_quantile(finished, q) for q in (0.5, 0.9, 0.99))
        step.version = action.version
        step.end_s = now
        if self._wanted_since is not None:
            step.trainer_wait_s = now - self._wanted_since
        step.samples = len(action.samples)
        version = action.version
        for sample in action.samples:
            step.tokens += sample.response_tokens
            for segment in sample.segments:
                if segment.version == version:
                    step.fresh_tokens += segment.tokens
        ages = Counter([sample.staleness for sample in action.samples])
        self._staleness.update(ages)
        step.max_staleness = max(ages, default=0)
        self._note_lengths(action)
        self._close_books()
        self.steps.append(step)
        self._step = Step(action.version + 1, now)
        self._began = now if self._in_flight else None
        self._wanted_since = None
        self._training = True

    def _note_lengths(self, action: Deliver) -> None:
        by_group: dict[str, list[int]] = {}
        for sample in action.samples:
            by_group.setdefault(sample.group, []).append(sample.response_tokens)
        self._lengths.append([length for lengths in by_group.values() for length in lengths])
        self._step.span_s = 0.0
        for group, lengths in by_group.items():
            launched, at = self._launched.pop(group, (len(self.steps), self._now))
            self._ages.append(len(self.steps) - launched)
            self._step.span_s = max(self._step.span_s, self._now - at)
            if self._offered is not None:
                offered = self._offered(group)
                self._offered_lengths.extend(offered)
                self._group_ratios.append(_mean(lengths) / _mean(offered))

    # -- summing up ------------------------------------------------------------------------

    def _bubbles(self, total_s: float) -> tuple[dict[str, float], dict[str, float], float]:
        """Instance-seconds idle and vacant by cause, and in all, to the end of training."""
        self._close_books()
        steps = [*self.steps, self._step]
        idle = {cause: sum(step.idle_s.get(cause, 0.0) for step in steps) for cause in CAUSES}
        vacant = {cause: sum(step.vacant_s.get(cause, 0.0) for step in steps) for cause in CAUSES}
        capacity = sum(step.capacity_s for step in steps)
        rest = max(0.0, total_s - self._now) * len(self._gauges)
        idle["barrier"] += rest
        vacant["barrier"] += rest
        return idle, vacant, capacity + rest

    def _steady(self) -> float | None:
        """Accepted tokens/s from the first delivery to the last step that launched a group."""
        last = min(self._last_launch_step, len(self.steps) - 1)
        if last < 1:
            return None
        seconds = self.steps[last].end_s - self.steps[0].end_s
        tokens = sum(step.tokens for step in self.steps[1 : last + 1])
        return _share(tokens, seconds) if seconds else None

    def _length_bias(self) -> LengthBias:
        if not self._offered_lengths:
            return LengthBias(1.0, 0.0, 0.0, 1.0)
        offered = np.sort(np.asarray(self._offered_lengths))
        steps = [np.sort(np.asarray(lengths)) for lengths in self._lengths]
        trained = np.sort(np.concatenate(steps))
        return LengthBias(
            mean_ratio=float(trained.mean() / offered.mean()),
            ks=_ks_distance(trained, offered),
            step_ks=_mean([_ks_distance(step, offered) for step in steps]),
            group_ratio=_mean(self._group_ratios),
        )

    _ON_EVENT: ClassVar[dict[type[Any], Callable[[Any, Any], None]]] = {
        InstanceJoined: _joined,
        InstanceLost: _gone,
        InstanceReported: _reported,
        RequestFinished: _answered,
        TurnFinished: _turn,
        ToolReturned: _tool,
        RequestInterrupted: _answered,
        RequestFailed: _failed,
        WeightsPublished: _published,
        WeightsUpdated: _updated,
        BatchRequested: _requested,
    }
    _ON_ACTION: ClassVar[dict[type[Any], Callable[[Any, Any], None]]] = {
        Dispatch: _dispatched,
        Discard: _discarded,
        Pause: _loading,
        UpdateWeights: _loading,
        Deliver: _delivered,
        Answer: _answered_client,
    }


def _add(totals: dict[str, float], cause: str, amount: float) -> None:
    if amount:
        totals[cause] = totals.get(cause, 0.0) + amount


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _quantile(ascending: Sequence[float], q: float) -> float:
    """The smallest value that at least a share q of all values does not exceed."""
    if not ascending:
        return 0.0
    return ascending[max(0, -int(-q * len(ascending) // 1) - 1)]


def _ks_distance(some: Lengths, all_: Lengths) -> float:
    """The largest gap between two empirical distributions, both given ascending.

    Between two values of `some` its distribution is flat and the other one only grows, so the
    largest gap lies at one of those values or just below it: nothing is done per value of `all_`.
    """
    values = np.unique(some)
    gaps = (
        np.searchsorted(some, values, side) / len(some)
        - np.searchsorted(all_, values, side) / len(all_)
        for side in SIDES
    )
    return float(max(np.abs(gap).max() for gap in gaps))
