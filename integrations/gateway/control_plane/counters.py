"""What the metrics count: a fold over what the driver sees, that grows with no request."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Any

from rollout_sched.core.actions import Action, Answer, Deliver, Discard, Dispatch
from rollout_sched.core.events import Event, InstanceLost, InstanceReported
from rollout_sched.core.model import Sample

#: Upper bounds of the staleness histogram, in versions.
STALENESS_BOUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16)


_OF_INSTANCES = (InstanceReported, InstanceLost)


class Counters:
    """An observer of the driver.

    events      by type
    outcomes    requests that are over: "answered", "delivered", or the reason of their discard
    tokens      response tokens by what became of them: as above, with every discard counted
    attempts    dispatches, and of them those that went on from tokens
    staleness   samples delivered, by bucket; the last is above all bounds
    generated   tokens by instance, as its last poll said
    """

    def __init__(self) -> None:
        self.events: Counter[type[Any]] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.attempts = 0
        self.resumed = 0
        self.batches = 0
        self.staleness = [0] * (len(STALENESS_BOUNDS) + 1)
        self.staleness_sum = 0
        self.generated: dict[str, int] = {}

    def observe(self, now: float, event: Event, actions: list[Action]) -> None:
        kind = type(event)
        self.events[kind] += 1
        if kind in _OF_INSTANCES:
            self._instance_event(event)
        for action in actions:
            count = _COUNT.get(type(action))
            if count is not None:
                count(self, action)

    def _instance_event(self, event: Event) -> None:
        if isinstance(event, InstanceReported):
            self.generated[event.instance] = event.generated_tokens
        elif isinstance(event, InstanceLost):
            self.generated.pop(event.instance, None)

    def dispatched(self, action: Dispatch) -> None:
        self.attempts += 1
        self.resumed += action.response_tokens > 0

    def answered(self, action: Answer) -> None:
        self._over("answered", action.sample)

    def delivered(self, action: Deliver) -> None:
        self.batches += action.last
        for sample in action.samples:
            self._delivered(sample)

    def discarded(self, action: Discard) -> None:
        self.tokens[action.reason] += action.tokens
        if action.ends:
            self.outcomes[action.reason] += 1

    def _over(self, outcome: str, sample: Sample) -> None:
        self.outcomes[outcome] += 1
        self.tokens[outcome] += sample.response_tokens

    def _delivered(self, sample: Sample) -> None:
        self._over("delivered", sample)
        self.staleness[bisect_left(STALENESS_BOUNDS, sample.staleness)] += 1
        self.staleness_sum += sample.staleness


_COUNT: dict[type[Any], Callable[[Counters, Any], None]] = {
    Dispatch: Counters.dispatched,
    Answer: Counters.answered,
    Deliver: Counters.delivered,
    Discard: Counters.discarded,
}
