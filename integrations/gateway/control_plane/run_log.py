"""Logs what happens in a run: steps, weights, instances that drain."""

from __future__ import annotations

import logging
from typing import Any

from rollout_sched.core.events import InstanceLeaving, WeightsPublished
from rollout_sched.live.driver import Driver
from rollout_sched.metrics.step import Step

log = logging.getLogger("rollout_sched.run")


class RunLog:
    """Observes a driver. `serve` logs instances that join, the driver logs instances it loses."""

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
