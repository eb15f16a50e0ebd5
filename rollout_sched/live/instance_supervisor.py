"""The supervisor of one instance: lets it join, watches over it, and loses it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Literal, Protocol

from rollout_sched.core.events import InstanceReported
from rollout_sched.live.admission import settle_pause, with_the_fleets_model
from rollout_sched.live.asking import ask, is_ending, said
from rollout_sched.live.attempts import UnderWay
from rollout_sched.live.control_orders import ControlOrder, ControlOrders, OrdersOwner
from rollout_sched.live.engine_watch import PAUSED, EngineWatch
from rollout_sched.live.fleet_versions import FleetVersions
from rollout_sched.live.health_checks import HealthChecks
from rollout_sched.live.joining_version import JoiningVersion, JoinsLater, VersionRefused
from rollout_sched.live.membership import Membership, MembershipMove, MembershipState
from rollout_sched.live.pause import Pause, PausedBy, PauseMove
from rollout_sched.live.ports import Description, Gauges, InstanceClient, InstanceError

log = logging.getLogger(__name__)


class Owner(OrdersOwner, Protocol):
    """What a supervisor needs of the driver."""

    @property
    def first_version(self) -> int: ...
    @property
    def newest_version(self) -> int: ...
    @property
    def can_load(self) -> bool: ...
    @property
    def versions(self) -> FleetVersions: ...
    @property
    def supervisors(self) -> Mapping[str, InstanceSupervisor]: ...
    def join(self, name: str, description: Description, version: int) -> None: ...
    def lose(self, name: str, reason: str) -> None: ...


class InstanceSupervisor:
    """Between the driver and one instance.

    membership    what the instance is to the scheduler
    description   what it said when it last joined; None before
    health        its polls, and whether it may be sent something
    orders        the scheduler's, to pause, update and resume it
    awaits_weights  it is away, and would join with other weights
    control_lock  taken by whoever controls it, so that nobody comes between

    Who has paused it outlives its being away: one that is held is not resumed by a weight update,
    and is paused again before it joins after a restart.
    """

    def __init__(self, client: InstanceClient, owner: Owner) -> None:
        self.client = client
        self.description: Description | None = None
        self.membership = Membership(client.name)
        self.health = HealthChecks(client, owner.settings)
        self.control_lock = asyncio.Lock()
        self._pause = Pause(client.name)
        self.orders = ControlOrders(
            client,
            owner,
            self._pause,
            self.control_lock,
            on_failed=self._order_failed,
            on_resumed=self.health.forget_progress,
        )
        self._owner = owner
        self._settings = owner.settings
        self._version = JoiningVersion(client.name, owner.first_version)
        self._watching = EngineWatch(
            client,
            owner.versions,
            owner.settings,
            self._pause,
            self.control_lock,
            on_resumed=self.health.forget_progress,
            on_wrong=self._lose_disbelieved,
        )
        self._started_at: float | None = None  # as it said last
        self.awaits_weights = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        return self.client.name

    @property
    def joined(self) -> bool:
        return self.membership.state is MembershipState.JOINED

    @property
    def reason(self) -> str:
        """Why it has not joined; "" while it has."""
        return self.membership.reason

    @property
    def started_at(self) -> float | None:
        """Unix seconds, as it said last; None if it has never answered."""
        return self._started_at

    @property
    def held(self) -> bool:
        """Paused by an administrator, until released."""
        return self._pause.held

    async def start(self, *, patient: bool = False) -> Description | None:
        """Ask who it is, let it join, and begin to watch it.

        Raises InstanceError if it does not answer; with `patient` it joins once it does, and so
        does one that has to wait for its weights.
        """
        try:
            await self._admit()
        except Exception as error:
            if not (patient or isinstance(error, JoinsLater)):
                raise
            self._stays_away(error)
        self._tasks = [
            asyncio.create_task(self.orders.carry_out()),
            asyncio.create_task(self._watch()),
        ]
        return self.description

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

    # -- an administrator's hand -----------------------------------------------------------

    async def hold(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None:
        """Pause it until `release`. Raises InstanceError."""
        async with self.control_lock:
            await ask(self.client.pause(mode, clear_cache), self._settings.control_timeout_s)
            self.note_held()

    async def release(self) -> None:
        """Resume it, whoever has paused it; one that is held and away goes on when it joins.
        Raises InstanceError."""
        async with self.control_lock:
            if self.held and not self.joined:
                self._pause.move(PauseMove.RELEASE_LATER)
                return
            await ask(self.client.resume(), self._settings.control_timeout_s)
            self.note_released()

    def note_paused(self) -> None:
        """We have paused it in an earlier run, and did not come to resume it."""
        self._pause.move(PauseMove.PAUSE)

    def note_held(self) -> None:
        """An administrator has paused it."""
        self._pause.move(PauseMove.HOLD)

    def note_released(self) -> None:
        """An administrator has resumed it: from now on new tokens are expected."""
        self._pause.move(PauseMove.RELEASE)
        self.health.forget_progress()

    def suspect(self) -> None:
        """Something suggests that somebody else pauses it, or loads weights: look at it soon."""
        self._watching.suspect()
        self.health.look_soon()

    # -- joining ---------------------------------------------------------------------------

    async def _try_to_join(self) -> None:
        try:
            await self._admit()
        except Exception as error:
            self._stays_away(error)

    def _stays_away(self, error: Exception) -> None:
        before = self.reason
        self.membership.move(MembershipMove.REFUSE, said(error))
        self.awaits_weights = isinstance(error, VersionRefused | JoinsLater)
        news = self.awaits_weights and self.reason != before
        level = logging.WARNING if news else logging.DEBUG
        log.log(level, "instance %s is still away: %s", self.name, self.reason)

    async def _admit(self) -> None:
        """Raises what speaks against its joining."""
        limit_s = self._settings.control_timeout_s
        description = await ask(self.client.describe(), limit_s)
        self._note_start(description.started_at)
        self._in_fleets_model(description)
        version = self._settle_version(description)
        async with self.control_lock:  # what is settled stays so until it has joined
            await settle_pause(self.client, description, self._pause, self._settings)
            if description.version is None:
                # What it makes now is then told apart from what it makes after its first update.
                await ask(self.client.set_version(version), limit_s)
            # Others may have joined meanwhile, and the trainer may have gone on.
            description = self._in_fleets_model(description)
            self._join(description, self._settle_version(description))

    def _settle_version(self, description: Description) -> int:
        owner, gate = self._owner, self._owner.versions.gate(self.name, besides=PAUSED)
        if gate:
            raise JoinsLater(f"it takes nothing for now: {gate}")
        return self._version.settle(
            description.version,
            owner.newest_version,
            follows=owner.versions.follows,
            can_load=owner.can_load,
        )

    def _note_start(self, started_at: float) -> None:
        """Raises InstanceError if only a restart would help, and there was none."""
        restarted = self._started_at not in (None, started_at)
        self._started_at = started_at
        if restarted:
            self._pause.move(PauseMove.RESTART)
        if self.membership.state is MembershipState.UNFIT:
            if not restarted:
                raise InstanceError(self.reason)
            self.membership.move(MembershipMove.RESTART, "it was restarted")

    def _in_fleets_model(self, description: Description) -> Description:
        others = (
            other.description
            for other in self._owner.supervisors.values()
            if other is not self and other.joined and other.description is not None
        )
        return with_the_fleets_model(self.client, description, others)

    def _join(self, description: Description, version: int) -> None:
        self.description = description
        self.awaits_weights = False
        self.health.joined(description.started_at)
        self._watching.joined()
        self._owner.join(self.name, description, version)
        self.membership.move(MembershipMove.JOIN)

    # -- watching --------------------------------------------------------------------------

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
