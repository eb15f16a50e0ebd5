"""Counters for the metrics: a fold over the driver's events, with a size independent of the number
of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollout_sched.core.actions import Answer, Deliver, Discard, Dispatch
from rollout_sched.core.events import (
    InstanceLost,
    InstanceReported,
    RequestFailed,
    RequestInterrupted,
)
from rollout_sched.core.model import DeliveredSample
from rollout_sched.metrics.fold import Handler


class Counters:
    """outcomes    ended requests: "answered", "delivered", or the reason of their discard
    tokens      response tokens by outcome, as above, with every discard counted
    attempts    dispatches; `resumed` counts those that resumed from tokens
    failed      attempts without an answer, by blame
    gone        instances that left: "lost", or "removed" on request
    reports     the last poll of each instance that has joined
    """

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.attempts = 0
        self.resumed = 0
        self.interrupted = 0
        self.failed: Counter[str] = Counter()
        self.batches = 0
        self.gone: Counter[str] = Counter()
        self.reports: dict[str, InstanceReported] = {}

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            RequestInterrupted: self._interrupted,
            RequestFailed: self._failed,
            InstanceReported: self._reported,
            InstanceLost: self._lost,
            Dispatch: self._dispatched,
            Answer: self._answered,
            Deliver: self._delivered,
            Discard: self._discarded,
        }

    def _interrupted(self, now: float, event: RequestInterrupted) -> None:
        self.interrupted += 1

    def _failed(self, now: float, event: RequestFailed) -> None:
        self.failed[event.blame] += 1

    def _reported(self, now: float, event: InstanceReported) -> None:
        self.reports[event.instance] = event

    def _lost(self, now: float, event: InstanceLost) -> None:
        self.gone["removed" if event.asked else "lost"] += 1
        self.reports.pop(event.instance, None)

    def _dispatched(self, now: float, action: Dispatch) -> None:
        self.attempts += 1
        self.resumed += action.response_tokens > 0

    def _answered(self, now: float, action: Answer) -> None:
        self._over("answered", action.sample)

    def _delivered(self, now: float, action: Deliver) -> None:
        self.batches += action.last
        for sample in action.samples:
            self._over("delivered", sample)

    def _discarded(self, now: float, action: Discard) -> None:
        self.tokens[action.reason] += action.tokens
        if action.ends:
            self.outcomes[action.reason] += 1

    def _over(self, outcome: str, sample: DeliveredSample) -> None:
        self.outcomes[outcome] += 1
        self.tokens[outcome] += sample.response_tokens
