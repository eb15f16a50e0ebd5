"""All that is counted of a live run, for whoever asks: the folds, shown what the driver sees."""

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
    """Looks on at a driver from its making on; what is counted is turned into metrics only when
    somebody asks for them (`prometheus.py`). A step's end and the like are logged."""

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
        """As in `core.model.InstanceStatus`, but that one which serves is "held" by an
        administrator, has its gate "closed" by somebody, is "busy" or is "idle"."""
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
