"""The asyncio driver: carries out the scheduler's actions and reports the results as events.

It decides nothing. It is the live counterpart of `simulators.replay.closed_loop`: with the same
events, both do the same.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.actions import (
    Answer,
    Deliver,
    Discard,
    Dispatch,
    Interrupt,
    Judge,
    Wake,
)
from rollout_sched.core.model.events import (
    Event,
    GroupJudged,
    GroupSubmitted,
    RequestAborted,
    RequestSubmitted,
    RequestWithdrawn,
    Restored,
    WeightsPublished,
)
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.live.event_pump import EventPump, Observer
from rollout_sched.live.instances.fleet import LiveFleet
from rollout_sched.live.instances.supervisor import InstanceSupervisor
from rollout_sched.live.instances.versions import FleetVersions
from rollout_sched.live.ports import Description, InstanceClient, Payload, SampleJudge, WeightLoader
from rollout_sched.live.requests.answers import AnswerChecks
from rollout_sched.live.requests.attempts import RunningAttempts
from rollout_sched.live.requests.judging import Judging
from rollout_sched.live.requests.link import DirectLink, SchedulerLink
from rollout_sched.live.requests.payloads import (
    Completions,
    OnDeliver,
    OnGroupFailed,
    PayloadFactory,
    Payloads,
)
from rollout_sched.live.requests.trajectories import ToolCalls
from rollout_sched.live.settings import DEFAULTS, Settings

log = logging.getLogger(__name__)


class Front:
    """Holds requests, their payloads, running attempts and tools, and carries out the scheduler's
    orders for them. Create it inside a running event loop.

    `orders`: the function that carries out an action, by its type. `run_id`: prefix of the name of
    every order to an instance.
    """

    def __init__(
        self,
        link: SchedulerLink,
        settings: Settings,
        run_id: str,
        on_deliver: OnDeliver | None = None,
        on_group_failed: OnGroupFailed | None = None,
    ) -> None:
        self.payloads = Payloads()
        self.endings = Completions(link, self.payloads, on_deliver, on_group_failed)
        self.tools = ToolCalls(link, self.payloads)
        self.attempts = RunningAttempts(link, self.payloads, self.tools, settings, run_id)
        self.orders: dict[type[Any], Callable[[Any], None]] = {
            Dispatch: self.attempts.dispatch,
            Interrupt: self.attempts.interrupt,
            Deliver: self.endings.deliver,
            Answer: self.endings.answer,
            Discard: self._discard,
        }

    def _discard(self, action: Discard) -> None:
        self.tools.discard(action)
        self.endings.discard(action)

    def fail_all(self, error: Exception) -> None:
        """Fail all requests and groups."""
        self.tools.cancel_all()
        self.endings.fail_all(error)

    async def close(self) -> None:
        """Stop everything without reporting it."""
        self.tools.cancel_all()
        await self.attempts.close()


class Driver:
    """One scheduler in front of a live fleet. Create it inside a running event loop.

    `on_broken` is called once if the scheduler breaks; `observers` see every event (see
    `EventPump`). `adopts`: the trainer begins with the version that the instances report. `run_id`:
    prefix of every attempt's name on the instances, which must differ between all drivers that an
    instance may see; random by default.
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
        self.checks = AnswerChecks(self.versions, self.view, settings, supervisors)
        link = DirectLink(self.pump, self.view, supervisors, self.checks)
        self.front = Front(link, settings, self.epoch, on_deliver, on_group_failed)
        self.fleet = LiveFleet(self.pump, settings, supervisors, self.front.attempts, self.versions)
        for kind, carry_out in (*self.front.orders.items(), *self.fleet.orders.items()):
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
        """Handle an event. Raises CallerError, and changes nothing, if it is invalid."""
        self.pump.tell(event)

    def restore(self, event: Restored, paused: set[str], model: str) -> None:
        """Continue a run that has ended. Call it before you add instances. `paused`: the instances
        that the earlier run had paused to load weights; `model`: what its instances served."""
        self.pump.resume_at(event.state.run.now)
        self.fleet.paused_before = paused
        self.fleet.model = model
        self.pump.tell(event)

    def restore_weights(self, loader: WeightLoader) -> None:
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
            self.pump.defer(self.on_broken)

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
        client: str = "",
    ) -> str:
        """Submit one request, which is answered when it finishes; returns its id."""
        self.pump.check()
        self._requests += 1
        request = f"{self.epoch}.{self._requests}"
        self.front.payloads.add(request, payload)
        try:
            self.pump.tell(
                RequestSubmitted(
                    request,
                    group or request,
                    prompt_tokens,
                    max_tokens,
                    session,
                    priority,
                    resumable=payload.resumable,
                    client=client,
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

    def abort(self, request: str) -> None:
        """A submitted request is answered with what it has, as soon as its attempt has stopped."""
        if request in self.front.payloads:
            self.pump.tell(RequestAborted(request))

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
        """Tokens of prompt and response that some instance takes; 0 without instances."""
        return self.fleet.max_model_len

    async def close(self) -> None:
        """Stop everything; the instances stay as they are."""
        if self.judging is not None:
            self.judging.cancel_all()
        await self.front.close()
        await self.fleet.close()
