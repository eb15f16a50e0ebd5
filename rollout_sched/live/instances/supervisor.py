"""The supervisor of one instance: lets it join, watches over it, and loses it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollout_sched.core.model.events import InstanceReported
from rollout_sched.live.instances.admission import InstanceAdmission, JoinsLater
from rollout_sched.live.instances.attempts import InFlight
from rollout_sched.live.instances.control import ControlOrder, InstanceControl
from rollout_sched.live.instances.engine_watch import EngineWatch
from rollout_sched.live.instances.health import Poll
from rollout_sched.live.instances.instance import FleetInstance
from rollout_sched.live.instances.membership import MembershipMove
from rollout_sched.live.instances.pause import PausedBy
from rollout_sched.live.ports import Description, Gauges, InstanceClient, Suspicion, is_cancelled

if TYPE_CHECKING:
    from rollout_sched.live.instances.fleet import LiveFleet  # which makes the supervisors

log = logging.getLogger(__name__)


class InstanceSupervisor(FleetInstance):
    """Stands between the driver and one instance.

    admission  whether it may join
    control    the scheduler's orders to it, and an administrator's pauses
    """

    def __init__(self, client: InstanceClient, fleet: LiveFleet) -> None:
        super().__init__(client, fleet)
        self.control = InstanceControl(self, self._order_failed)
        self.admission = InstanceAdmission(self, self._begin)
        self._watching = EngineWatch(self, self._lose_discarding)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, *, patient: bool = False) -> Description | None:
        """Ask for its description, let it join, and start to watch it.

        If it does not answer, closes this and raises InstanceError; with `patient`, it joins later,
        when it answers. An instance that waits for its weights joins later in both cases.
        """
        try:
            await self._admit(patient)
        except BaseException:
            await self.close()
            raise
        self._tasks = [
            asyncio.create_task(self.control.carry_out()),
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
        """Remove it from the fleet."""
        self.membership.move(MembershipMove.REMOVE, "it was removed")
        await self.close()

    async def close(self) -> None:
        """Stop watching it; the instance stays as it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self.client.close()

    def suspect(self, of: Suspicion) -> None:
        """Something suggests that it was restarted, or that somebody else pauses it or loads
        weights: check it soon."""
        if of == "restart":
            self.health.check_now()
        else:
            self._watching.suspect()
            self.health.poll_soon()

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
        while not is_cancelled():
            await self.health.until_due()
            try:
                await (self._check() if self.joined else self._try_to_join())
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                log.warning("a check of instance %s was cancelled unexpectedly", self.name)
            except Exception:
                log.exception("error while watching instance %s", self.name)

    async def _check(self) -> None:
        before = self._under_way()  # some may be answered before the gauges arrive
        poll = await self.health.poll()
        if not self.joined:
            return
        if poll.gauges is None:
            if poll.lost:
                self._lose(poll.lost)
            return
        if poll.restarted:
            # Attempts from before lost their connections, so these began after the restart.
            self._lose_discarding("it was restarted")
            return
        if self.pause.by in (PausedBy.NOBODY, PausedBy.SOMEBODY_ELSE):
            assert self.description is not None  # it has joined
            await self._watching.look(self.description, poll.gauges)
        self._use(poll, poll.gauges, before)

    def _use(self, poll: Poll, gauges: Gauges, before: Sequence[InFlight]) -> None:
        """`before`: the attempts that were under way when the gauges were asked for."""
        if not self.joined:
            return
        # Also while paused, so that new work need not wait for a poll after the resume.
        self.health.verify(poll)
        if self.pause.by is not PausedBy.NOBODY:
            self.health.forget_progress()  # its gauges may not change while paused
            return
        self.fleet.tell(_reported(self.name, gauges))
        rejected = self.health.drafts.note(gauges)
        if rejected:
            log.warning("instance %s %s", self.name, rejected)
        still = [running for running in before if running.reads]
        verdict = self.health.judge(gauges, still)
        if verdict.lost:
            self._lose(verdict.lost)
        for running, reason in verdict.stop:
            self.fleet.attempts.stop(running.dispatch.attempt, reason)

    def _under_way(self) -> list[InFlight]:
        """The attempts sent to the instance, except streams that we do not read because their
        clients do not: those may already have ended on the instance."""
        return [running for running in self.fleet.attempts.on(self.name) if running.reads]

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

    def _lose_discarding(self, reason: str) -> None:
        """The instance has other weights than the known ones, so what its streams have brought is
        labelled wrongly: drop it, and lose the instance."""
        for running in self._under_way():
            self.fleet.attempts.reject_streamed(running.dispatch.attempt)
        self._lose(reason)

    def _leave_fleet(self, move: MembershipMove, away: str, lost: str) -> None:
        """`away`: why it cannot join; `lost`: the reason for the driver."""
        self.membership.move(move, away)
        try:
            self.fleet.lose(self.name, lost)
        except Exception:  # an error in a handler of the loss must not end the watching
            log.exception("error while handling the loss of instance %s (%s)", self.name, lost)
        self.control.call_off()  # includes orders that came while the loss was handled


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
        gauges.drafted_tokens,
        gauges.accepted_tokens,
    )
