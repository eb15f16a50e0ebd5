"""The running attempts on each instance, of all fronts, as the instance's supervisor sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from rollout_sched.link.connected_front import ConnectedFront
from rollout_sched.link.messages import Lose, RejectStreamed, StopAttempt
from rollout_sched.live.attempt_table import OVERTAKEN_S, AttemptTable
from rollout_sched.live.attempts import InFlight
from rollout_sched.live.fleet_versions import FleetVersions

#: Why the gate of a lost instance is closed until all fronts have reported their streamed tokens.
LOSING = "it is lost, and its streamed tokens are being collected"


@dataclass(slots=True)
class _Loss:
    """The loss of an instance: fronts that have not reported yet, and the calls to make then."""

    waiting: set[ConnectedFront]
    tells: list[Callable[[], None]] = field(default_factory=list)


class SharedFleetAttempts:
    """The attempts of all fronts (`live.live_fleet.FleetAttempts`); `local`: of the front in this
    process."""

    def __init__(
        self, local: AttemptTable, fronts: Collection[ConnectedFront], versions: FleetVersions
    ) -> None:
        self._local = local
        self._fronts = fronts
        self._versions = versions
        self._losses: dict[str, _Loss] = {}

    def on(self, instance: str) -> list[InFlight]:
        remote = [one for front in self._fronts for one in front.attempts.on(instance)]
        return [*self._local.on(instance), *remote]

    async def answered(self, instance: str) -> None:
        """See `AttemptTable.answered`."""
        await asyncio.gather(self._local.answered(instance), self._answered(instance))

    async def _answered(self, instance: str) -> None:
        remote = [one for front in self._fronts for one in front.attempts.on(instance)]
        if not remote:
            return
        ends = [one.ended() for one in remote]
        await asyncio.wait(ends, timeout=OVERTAKEN_S)
        for front in self._fronts:
            for one in front.attempts.on(instance):
                front.order(StopAttempt(one.dispatch.attempt, "it did not stop"))
        await asyncio.wait(ends)

    def stop(self, attempt: int, reason: str) -> None:
        """Abort an attempt that may never answer; its request continues from the tokens it has."""
        front = self._front_of(attempt)
        if front is None:
            self._local.stop(attempt, reason)
            return
        one = front.attempts.get(attempt)
        assert one is not None  # it is this front's
        one.stopped = True
        front.order(StopAttempt(attempt, reason))

    def disbelieve(self, attempt: int) -> None:
        """Fail an attempt whose stream has brought tokens: they may be of unknown weights."""
        front = self._front_of(attempt)
        if front is None:
            self._local.disbelieve(attempt)
        else:
            front.order(RejectStreamed(attempt))

    def _front_of(self, attempt: int) -> ConnectedFront | None:
        return next((f for f in self._fronts if f.attempts.get(attempt) is not None), None)

    # -- losses ----------------------------------------------------------------------------

    def lose(self, instance: str, tell: Callable[[], None]) -> None:
        """The scheduler is told of the loss when every front has reported its streamed tokens;
        until then nothing is sent to the instance, and it does not join."""
        loss = self._losses.get(instance)
        if loss is not None:
            loss.tells.append(tell)
            return
        waiting = {front for front in self._fronts if front.attempts.on(instance)}
        if not waiting:
            self._local.lose(instance, tell)
            return
        self._losses[instance] = _Loss(waiting, [tell])
        self._versions.close_gate(instance, LOSING)
        for front in waiting:
            front.order(Lose(instance))

    def relinquished(self, front: ConnectedFront, instance: str) -> None:
        """A front has reported everything, or is gone."""
        loss = self._losses.get(instance)
        if loss is None or front not in loss.waiting:
            return
        front.ordered.lose(instance)
        loss.waiting.discard(front)
        if loss.waiting:
            return
        del self._losses[instance]
        for tell in loss.tells:
            self._local.lose(instance, tell)
        self._versions.open_gate(instance, LOSING)

    def gone(self, front: ConnectedFront) -> None:
        """The front is gone and will report nothing more."""
        for instance in list(self._losses):
            self.relinquished(front, instance)
