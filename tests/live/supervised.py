"""A supervisor without a driver: what it tells is noted, updates go on as the scheduler's do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout_sched.core.model.events import Event, InstancePaused, WeightsUpdated
from rollout_sched.live.instances.admission import RequiredModel
from rollout_sched.live.instances.supervisor import InstanceSupervisor
from rollout_sched.live.instances.versions import FleetVersions
from rollout_sched.live.ports import Description, WeightLoader
from rollout_sched.live.requests.attempt import LiveAttempt
from rollout_sched.live.settings import Settings
from tests.core.told import make_scheduler


class Attempts:
    """All on the one instance (`fleet.FleetAttempts`); what is ordered for them is done."""

    def __init__(self) -> None:
        self.running: list[LiveAttempt] = []

    def on(self, instance: str) -> Sequence[LiveAttempt]:
        return self.running

    async def answered(self, instance: str) -> None: ...

    def stop(self, attempt: int, reason: str) -> None: ...

    def reject_streamed(self, attempt: int) -> None: ...


class Fleet:
    """Of one instance (`instances.fleet.LiveFleet`). Make it inside a running event loop.

    `joined`: it has joined, and was not lost; `updating`: from a pause for an update until its
    resume has been ordered, or the instance is lost.
    """

    first_version = 0

    def __init__(self, client: Any, settings: Settings) -> None:
        self.settings = settings
        self.told: list[Event] = []
        self.losses: list[str] = []
        self.joined = False
        self.updating = False
        self.attempts = Attempts()
        self.version = 0
        self.newest_version = 0
        self.can_load = False
        self.versions = FleetVersions(self, make_scheduler().view)
        self._loader: WeightLoader
        self.supervisor = InstanceSupervisor(client, self)

    def update(self, loader: WeightLoader) -> None:
        """Pause it, load what comes next, and resume it."""
        self.version += 1
        self.updating, self._loader = True, loader
        self.supervisor.control.pause("keep", False)

    async def pausing(self, instance: str) -> None: ...

    def resumed(self, name: str) -> None: ...

    def tell(self, event: Event) -> None:
        self.told.append(event)
        if not self.updating:
            return
        if isinstance(event, InstancePaused):
            self.supervisor.control.update(self.version, self._loader)
        elif isinstance(event, WeightsUpdated):
            self.updating = False
            self.supervisor.control.resume()

    def required_model(self, instance: str) -> RequiredModel:
        return RequiredModel()

    def check_precision(self, instance: str, precision: str) -> None: ...

    def join(self, name: str, description: Description, version: int) -> None:
        assert not self.joined
        self.joined = True

    def lose(self, name: str, reason: str) -> None:
        self.joined = self.updating = False
        self.losses.append(reason)
