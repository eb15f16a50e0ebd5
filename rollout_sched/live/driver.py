"""The asyncio driver: carries out the scheduler's actions and reports the results as events.

It decides nothing. It is the live counterpart of `simulators.replay.closed_loop`: with the same
events, both do the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from rollout_sched.core.actions import Judge, Wake
from rollout_sched.core.errors import CallerError
from rollout_sched.core.events import (
    Event,
    GroupJudged,
    GroupSubmitted,
    RequestSubmitted,
    RequestWithdrawn,
    Restored,
    WeightsPublished,
)
from rollout_sched.core.model import InstanceStatus
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.live.answer_checks import AnswerChecks
from rollout_sched.live.contradictions import Contradictions
from rollout_sched.live.endings import OnDeliver, OnGroupFailed
from rollout_sched.live.event_pump import EventPump, Observer
from rollout_sched.live.fleet_orders import FleetOrders
from rollout_sched.live.fleet_versions import FleetVersions
from rollout_sched.live.front import Front
from rollout_sched.live.instance_supervisor import InstanceSupervisor
from rollout_sched.live.judging import Judging
from rollout_sched.live.live_fleet import LiveFleet
from rollout_sched.live.payload_book import PayloadFactory
from rollout_sched.live.ports import Description, InstanceClient, Payload, SampleJudge, WeightLoader
from rollout_sched.live.scheduler_link import DirectLink
from rollout_sched.live.settings import DEFAULTS, Settings


class Driver:
    """One scheduler in front of a live fleet. Create it inside a running event loop.

    `on_broken` is called once if the scheduler breaks; `observers` see every event (see
    `EventPump`). `adopts`: the trainer begins with the version that the instances report. `run_id`:
    prefix of every attempt's name on the instances, which must differ between all drivers that an
    instance may see; random by default. `lending` knows the trainer that instances are lent to.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        settings: Settings = DEFAULTS,
        observers: Sequence[Observer] = (),
        on_deliver: OnDeliver | None = None,
        on_group_failed: OnGroupFailed | None = None,
        adopts: bool = False,
        run_id: str = "",
    ) -> None:
        self.view = scheduler.view
        self.settings = settings
        self.on_broken: Callable[[], None] | None = None
        self.epoch = run_id or secrets.token_hex(4)
        self._requests = 0
        self.pump = EventPump(scheduler, observers, self._end_all)
        self.versions = FleetVersions(self.pump, self.view, adopts=adopts)
        supervisors: dict[str, InstanceSupervisor] = {}
        contradictions = Contradictions(self.versions, self.view, settings)
        self.checks = AnswerChecks(self.view, supervisors, contradictions)
        link = DirectLink(self.pump, self.view, supervisors, self.checks)
        self.front = Front(link, settings, self.epoch, on_deliver, on_group_failed)
        self.fleet = LiveFleet(
            self.pump.tell, self.view, settings, supervisors, self.front.attempts, self.versions
        )
        self.lending = FleetOrders(self.fleet, self.pump.afterwards)
        for kind, carry_out in (*self.front.orders.items(), *self.lending.orders.items()):
            self.pump.on(kind, carry_out)
        self.pump.on(Wake, self.pump.wake)
        self.pump.on(Judge, self._fail_unjudged)
        self.judging: Judging | None = None

    @property
    def broken(self) -> Exception | None:
        """Why the scheduler cannot continue; None while it can."""
        return self.pump.broken

    @property
    def supervisors(self) -> dict[str, InstanceSupervisor]:
        """The supervisors of all known instances, by name."""
        return self.fleet.supervisors

    def tell(self, event: Event) -> None:
        """See `EventPump.tell`."""
        self.pump.tell(event)

    def restore(self, event: Restored, paused: set[str], model: str) -> None:
        """Continue a run that has ended. Call it before you add instances. `paused`: the instances
        that the earlier run had paused to load weights; `model`: what its instances served."""
        self.pump.go_on_from(event.state.run.now)
        self.fleet.paused_before = paused
        self.fleet.model = model
        self.pump.tell(event)

    def take_up_weights(self, loader: WeightLoader) -> None:
        """`loader` loads the version that an earlier run published."""
        self.fleet.loader = loader

    def judge_by(self, judge: SampleJudge) -> None:
        """Judge groups with `judge` from now on, if they were submitted to be judged."""
        self.judging = Judging(self.pump, self.front.payloads, judge)
        self.pump.on(Judge, self.judging.settle)

    def _fail_unjudged(self, action: Judge) -> None:
        self.front.payloads.note_group_error(action.group, CallerError("no reward function is set"))
        self.pump.tell(GroupJudged(action.group, action.judgement, "failed"))

    def _end_all(self, error: Exception) -> None:
        if self.judging is not None:
            self.judging.cancel_all()
        self.front.fail_all(error)
        if self.on_broken is not None:
            self.pump.afterwards(self.on_broken)

    # -- requests --------------------------------------------------------------------------

    def submit_group(self, submitted: GroupSubmitted, make: PayloadFactory) -> None:
        """Submit a group; `make(index)` is called when a sample is first dispatched."""
        self.pump.check()
        self.front.payloads.add_group(submitted.group, make)
        try:
            self.pump.tell(submitted)
        except CallerError:
            self.front.payloads.forget_group(submitted.group)
            raise

    def submit(
        self,
        payload: Payload,
        prompt_tokens: int,
        max_tokens: int,
        group: str = "",
        session: str = "",
        priority: int = 0,
    ) -> str:
        """Submit one request, which is answered when it finishes; returns its id."""
        self.pump.check()
        self._requests += 1
        request = f"{self.epoch}.{self._requests}"
        self.front.payloads.add(request, payload)
        try:
            self.pump.tell(
                RequestSubmitted(
                    request, group or request, prompt_tokens, max_tokens, session, priority
                )
            )
        except CallerError:
            self.front.payloads.forget(request)
            raise
        return request

    def withdraw(self, request: str) -> None:
        """The client of a submitted request has gone."""
        if request in self.front.payloads:
            self.pump.tell(RequestWithdrawn(request))

    # -- weights ---------------------------------------------------------------------------

    def publish(self, version: int, loader: WeightLoader) -> None:
        """Publish a version; `loader` loads it into each instance when the scheduler orders it."""
        self.pump.check()
        before, self.fleet.loader = self.fleet.loader, loader
        try:
            self.pump.tell(WeightsPublished(version))
        except CallerError:
            self.fleet.loader = before
            raise
        self.versions.published()

    def give_back(self, instance: str) -> None:
        """The trainer no longer uses an instance that was lent to it. Raises CallerError if it is
        not lent."""
        found = self.view.instance(instance)
        if found is None or found.status is not InstanceStatus.LENT:
            raise CallerError(f"instance {instance!r} is not lent, or was lost since")
        self.lending.take_back(instance)

    # -- instances -------------------------------------------------------------------------

    async def add_instance(
        self, client: InstanceClient, *, patient: bool = False
    ) -> Description | None:
        """Add an instance. Raises CallerError or InstanceError if it cannot be used.

        With `patient`, returns None for an instance that does not answer yet; it joins when it
        does.
        """
        return await self.fleet.add(client, patient=patient)

    async def remove_instance(self, name: str, *, drain: bool = False) -> None:
        """Remove an instance; its requests continue elsewhere, or with `drain` finish first."""
        await self.fleet.remove(name, drain=drain)

    def max_model_len(self) -> int:
        """Tokens of prompt and response that every instance accepts; 0 without instances."""
        return self.fleet.max_model_len()

    async def close(self) -> None:
        """Stop everything; the instances stay as they are."""
        if self.judging is not None:
            self.judging.cancel_all()
        await self.front.close()
        await self.fleet.close()
