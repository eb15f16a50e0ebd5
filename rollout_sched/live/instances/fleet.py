"""The known instances, each with its supervisor: adds, joins, loses and removes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.actions import Lend, Pause, Reclaim, Release, Resume, UpdateWeights
from rollout_sched.core.model.events import Event, InstanceJoined, InstanceLeaving, InstanceLost
from rollout_sched.core.model.model import InstanceStatus
from rollout_sched.live.event_pump import EventPump
from rollout_sched.live.instances.admission import RequiredModel
from rollout_sched.live.instances.attempts import FleetAttempts
from rollout_sched.live.instances.pause import PAUSE
from rollout_sched.live.instances.supervisor import InstanceSupervisor
from rollout_sched.live.instances.versions import FleetVersions
from rollout_sched.live.ports import (
    Description,
    InstanceClient,
    InstanceError,
    WeightLoader,
    brings_weights,
)
from rollout_sched.live.settings import Settings

log = logging.getLogger(__name__)


class FleetRecord(Protocol):
    """Records what the next process must know of the instances (`live.durable.recorder`)."""

    async def pausing(self, instance: str) -> None:
        """The instance is about to be paused."""

    def resumed(self, instance: str) -> None:
        """We no longer have to resume the instance."""

    def serves(self, model: str) -> None:
        """The instances serve this model from now on."""


class Borrower(Protocol):
    """A trainer that shares the instances' GPUs and starts before its batch is complete, on the
    instances lent to it (`[lending]`). Errors that it raises are logged."""

    def lent(self, instance: str) -> None:
        """The instance has no work and is paused: the trainer may use its GPUs until it calls
        `return_instance`."""

    def reclaimed(self, instance: str) -> None:
        """The scheduler needs the instance to continue: give it back as soon as possible."""


class LiveFleet:
    """All instances by name, including those that are away. Carries out the scheduler's orders for
    them.

    orders         the function that carries out an action, by its type
    borrower       the trainer that instances are lent to; None: nobody
    loader         loads the newest version into an instance; None if no way to load it is known
    paused_before  instances that an earlier run had paused to load weights
    model          of the instance that joined last; restored from the store
    max_model_len  tokens of prompt and response that some instance takes; 0 without instances
    record         None without a store
    """

    def __init__(
        self,
        pump: EventPump,
        settings: Settings,
        supervisors: dict[str, InstanceSupervisor],
        attempts: FleetAttempts,
        versions: FleetVersions,
    ) -> None:
        self.tell: Callable[[Event], None] = pump.tell
        self.settings = settings
        self.supervisors = supervisors
        self.attempts: FleetAttempts = attempts
        self.versions = versions
        self.first_version = pump.scheduler.view.run.version
        self.borrower: Borrower | None = None
        self.loader: WeightLoader | None = None
        self.paused_before: set[str] = set()
        self.model = ""
        self.max_model_len = 0
        self.record: FleetRecord | None = None
        self.orders: dict[type[Any], Callable[[Any], None]] = {
            Pause: self._pause,
            Resume: self._resume,
            UpdateWeights: self._update_weights,
            Lend: self._lend,
            Reclaim: self._reclaim,
            Release: self._release,
        }
        self._pump = pump
        self._view = pump.scheduler.view

    @property
    def newest_version(self) -> int:
        """The trainer's version."""
        return self._view.run.version

    async def pausing(self, instance: str) -> None:
        """The instance is about to be paused by us; returns once that is stored."""
        if self.record is not None:
            await self.record.pausing(instance)

    def resumed(self, name: str) -> None:
        """The instance was resumed: no pause of ours has to be undone any more."""
        if self.record is not None:
            self.record.resumed(name)

    @property
    def can_load(self) -> bool:
        """Whether the newest version can be loaded into an instance that joins."""
        return self._view.loads_newest and brings_weights(self.loader)

    def supervisor(self, name: str) -> InstanceSupervisor:
        """Raises CallerError if there is none."""
        supervisor = self.supervisors.get(name)
        if supervisor is None:
            raise CallerError(f"no instance {name!r} here; there are {', '.join(self.supervisors)}")
        return supervisor

    def required_model(self, instance: str) -> RequiredModel:
        """Once the run has begun, its model. Before, what the others serve, those that have joined
        first: an instance that is away may come back as it was."""
        if self.model and self._view.has_begun:
            return RequiredModel(self.model, of_run=True)
        others = [one for one in self.supervisors.values() if one.name != instance]
        joined_first = sorted(others, key=lambda one: not one.joined)
        known = [one.description.model for one in joined_first if one.description is not None]
        return RequiredModel(next(filter(None, known), ""))

    def check_precision(self, instance: str, precision: str) -> None:
        """The samples of a group are compared with each other, so one policy should make them.
        Raises InstanceError if the instance computes in another precision than those that have
        joined, and `Settings.one_precision` is set."""
        for one in self.supervisors.values():
            other = "" if one.description is None or not one.joined else one.description.precision
            if one.name == instance or not precision or other in ("", precision):
                continue
            text = f"it computes in {precision}, but {one.name} in {other}"
            if self.settings.one_precision:
                raise InstanceError(f"{text}, and [live] one_precision is set: start both alike")
            log.warning("instance %s: %s, so groups mix two policies", instance, text)
            return

    async def add(self, client: InstanceClient, *, patient: bool) -> Description | None:
        """Add an instance (`Driver.add_instance`): it joins once it may, or stays away with a
        reason."""
        if client.name in self.supervisors:
            raise CallerError(f"instance {client.name!r} is here already")
        supervisor = InstanceSupervisor(client, self)
        self.supervisors[client.name] = supervisor
        if client.name in self.paused_before:
            self.paused_before.discard(client.name)
            supervisor.pause.move(PAUSE)
        try:
            return await supervisor.start(patient=patient)
        except BaseException:
            del self.supervisors[client.name]
            raise

    async def remove(self, name: str, *, drain: bool) -> None:
        """Remove an instance at once, or with `drain` when its requests have finished."""
        supervisor = self.supervisor(name)
        if drain and supervisor.joined:
            self.tell(InstanceLeaving(name))
            await supervisor.membership.drained.wait()
        if self.supervisors.get(name) is not supervisor:
            return  # removed while it drained
        told = asyncio.Event()
        self.lose(name, "drained" if drain else "removed", told.set, asked=True)
        if not told.is_set():
            await told.wait()
        if self.supervisors.get(name) is not supervisor:
            return  # removed by another call while this one waited
        del self.supervisors[name]
        self._note_lengths()
        self.versions.forget(name)
        await supervisor.remove()

    def join(self, name: str, description: Description, version: int) -> None:
        """The supervisor of the instance lets it join with weights of this version."""
        self.versions.adopt(version)
        if description.model and description.model != self.model:
            self.model = description.model
            if self.record is not None:
                self.record.serves(self.model)
        self._note_lengths()
        self.tell(
            InstanceJoined(
                name,
                description.slots,
                description.kv_tokens,
                version,
                description.max_model_len,
            )
        )

    def lose(
        self,
        name: str,
        reason: str,
        then: Callable[[], None] | None = None,
        *,
        asked: bool = False,
    ) -> None:
        """The instance is gone, or is removed on request (`asked`); what its streams brought is
        kept. `then` is called when the scheduler knows of it, which is at once if all attempts are
        in this process."""
        gone = InstanceLost(name, reason, asked)
        self.attempts.lose(name, partial(self._tell_lost, gone, then))

    def return_instance(self, name: str) -> None:
        """The trainer no longer uses an instance that was lent to it. Call it before weights are
        published, so that all instances get them together. Raises CallerError if the instance is
        not lent, or was lost since."""
        found = self._view.instance(name)
        if found is None or found.status is not InstanceStatus.LENT:
            raise CallerError(f"instance {name!r} is not lent, or was lost since")
        self.supervisor(name).control.take_back()

    def _note_lengths(self) -> None:
        known = [supervisor.description for supervisor in self.supervisors.values()]
        lengths = [description.max_model_len for description in known if description is not None]
        self.max_model_len = max(lengths, default=0)

    def _tell_lost(self, gone: InstanceLost, then: Callable[[], None] | None) -> None:
        if self._view.instance(gone.instance) is not None:
            if gone.requested:
                log.info("instance %s was %s", gone.instance, gone.reason)
            else:
                log.warning("instance %s lost: %s", gone.instance, gone.reason)
            self.tell(gone)
        if then is not None:
            then()

    async def close(self) -> None:
        """Stop watching them; the instances stay as they are."""
        for supervisor in self.supervisors.values():
            await supervisor.close()

    # -- what the scheduler orders ---------------------------------------------------------

    def _pause(self, action: Pause) -> None:
        self.supervisor(action.instance).control.pause(action.mode, action.clear_cache)

    def _resume(self, action: Resume) -> None:
        self.supervisor(action.instance).control.resume()

    def _update_weights(self, action: UpdateWeights) -> None:
        self.supervisor(action.instance).control.update(action.version, self.loader)

    def _lend(self, action: Lend) -> None:
        self.supervisor(action.instance).control.lend(self._lent)

    def _lent(self, instance: str) -> None:
        if self.borrower is None:
            return
        try:
            self.borrower.lent(instance)
        except Exception:  # the trainer's error: the instance has carried out its order
            log.exception("instance %s was lent to the trainer, whose callback failed", instance)

    def _reclaim(self, action: Reclaim) -> None:
        if self.borrower is not None:
            self._pump.defer(self.borrower.reclaimed, action.instance)

    def _release(self, action: Release) -> None:
        self.supervisor(action.instance).membership.drained.set()
