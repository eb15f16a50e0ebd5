"""What to do after an event: asks the roles, in a fixed order.

The order matters: a delivery may end the round, the end of a round may allow a weight update, new
weights may let groups start, and groups that start are dispatched.
"""

from __future__ import annotations

from rollout_sched.core.decide.delivery import Deliverer, Launcher
from rollout_sched.core.decide.dispatch import Dispatcher, Migrator
from rollout_sched.core.decide.lending import Lender
from rollout_sched.core.decide.weights import WeightUpdater
from rollout_sched.core.model.actions import Action, Wake
from rollout_sched.core.model.roles import Roles
from rollout_sched.core.parts import Books, Work
from rollout_sched.core.state.fleet import Fleet
from rollout_sched.core.state.lifecycle import INTERRUPT, RUNNING, move
from rollout_sched.core.state.progress import RunProgress

# ------------------------------------------------------------------------------------------
# After a restart, no work is sent until the fleet has gathered: else the first gets all of it.
#
# All requests of the earlier scheduler wait then. The instances join again one after the other,
# within moments, and some must load weights first. So nothing is dispatched until as many instances
# are here and ready as before, or until a time limit: an instance may be gone for good.

#: Seconds. An instance that is up needs only a fraction of it to join.
PATIENCE_S = 5.0


class Gathering:
    """`expected`: number of instances that are waited for; 0 when not gathering."""

    def __init__(self, fleet: Fleet, progress: RunProgress, out: list[Action]) -> None:
        self.expected = 0
        self._until = 0.0
        self._fleet = fleet
        self._progress = progress
        self._out = out

    def begin(self, instances: int, now: float) -> None:
        """Begin to wait for as many instances as had joined before."""
        if instances:
            self.expected = instances
            self._until = now + PATIENCE_S
            self._out.append(Wake(self._until))

    def holds(self, now: float) -> bool:
        """Whether work must still wait for more instances; ask only while some are expected."""
        missing = len(self._fleet.instances) < self.expected or self._progress.updating > 0
        if missing and now < self._until:
            return True
        self.expected = 0
        return False


class Decider:
    """Asks the roles and appends the resulting actions to `out`."""

    def __init__(self, roles: Roles, books: Books, work: Work, out: list[Action]) -> None:
        fleet, samples, progress = books.fleet, books.sample_buffer, books.progress
        self.updater = WeightUpdater(fleet, roles.weights, roles.interruption, progress.version)
        self.migrator = Migrator(roles.migration, fleet, work.requests)
        self.gathering = Gathering(fleet, progress, out)
        self.lender = lender = Lender(
            roles.lending, fleet, self.updater, work.requests, progress, out
        )
        self._launcher = launcher = Launcher(
            roles, books.groups, samples, books.selection_window, progress, work.group_outcomes
        )
        self._deliverer = Deliverer(
            roles, samples, work.finished, progress, work.group_outcomes, launcher, lender, out
        )
        self._dispatcher = Dispatcher(
            roles,
            fleet,
            work.requests,
            self.migrator,
            samples,
            books.sessions,
            out,
        )
        self._fleet = fleet
        self._progress = progress
        self._requests = work.requests
        self._out = out

    def decide(self, now: float) -> None:
        """Ask the roles. It asks the group-level roles only if something changed: asking them
        costs more than most events do."""
        progress, fleet, waiting = self._progress, self._fleet, self._requests.waiting
        changed = progress.dirty
        if changed:
            progress.dirty = False
            if progress.trainer_waiting:
                self._deliverer.deliver()
            if self.updater.outdated:
                self._update_weights()
            self._launcher.launch()
            if progress.spent:
                self._launcher.renew_budgets()
        gathering = self.gathering
        if fleet.open and waiting.size and not (gathering.expected and gathering.holds(now)):
            self._dispatcher.dispatch()
        if self.lender.lends:
            self.lender.decide(changed)
        if now >= self.migrator.due_at and fleet.open and not waiting.size:
            self.migrator.ask(now)

    def _update_weights(self) -> None:
        for instance in self.updater.start(self._progress, self._out):
            for attempt in instance.attempts.values():
                if not attempt.abandoned and attempt.request.state is RUNNING:
                    move(attempt.request, INTERRUPT)
