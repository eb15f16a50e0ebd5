"""The steps of a live run, counted from the first group on as in the replay's report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout_sched.core.model.actions import (
    OF_ONE_SAMPLE,
    Action,
    Answer,
    Deliver,
    Discard,
    Dispatch,
    UpdateWeights,
)
from rollout_sched.core.model.events import (
    BatchRequested,
    Event,
    GroupSubmitted,
    InstanceJoined,
    InstanceLost,
    RequestFinished,
    RequestSubmitted,
    Restored,
    TrajectoryEnded,
    WeightsPublished,
    WeightsUpdated,
)
from rollout_sched.metrics.fold import SECONDS, TOKENS, Handler, Histogram
from rollout_sched.metrics.metrics import Metrics
from rollout_sched.metrics.results import Step

#: Events that are used before there is a trainer.
_LOOKED_AT = frozenset((InstanceJoined, InstanceLost, GroupSubmitted, BatchRequested))


class LiveSteps:
    """An observer of a driver. Without a trainer it costs only a look at each event's type.

    duration        seconds from one delivery to the next
    idle_s          instance-seconds of the steps with nothing in flight, by cause
    capacity_s      instance-seconds of the steps
    trainer_wait_s  seconds that the trainer waited for the steps
    last            the last finished step

    Each finished step stays in memory: about a kilobyte.
    """

    def __init__(self, on_step: Callable[[int, Step], object] | None = None) -> None:
        self.duration = Histogram(SECONDS)
        self.idle_s: Counter[str] = Counter()
        self.capacity_s = 0.0
        self.trainer_wait_s = 0.0
        self.last: Step | None = None
        self._on_step = on_step
        self._joined: dict[str, InstanceJoined] = {}
        self._metrics: Metrics | None = None
        self._began_s = 0.0
        self._ended = 0

    @property
    def delivered(self) -> Sequence[Step]:
        """All finished steps."""
        return () if self._metrics is None else self._metrics.steps

    def observe(self, now: float, event: Event, actions: Sequence[Action]) -> None:
        metrics = self._metrics
        if metrics is None:
            if type(event) not in _LOOKED_AT or not self._begins(event):
                return
            metrics = self._metrics = self._begin(now)
        metrics.observe(now, event, actions)
        while self._ended < len(metrics.steps):
            self._step_ended(metrics.steps[self._ended])

    def _begins(self, event: Event) -> bool:
        """Whether the event shows that there is a trainer."""
        if isinstance(event, InstanceJoined):
            self._joined[event.instance] = event
        elif isinstance(event, InstanceLost):
            self._joined.pop(event.instance, None)
        return isinstance(event, GroupSubmitted | BatchRequested)

    def _begin(self, now: float) -> Metrics:
        """`Metrics` needs a batch for the occupancy bubble, which is not shown."""
        self._began_s = now
        slots = (event.slots for event in self._joined.values())
        metrics = Metrics(max(slots, default=1))
        for event in self._joined.values():
            metrics.observe(now, event, ())
        return metrics

    def _step_ended(self, step: Step) -> None:
        self._ended += 1
        self.last = step
        self.duration.add(step.end_s - max(step.start_s, self._began_s))
        self.idle_s.update(step.idle_s)
        self.capacity_s += step.capacity_s
        self.trainer_wait_s += step.trainer_wait_s
        if self._on_step is not None:
            self._on_step(self._ended, step)


class ClientTimes:
    """How long clients wait for their responses: a fold whose memory does not grow with time.

    wait      seconds from submission to the first dispatch
    duration  seconds from submission to the answer
    tokens    of the answered responses
    """

    __slots__ = ("_sent", "_waiting", "duration", "tokens", "wait")

    def __init__(self) -> None:
        self.wait = Histogram(SECONDS)
        self.duration = Histogram(SECONDS)
        self.tokens = Histogram(TOKENS)
        self._waiting: dict[str, float] = {}  # time of submission, until the first dispatch
        self._sent: dict[str, float] = {}  # the same, until the answer

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            RequestSubmitted: self._asked,
            Dispatch: self._dispatched,
            Answer: self._answered,
            Discard: self._discarded,
            Restored: self._restored,
        }

    def _asked(self, now: float, event: RequestSubmitted) -> None:
        self._waiting[event.request] = now

    def _dispatched(self, now: float, action: Dispatch) -> None:
        since = self._waiting.pop(action.request, None)
        if since is not None:
            self._sent[action.request] = since
            self.wait.add(now - since)

    def _answered(self, now: float, action: Answer) -> None:
        since = self._sent.pop(action.sample.request, None)
        if since is not None:
            self.duration.add(now - since)
        self.tokens.add(action.sample.response_tokens)

    def _discarded(self, now: float, action: Discard) -> None:
        if action.ends:
            self._waiting.pop(action.request, None)
            self._sent.pop(action.request, None)

    def _restored(self, now: float, event: Restored) -> None:
        """The connections of earlier requests ended with the earlier scheduler."""
        self._waiting.clear()
        self._sent.clear()


class SampleTimes:
    """How long the trainer's samples take: a fold whose memory does not grow with time.

    wait      seconds from a group's submission to its first dispatch
    duration  seconds from a sample's first dispatch to its end
    """

    __slots__ = ("_started", "_under_way", "_waiting", "duration", "wait")

    def __init__(self) -> None:
        self.wait = Histogram(SECONDS)
        self.duration = Histogram(SECONDS)
        self._waiting: dict[str, float] = {}  # groups, since their submission
        self._under_way: dict[str, float] = {}  # groups, since their first dispatch, oldest first
        self._started: dict[str, float] = {}  # samples, since their first dispatch

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            GroupSubmitted: self._submitted,
            RequestFinished: self._finished,
            TrajectoryEnded: self._finished,
            Restored: self._restored,
            Dispatch: self._dispatched,
            Deliver: self._delivered,
            Discard: self._discarded,
        }

    def oldest_s(self, now: float) -> float:
        """Seconds since the oldest group in progress was first dispatched; 0 without any."""
        return now - next(iter(self._under_way.values()), now)

    def _submitted(self, now: float, event: GroupSubmitted) -> None:
        self._waiting[event.group] = now

    def _dispatched(self, now: float, action: Dispatch) -> None:
        group = action.group
        if not group:
            return
        since = self._waiting.pop(group, None)
        if since is not None:
            self.wait.add(now - since)
            self._under_way[group] = now
        if action.request not in self._started:
            self._started[action.request] = now

    def _finished(self, now: float, event: RequestFinished | TrajectoryEnded) -> None:
        since = self._started.pop(event.request, None)
        if since is not None:
            self.duration.add(now - since)

    def _delivered(self, now: float, action: Deliver) -> None:
        for sample in action.samples:
            self._under_way.pop(sample.group, None)

    def _discarded(self, now: float, action: Discard) -> None:
        if not (action.ends and action.group):
            return
        self._started.pop(action.request, None)
        if action.reason not in OF_ONE_SAMPLE:
            self._waiting.pop(action.group, None)
            self._under_way.pop(action.group, None)

    def _restored(self, now: float, event: Restored) -> None:
        """Start times do not survive a restart."""
        for times in (self._waiting, self._under_way, self._started):
            times.clear()


#: Called with a version, the number of instances that have it, and seconds since its publication.
OnLoaded = Callable[[int, int, float], object]


class WeightTimes:
    """How long new weights take to reach one instance and all instances.

    load   seconds from the order to load weights until an instance reports that it has them
    sync   seconds from a publication until every current instance has the version

    `on_loaded` is called when every instance has it.
    """

    def __init__(self, on_loaded: OnLoaded | None = None) -> None:
        self.load = Histogram(SECONDS)
        self.sync = Histogram(SECONDS)
        self._on_loaded = on_loaded
        self._ordered: dict[str, float] = {}
        self._versions: dict[str, int] = {}
        self._published: tuple[int, float] | None = None  # version and time, until all have it

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            InstanceJoined: self._joined,
            InstanceLost: self._lost,
            Restored: self._restored,
            WeightsPublished: self._publish,
            UpdateWeights: self._order,
            WeightsUpdated: self._updated,
        }

    def _joined(self, now: float, event: InstanceJoined) -> None:
        self._versions[event.instance] = event.version
        self._ordered.pop(event.instance, None)

    def _lost(self, now: float, event: InstanceLost) -> None:
        self._versions.pop(event.instance, None)
        self._ordered.pop(event.instance, None)
        self._look(now)

    def _restored(self, now: float, event: Restored) -> None:
        """The instances join again."""
        self._versions.clear()
        self._ordered.clear()

    def _publish(self, now: float, event: WeightsPublished) -> None:
        if self._published is None or self._published[0] < event.version:
            self._published = event.version, now

    def _order(self, now: float, action: UpdateWeights) -> None:
        self._ordered[action.instance] = now

    def _updated(self, now: float, event: WeightsUpdated) -> None:
        since = self._ordered.pop(event.instance, None)
        if since is not None:
            self.load.add(now - since)
        if event.instance in self._versions:
            self._versions[event.instance] = event.version
        self._look(now)

    def _look(self, now: float) -> None:
        if self._published is None or not self._versions:
            return
        version, at = self._published
        if min(self._versions.values()) < version:
            return
        self._published = None
        self.sync.add(now - at)
        if self._on_loaded is not None:
            self._on_loaded(version, len(self._versions), now - at)
