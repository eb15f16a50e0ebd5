"""The supervisor of one instance: lets it join, watches over it, and loses it."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Protocol

from rollout_sched.core.events import InstanceReported
from rollout_sched.live.admission import FleetToJoin, InstanceAdmission
from rollout_sched.live.asking import is_ending
from rollout_sched.live.attempts import UnderWay
from rollout_sched.live.control_orders import ControlOrder, ControlOrders, OrdersOwner
from rollout_sched.live.engine_watch import EngineWatch
from rollout_sched.live.health_checks import HealthChecks
from rollout_sched.live.joining_version import JoinsLater
from rollout_sched.live.membership import Membership, MembershipMove, MembershipState
from rollout_sched.live.pause import InstancePause, PausedBy
from rollout_sched.live.pause_control import PauseControl
from rollout_sched.live.ports import Description, Gauges, InstanceClient

log = logging.getLogger(__name__)


class Owner(OrdersOwner, FleetToJoin, Protocol):
    """What a supervisor needs of the driver."""

    def lose(self, name: str, reason: str) -> None: ...
    def resumed(self, name: str) -> None:
        """What we have paused goes on."""


class InstanceSupervisor:
    """Between the driver and one instance.

    membership    what the instance is to the scheduler
    admission     what it said of itself, and whether it may join
    health        its polls, and whether it may be sent something
    pauses        an administrator's, and those that are left from an earlier run
    orders        the scheduler's, to pause, update and resume it
    control_lock  taken by whoever controls it, so that nobody comes between
    """

    def __init__(self, client: InstanceClient, owner: Owner) -> None:
        self.client = client
        self.membership = Membership(client.name)
        self.health = HealthChecks(client, owner.settings)
        self.control_lock = lock = asyncio.Lock()
        self._owner = owner
        self._pause = pause = InstancePause(client.name, partial(owner.resumed, client.name))
        self.pauses = PauseControl(
            client,
            owner.settings,
            self.membership,
            pause,
            lock,
            on_resumed=self.health.forget_progress,
        )
        self.orders = ControlOrders(
            client,
            owner,
            pause,
            lock,
            on_failed=self._order_failed,
            on_resumed=self.health.forget_progress,
        )
        self.admission = InstanceAdmission(
            client, owner, self.membership, pause, lock, on_joining=self._begin
        )
        self._watching = EngineWatch(
            client,
            owner.versions,
            owner.settings,
            pause,
            lock,
            on_resumed=self.health.forget_progress,
            on_wrong=self._lose_disbelieved,
        )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        return self.client.name

    @property
    def joined(self) -> bool:
        return self.membership.state is MembershipState.JOINED

    @property
    def description(self) -> Description | None:
        """What it said when it last joined; None before."""
        return self.admission.description

    @property
    def reason(self) -> str:
        """Why it has not joined; "" while it has."""
        return self.membership.reason

    async def start(self, *, patient: bool = False) -> Description | None:
        """Ask who it is, let it join, and begin to watch it.

        Raises InstanceError if it does not answer, and is closed then; with `patient` it joins once
        it does, and so does one that has to wait for its weights.
        """
        try:
            await self._admit(patient)
        except BaseException:
            await self.close()
            raise
        self._tasks = [
            asyncio.create_task(self.orders.carry_out()),
            asyncio.create_task(self._watch()),
        ]
        return self.description

    async def _admit(self, patient: bool) -> None:
        try:
            await self.admission.admit()
        except Exception as error:
            if not (patient or isinstance(error, JoinsLater)):
                raise
            self.admission.refuse(error)

    async def remove(self) -> None:
        """It is ours no longer."""
        self.membership.move(MembershipMove.REMOVE, "it was removed")
        await self.close()

    async def close(self) -> None:
        """Watch it no more; it is left as it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self.client.close()

    def suspect(self) -> None:
        """Something suggests that somebody else pauses it, or loads weights: look at it soon."""
        self._watching.suspect()
        self.health.look_soon()

    # -- watching --------------------------------------------------------------------------

    def _begin(self, description: Description) -> None:
        self.health.joined(description.started_at)
        self._watching.joined()

    async def _try_to_join(self) -> None:
        try:
            await self.admission.admit()
        except Exception as error:
            self.admission.refuse(error)

    async def _watch(self) -> None:
        while not is_ending():
            await self.health.until_due()
            try:
                await (self._check() if self.joined else self._try_to_join())
            except asyncio.CancelledError:
                if is_ending():
                    raise
                log.warning("a check of instance %s was broken off from within", self.name)
            except Exception:
                log.exception("watching instance %s", self.name)

    async def _check(self) -> None:
        before = self._under_way()  # some may be answered before the gauges come
        poll = await self.health.poll()
        if not self.joined:
            return
        if poll.gauges is None:
            if poll.lost:
                self._lose(poll.lost)
            return
        if poll.restarted:
            # The connections of those that ran before are broken, so these came after.
            self._lose_disbelieved("it was restarted")
            return
        if self._pause.by in (PausedBy.NOBODY, PausedBy.SOMEBODY_ELSE):
            assert self.description is not None  # it has joined
            await self._watching.look(self.description, poll.gauges)
            if not self.joined:
                return
        # A paused one, too: what it is sent when it goes on is not to wait for the next poll.
        self.health.verify(poll)
        if self._pause.by is not PausedBy.NOBODY:
            self.health.forget_progress()  # its gauges may stand still
            return
        self._owner.tell(_reported(self.name, poll.gauges))
        still = [running for running in before if running.reads]
        verdict = self.health.judge(poll.gauges, still)
        if verdict.lost:
            self._lose(verdict.lost)
        for running, reason in verdict.stop:
            self._owner.attempts.stop(running.dispatch.attempt, reason)

    def _under_way(self) -> list[UnderWay]:
        """What was sent there, less the streams that we do not read because their clients do not:
        those may have ended there."""
        return [running for running in self._owner.attempts.on(self.name) if running.reads]

    # -- losing it -------------------------------------------------------------------------

    def _order_failed(self, order: ControlOrder, why: str) -> None:
        reason = f"{order.what}: {why}"
        if order.version is not None:
            unfit = f"loading version {order.version} failed, so it must be restarted: {why}"
            self._leave_fleet(MembershipMove.DISQUALIFY, unfit, reason)
        elif self.joined:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        self._leave_fleet(MembershipMove.LOSE, reason, reason)

    def _lose_disbelieved(self, reason: str) -> None:
        """It has other weights than is known: what its streams have brought counts as of those that
        it should have, so nothing is gone on from."""
        for running in self._under_way():
            self._owner.attempts.disbelieve(running.dispatch.attempt)
        self._lose(reason)

    def _leave_fleet(self, move: MembershipMove, away: str, lost: str) -> None:
        """`away`: why it cannot join; `lost`: what the driver is told."""
        self.membership.move(move, away)
        try:
            self._owner.lose(self.name, lost)
        except Exception:  # whoever else is told of it must not end our watching
            log.exception("instance %s was lost (%s)", self.name, lost)
        self.orders.call_off()  # what was ordered while it was lost, too


def _reported(name: str, gauges: Gauges) -> InstanceReported:
    return InstanceReported(
        name,
        gauges.running,
        gauges.waiting,
        gauges.kv_usage,
        gauges.preemptions,
        gauges.prefill_tokens,
        gauges.cached_tokens,
        gauges.reprefilled_tokens,
        gauges.generated_tokens,
    )
