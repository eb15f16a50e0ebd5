"""The asyncio driver: carries out the scheduler's actions, and tells it what comes of them.

It decides nothing. It is the live twin of `simulators.replay.closed_loop`: shown the same events,
both do the same.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence

from rollout_sched.core.actions import (
    Answer,
    Deliver,
    Discard,
    Dispatch,
    Interrupt,
    Lend,
    Pause,
    Reclaim,
    Release,
    Resume,
    UpdateWeights,
    Wake,
)
from rollout_sched.core.errors import CallerError
from rollout_sched.core.events import (
    Event,
    GroupSubmitted,
    InstanceJoined,
    InstanceLeaving,
    InstanceLost,
    RequestSubmitted,
    RequestWithdrawn,
    Restored,
    WeightsPublished,
)
from rollout_sched.core.model import InstanceStatus
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.live.attempt_table import AttemptTable
from rollout_sched.live.contradictions import Contradictions
from rollout_sched.live.event_pump import EventPump, Observer
from rollout_sched.live.fleet_versions import FleetVersions
from rollout_sched.live.instance_supervisor import InstanceSupervisor
from rollout_sched.live.payload_book import (
    OnDeliver,
    OnGroupFailed,
    PayloadBook,
    PayloadFactory,
)
from rollout_sched.live.ports import (
    Description,
    InstanceClient,
    Payload,
    WeightLoader,
    brings_weights,
)
from rollout_sched.live.settings import DEFAULTS, Settings
from rollout_sched.live.tool_calls import ToolCalls

log = logging.getLogger(__name__)


class Driver:
    """One scheduler in front of a live fleet. Make it inside a running event loop.

    `on_broken` is called once if the scheduler cannot go on; `observers` see all that happens (see
    `EventPump`). `on_lent` is called with an instance that stands still, so that the trainer may
    have its GPUs, `on_reclaimed` with one that it is to `give_back`. `adopts`: the trainer begins
    with the version that the instances say they have. `run_id` begins the name of every attempt on
    the instances: another for each driver that they may ever see; by default by chance.
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
        self.on_lent: Callable[[str], None] | None = None
        self.on_reclaimed: Callable[[str], None] | None = None
        self.first_version = self.view.run.version
        self.supervisors: dict[str, InstanceSupervisor] = {}
        self._run_id = run_id or secrets.token_hex(4)
        self._paused_before: set[str] = set()
        self._requests = 0
        self._loader: WeightLoader | None = None
        self.pump = EventPump(scheduler, observers, self._end_all)
        self.versions = FleetVersions(self.pump, self.view, adopts=adopts)
        self.payloads = PayloadBook(self.pump, on_deliver, on_group_failed)
        self.tools = ToolCalls(self.pump, self.payloads)
        self.attempts = AttemptTable(
            self.pump,
            self.payloads,
            self.tools,
            self.supervisors,
            Contradictions(self.versions, self.view, settings),
            settings,
            self._run_id,
        )
        self._carry_out_actions()

    def _carry_out_actions(self) -> None:
        pump = self.pump
        pump.on(Dispatch, self.attempts.dispatch)
        pump.on(Interrupt, self.attempts.interrupt)
        pump.on(Deliver, self.payloads.deliver)
        pump.on(Answer, self.payloads.answer)
        pump.on(Discard, self._discard)
        pump.on(Pause, self._pause)
        pump.on(Resume, self._resume)
        pump.on(Release, self._release)
        pump.on(UpdateWeights, self._update_weights)
        pump.on(Lend, self._lend)
        pump.on(Reclaim, self._reclaim)
        pump.on(Wake, pump.wake)

    @property
    def epoch(self) -> str:
        """Names this run of a scheduler; the next one has another name."""
        return self._run_id

    @property
    def broken(self) -> Exception | None:
        """Why the scheduler cannot go on; None while it can."""
        return self.pump.broken

    def tell(self, event: Event) -> None:
        """See `EventPump.tell`."""
        self.pump.tell(event)

    def restore(self, event: Restored, paused: set[str]) -> None:
        """Go on with a run that has ended. To be called before instances are added: `paused` are
        those that it had paused to load weights."""
        self.pump.go_on_from(event.state.run.now)
        self._paused_before = paused
        self.pump.tell(event)

    def take_up_weights(self, loader: WeightLoader) -> None:
        """What was published in an earlier run is loaded by this one."""
        self._loader = loader

    def _discard(self, action: Discard) -> None:
        self.tools.discard(action)
        self.payloads.discard(action)

    def _end_all(self, error: Exception) -> None:
        self.tools.cancel_all()
        self.payloads.fail_all(error)
        if self.on_broken is not None:
            self.pump.afterwards(self.on_broken)

    # -- requests --------------------------------------------------------------------------

    def submit_group(self, submitted: GroupSubmitted, make: PayloadFactory) -> None:
        """Ask for a group; `make(index)` is called when a sample is first dispatched."""
        self.pump.check()
        self.payloads.add_group(submitted.group, make)
        try:
            self.pump.tell(submitted)
        except CallerError:
            self.payloads.group_refused(submitted.group)
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
        request = f"{self._run_id}.{self._requests}"
        self.payloads.add(request, payload)
        try:
            self.pump.tell(
                RequestSubmitted(
                    request, group or request, prompt_tokens, max_tokens, session, priority
                )
            )
        except CallerError:
            self.payloads.refused(request)
            raise
        return request

    def withdraw(self, request: str) -> None:
        """The client of a submitted request has gone."""
        if request in self.payloads:
            self.pump.tell(RequestWithdrawn(request))

    # -- weights ---------------------------------------------------------------------------

    def publish(self, version: int, loader: WeightLoader) -> None:
        """New weights; `loader` brings them to each instance when the scheduler orders it."""
        self.pump.check()
        before, self._loader = self._loader, loader
        try:
            self.pump.tell(WeightsPublished(version))
        except CallerError:
            self._loader = before
            raise
        self.versions.published()

    def _pause(self, action: Pause) -> None:
        self._supervisor(action.instance).orders.pause(action.mode, action.clear_cache)

    def _resume(self, action: Resume) -> None:
        self._supervisor(action.instance).orders.resume()

    def _update_weights(self, action: UpdateWeights) -> None:
        self._supervisor(action.instance).orders.update(action.version, self._loader)

    # -- lending ---------------------------------------------------------------------------

    def give_back(self, instance: str) -> None:
        """The trainer uses an instance no longer that was lent to it. Raises CallerError if it is
        not lent."""
        found = self.view.instance(instance)
        if found is None or found.status is not InstanceStatus.LENT:
            raise CallerError(f"instance {instance!r} is not lent, or has been lost since")
        self._supervisor(instance).orders.take_back()

    def _lend(self, action: Lend) -> None:
        self._supervisor(action.instance).orders.lend(self._lent)

    def _lent(self, instance: str) -> None:
        if self.on_lent is None:
            return
        try:
            self.on_lent(instance)
        except Exception:  # it is the trainer's: the instance has done what it was to do
            log.exception("instance %s was lent to the trainer, which failed", instance)

    def _reclaim(self, action: Reclaim) -> None:
        if self.on_reclaimed is not None:
            self.pump.afterwards(self.on_reclaimed, action.instance)

    # -- instances -------------------------------------------------------------------------

    async def add_instance(
        self, client: InstanceClient, *, patient: bool = False
    ) -> Description | None:
        """Take an instance in. Raises CallerError or InstanceError if it cannot be used.

        With `patient` one that does not answer yet is None, and joins once it does.
        """
        if client.name in self.supervisors:
            raise CallerError(f"instance {client.name!r} is here already")
        supervisor = InstanceSupervisor(client, self)
        self.supervisors[client.name] = supervisor
        if client.name in self._paused_before:
            self._paused_before.discard(client.name)
            supervisor.note_paused()
        try:
            return await supervisor.start(patient=patient)
        except BaseException:
            del self.supervisors[client.name]
            await supervisor.close()
            raise

    async def remove_instance(self, name: str, *, drain: bool = False) -> None:
        """Let an instance go; what it holds moves on, or with `drain` is finished first."""
        supervisor = self._supervisor(name)
        if drain and supervisor.joined:
            self.tell(InstanceLeaving(name))
            await supervisor.membership.drained.wait()
        if self.supervisors.get(name) is not supervisor:
            return  # removed while it drained
        self.lose(name, "removed")
        del self.supervisors[name]
        self.versions.forget(name)
        await supervisor.remove()

    @property
    def newest_version(self) -> int:
        """The trainer's."""
        return self.view.run.version

    @property
    def can_load(self) -> bool:
        """Whether an instance that joins can be brought to the newest version."""
        return self.view.loads_newest and brings_weights(self._loader)

    def join(self, name: str, description: Description, version: int) -> None:
        """Its supervisor has found it fit, with weights of this version."""
        self.versions.adopt(version)
        self.tell(InstanceJoined(name, description.slots, description.kv_tokens, version))

    def lose(self, name: str, reason: str) -> None:
        """The instance is gone; what its streams brought is kept."""
        self.attempts.lose(name)
        if self.view.instance(name) is not None:
            log.warning("instance %s lost: %s", name, reason)
            self.tell(InstanceLost(name, reason))
        self.attempts.forget_lost(name)

    def max_model_len(self) -> int:
        """Tokens of prompt and response that every instance here takes; 0 without instances."""
        known = (supervisor.description for supervisor in self.supervisors.values())
        return min((d.max_model_len for d in known if d is not None), default=0)

    def _release(self, action: Release) -> None:
        self._supervisor(action.instance).membership.drained.set()

    def _supervisor(self, name: str) -> InstanceSupervisor:
        supervisor = self.supervisors.get(name)
        if supervisor is None:
            raise CallerError(f"no instance {name!r} here; there are {', '.join(self.supervisors)}")
        return supervisor

    async def close(self) -> None:
        """Stop everything; instances are left as they are."""
        self.tools.cancel_all()
        await self.attempts.close()
        for supervisor in self.supervisors.values():
            await supervisor.close()
