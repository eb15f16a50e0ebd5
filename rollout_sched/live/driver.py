"""The asyncio driver: carries out the scheduler's actions, and tells it what comes of them.

It decides nothing. It is the live twin of `simulators.replay.closed_loop`: shown the same events,
both do the same.
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
    """One scheduler in front of a live fleet. Make it inside a running event loop.

    `on_broken` is called once if the scheduler cannot go on; `observers` see all that happens (see
    `EventPump`). `adopts`: the trainer begins with the version that the instances say they have.
    `run_id` begins the name of every attempt on the instances: another for each driver that they
    may ever see; by default by chance. To whom instances are lent stands in `lending`.
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
        """Why the scheduler cannot go on; None while it can."""
        return self.pump.broken

    @property
    def supervisors(self) -> dict[str, InstanceSupervisor]:
        """Of all instances that are here, by name."""
        return self.fleet.supervisors

    def tell(self, event: Event) -> None:
        """See `EventPump.tell`."""
        self.pump.tell(event)

    def restore(self, event: Restored, paused: set[str]) -> None:
        """Go on with a run that has ended. To be called before instances are added: `paused` are
        those that it had paused to load weights."""
        self.pump.go_on_from(event.state.run.now)
        self.fleet.paused_before = paused
        self.pump.tell(event)

    def take_up_weights(self, loader: WeightLoader) -> None:
        """What was published in an earlier run is loaded by this one."""
        self.fleet.loader = loader

    def judge_by(self, judge: SampleJudge) -> None:
        """Have groups judged that are submitted to be, from now on."""
        self.judging = Judging(self.pump, self.front.payloads, judge)
        self.pump.on(Judge, self.judging.settle)

    def _fail_unjudged(self, action: Judge) -> None:
        self.front.payloads.note_group_error(action.group, CallerError("nobody judges groups here"))
        self.pump.tell(GroupJudged(action.group, action.judgement, "failed"))

    def _end_all(self, error: Exception) -> None:
        if self.judging is not None:
            self.judging.cancel_all()
        self.front.fail_all(error)
        if self.on_broken is not None:
            self.pump.afterwards(self.on_broken)

    # -- requests --------------------------------------------------------------------------

    def submit_group(self, submitted: GroupSubmitted, make: PayloadFactory) -> None:
        """Ask for a group; `make(index)` is called when a sample is first dispatched."""
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
        """Ask for one response, to be answered when it is finished; returns the request's id."""
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
        """New weights; `loader` brings them to each instance when the scheduler orders it."""
        self.pump.check()
        before, self.fleet.loader = self.fleet.loader, loader
        try:
            self.pump.tell(WeightsPublished(version))
        except CallerError:
            self.fleet.loader = before
            raise
        self.versions.published()

    def give_back(self, instance: str) -> None:
        """The trainer uses an instance no longer that was lent to it. Raises CallerError if it is
        not lent."""
        found = self.view.instance(instance)
        if found is None or found.status is not InstanceStatus.LENT:
            raise CallerError(f"instance {instance!r} is not lent, or has been lost since")
        self.lending.take_back(instance)

    # -- instances -------------------------------------------------------------------------

    async def add_instance(
        self, client: InstanceClient, *, patient: bool = False
    ) -> Description | None:
        """Take an instance in. Raises CallerError or InstanceError if it cannot be used.

        With `patient` one that does not answer yet is None, and joins once it does.
        """
        return await self.fleet.add(client, patient=patient)

    async def remove_instance(self, name: str, *, drain: bool = False) -> None:
        """Let an instance go; what it holds moves on, or with `drain` is finished first."""
        await self.fleet.remove(name, drain=drain)

    def max_model_len(self) -> int:
        """Tokens of prompt and response that every instance here takes; 0 without instances."""
        return self.fleet.max_model_len()

    async def close(self) -> None:
        """Stop everything; instances are left as they are."""
        if self.judging is not None:
            self.judging.cancel_all()
        await self.front.close()
        await self.fleet.close()
