"""All counts of a live run: the folds, which observe the driver's events."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollout_sched.core.model.actions import Answer, Deliver, Discard, Dispatch
from rollout_sched.core.model.events import (
    InstanceLeaving,
    InstanceLost,
    InstanceReported,
    RequestFailed,
    RequestInterrupted,
    WeightsPublished,
)
from rollout_sched.core.model.model import DeliveredSample, InstanceStatus
from rollout_sched.live import Driver
from rollout_sched.metrics import FleetTimes, Step, Trained
from rollout_sched.metrics.fold import Folded, Handler, Histogram
from rollout_sched.metrics.live import ClientTimes, LiveSteps, SampleTimes, WeightTimes

log = logging.getLogger("rollout_sched.run")


class RunLog:
    """Logs what happens in a run: steps, weights, instances that drain. Observes a driver. `serve`
    logs instances that join, the driver logs instances it loses."""

    def __init__(self, driver: Driver) -> None:
        driver.pump.watch(self._published, WeightsPublished)
        driver.pump.watch(self._leaving, InstanceLeaving)

    def step_ended(self, number: int, step: Step) -> None:
        """`number` counts from 1 since the start of this process."""
        _say(
            f"step {number} ended: {step.samples} samples, {step.tokens} tokens in "
            f"{step.rollout_s:.1f} s (half of it by {step.t50_s:.1f} s, 90 % by {step.t90_s:.1f} s)"
            f"; staleness up to {step.max_staleness}, {step.idle_bubble:.0%} idle",
            step=number,
            version=step.version,
            samples=step.samples,
            tokens=step.tokens,
            discarded_tokens=step.discarded_tokens,
            rollout_s=step.rollout_s,
            t50_s=step.t50_s,
            t90_s=step.t90_s,
            t99_s=step.t99_s,
            trainer_wait_s=step.trainer_wait_s,
            max_staleness=step.max_staleness,
            idle_bubble=step.idle_bubble,
        )

    def loaded(self, version: int, instances: int, seconds: float) -> None:
        """Every joined instance has the newest version."""
        _say(
            f"version {version} is on all {instances} instances, {seconds:.1f} s after publication",
            version=version,
            instances=instances,
            seconds=seconds,
        )

    def _published(self, event: WeightsPublished) -> None:
        whose = "" if event.loads else ", loaded by the trainer"
        _say(f"version {event.version} is published{whose}", version=event.version)

    def _leaving(self, event: InstanceLeaving) -> None:
        _say(f"instance {event.instance} drains", instance=event.instance)


def _say(line: str, **fields: Any) -> None:
    log.info("%s", line, extra={"fields": fields})


class Counters:
    """Counters for the metrics: a fold over the driver's events whose size does not grow with the
    number of requests.

    outcomes    ended requests: "answered", "delivered", or the reason of their discard
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
        self.gone["removed" if event.requested else "lost"] += 1
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


#: Seconds between two measurements; each costs a timer.
EVERY_S = 0.25

#: Upper bounds in seconds: from negligible to long enough for health checks to time out.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class LoopLag:
    """Measures how late the event loop runs callbacks that are due; every call waits at least this.
    `seconds`: histogram of how late a timer fired."""

    def __init__(self) -> None:
        self.seconds = Histogram(BOUNDS)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Measure until `stop`."""
        loop = asyncio.get_running_loop()
        self._wait(loop, loop.time() + EVERY_S)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._timer = loop.call_at(due, self._look, loop, due)

    def _look(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        self.seconds.add(max(0.0, now - due))
        self._wait(loop, now + EVERY_S)


class LiveMetrics:
    """Observes a driver from its creation on. The counts become metrics only on request
    (`prometheus.py`). Events such as the end of a step are logged."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        told = RunLog(driver)
        self.counters = Counters()
        self.clients = ClientTimes()
        self.samples = SampleTimes()
        self.trained = Trained()
        self.fleet = FleetTimes(self._state_of)
        self.weights = WeightTimes(told.loaded)
        self.steps = LiveSteps(told.step_ended)
        self.lag = LoopLag()
        folds = (self.counters, self.clients, self.samples, self.trained, self.fleet, self.weights)
        driver.pump.observers += [Folded(*folds).observe, self.steps.observe]

    def _state_of(self, instance: str) -> str:
        """As `core.model.InstanceStatus`, but a serving instance is "held" (by an administrator),
        "closed" (its gate is closed), "busy" or "idle"."""
        known = self._driver.view.instance(instance)
        if known is None:
            return ""
        if known.status is not InstanceStatus.SERVING:
            return str(known.status)
        if self._driver.supervisors[instance].control.held:
            return "held"
        if known.gate_closed:
            return "closed"
        return "busy" if known.in_flight else "idle"
