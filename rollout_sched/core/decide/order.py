"""What to do after an event: asks the roles, in a fixed order.

The order matters: a delivery may end the round, the end of a round may allow a weight update, new
weights may let groups start, and groups that start are dispatched.
"""

from __future__ import annotations

from rollout_sched.core.decide.delivery import Deliverer, Launcher
from rollout_sched.core.decide.dispatch import Dispatcher, Migrator
from rollout_sched.core.decide.lending import Lender
from rollout_sched.core.decide.weights import WeightUpdater
from rollout_sched.core.model.actions import Wake
from rollout_sched.core.model.model import InstanceStatus
from rollout_sched.core.state.lifecycle import INTERRUPT, RUNNING, move
from rollout_sched.core.state.state import State
from rollout_sched.core.work.parts import Parts

# ------------------------------------------------------------------------------------------
# After a restart, no work is sent until the fleet has gathered: else the first gets all of it.
#
# All requests of the earlier scheduler wait then. The instances join again one after the other,
# within moments, and some must load weights first. So nothing is dispatched until as many instances
# are here and ready as before, or until a time limit: an instance may be gone for good.

#: Seconds. An instance that is up needs only a fraction of it to join.
PATIENCE_S = 5.0


class RejoinBarrier:
    """`expected`: number of instances that are waited for; 0 when not gathering."""

    def __init__(self, state: State) -> None:
        self.expected = 0
        self._until = 0.0
        self._state = state

    def begin(self, instances: int, now: float) -> None:
        """Begin to wait for as many instances as had joined before."""
        if instances:
            self.expected = instances
            self._until = now + PATIENCE_S
            self._state.orders.append(Wake(self._until))

    def holds(self, now: float) -> bool:
        """Whether work must still wait for more instances; ask only while some are expected."""
        state = self._state
        missing = len(state.fleet.instances) < self.expected or state.progress.updating > 0
        if missing and now < self._until:
            return True
        self.expected = 0
        return False


class Decider:
    """Asks the roles, in this order, and appends the resulting actions to `State.orders`."""

    def __init__(self, parts: Parts) -> None:
        self.updater = WeightUpdater(parts.state)
        self.migrator = Migrator(parts)
        self.gathering = RejoinBarrier(parts.state)
        self.lender = Lender(parts, self.updater)
        self._launcher = Launcher(parts)
        self._deliverer = Deliverer(parts, self._launcher, self.lender)
        self._dispatcher = Dispatcher(parts, self.migrator)
        self._fleet = parts.state.fleet
        self._progress = parts.state.progress
        self._requests = parts.requests
        self._waiting = parts.requests.waiting
        self._shares = parts.state.shares

    def decide(self, now: float) -> None:
        """Ask the roles. It asks the group-level roles only if something changed: asking them
        costs more than most events do."""
        progress, fleet, waiting = self._progress, self._fleet, self._waiting
        changed = progress.must_decide
        if changed:
            progress.must_decide = False
            if progress.trainer_waiting:
                self._deliverer.deliver()
            if self.updater.outdated:
                self._update_weights()
            self._launcher.launch()
            if progress.spent:
                self._launcher.renew_budgets()
        self._shares.tick(now)
        if changed or self._shares.crowded or self._shares.contended:
            self._dispatcher.make_room(now)
        gathering = self.gathering
        if fleet.open and waiting.size and not (gathering.expected and gathering.holds(now)):
            self._dispatcher.dispatch()
        if self.lender.lends:
            self.lender.decide(changed)
        if now >= self.migrator.due_at and fleet.open and not waiting.size:
            self.migrator.ask(now)

    def _update_weights(self) -> None:
        for instance in self.updater.start():
            drains = instance.status is InstanceStatus.DRAINING
            for attempt in instance.attempts.values():
                request = attempt.request
                if attempt.abandoned or request.state is not RUNNING:
                    continue
                if not drains:
                    move(request, INTERRUPT)  # its instance was told to abort all that it runs
                elif request.resumable:
                    self._requests.interrupt(request)
