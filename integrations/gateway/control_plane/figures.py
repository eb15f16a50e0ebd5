"""All counts of a live run: the folds, which observe the driver's events."""

from __future__ import annotations

from rollout_sched.core.model import InstanceStatus
from rollout_sched.integrations.gateway.control_plane.counters import Counters
from rollout_sched.integrations.gateway.control_plane.loop_lag import LoopLag
from rollout_sched.integrations.gateway.control_plane.run_log import RunLog
from rollout_sched.live.driver import Driver
from rollout_sched.metrics.client_times import ClientTimes
from rollout_sched.metrics.fleet_times import FleetTimes
from rollout_sched.metrics.folded import Folded
from rollout_sched.metrics.live_steps import LiveSteps
from rollout_sched.metrics.sample_times import SampleTimes
from rollout_sched.metrics.trained import Trained
from rollout_sched.metrics.weight_times import WeightTimes


class Figures:
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
        if self._driver.supervisors[instance].pauses.held:
            return "held"
        if known.gate_closed:
            return "closed"
        return "busy" if known.in_flight else "idle"
