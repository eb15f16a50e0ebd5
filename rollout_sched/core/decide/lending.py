"""Lending: instances make way for a trainer on their GPUs before its batch is whole.

The requests of such an instance are interrupted and go on elsewhere with their tokens. When all its
attempts have answered, the trainer gets the instance and trains what has been delivered so far:

    SERVING -> LENDING -> LENT -> SERVING                 it comes back with the weights it had
    SERVING -> LENDING -> LENT -> UPDATING -> ... SERVING  new ones were published meanwhile
               LENDING -> SERVING                          the batch was whole sooner

Lent instances are reclaimed if no work can go on without them. They are also reclaimed if the
trainer brings new weights itself, because no work may go on before all instances have these.

Lending is a role of its own, not migration: which instances make way depends on the batch, and the
routing decides where their requests go. The instance is closed, emptied and only then lent, so a
trainer never has GPUs on which anything runs. The trainer says whether it takes any
(`BatchRequested.shares_gpus`), so one policy file serves fleets with GPUs of their own, too. A lent
instance comes back by an event, not at the end of the step: a trainer that publishes first holds up
no other instance, and one that fails keeps only what it has. Instances make way once per batch: a
trainer that changed its GPUs with every group would do nothing else.
"""

from __future__ import annotations

from typing import Final

from rollout_sched.core.decide.weights import WeightUpdater
from rollout_sched.core.errors import PolicyError
from rollout_sched.core.model.actions import Lend, Reclaim
from rollout_sched.core.model.model import Instance, InstanceStatus
from rollout_sched.core.state.lifecycle import RUNNING
from rollout_sched.core.work.parts import Parts

SERVING: Final = InstanceStatus.SERVING
LENDING: Final = InstanceStatus.LENDING
LENT: Final = InstanceStatus.LENT


class Lender:
    """Asks the lending role, empties the instances it names, and knows which are lent.

    lends  whether the role is asked at all
    """

    def __init__(self, parts: Parts, updater: WeightUpdater) -> None:
        self.lends = parts.state.roles.lending.lends
        self._state = parts.state
        self._requests = parts.requests
        self._updater = updater
        self._batch = -1  # the last batch that instances made way for: they do so once per batch
        self._makes_way: dict[str, Instance] = {}
        self._lent: dict[str, int] = {}  # instance -> the version of the weights it holds
        self._reclaimed: set[str] = set()

    def decide(self, changed: bool) -> None:
        """Let instances make way for the trainer, unless work waits or weights are on their way.
        `changed`: something that the role looks at may have changed."""
        if self._requests.waiting.size:
            if not self._state.fleet.attempts:
                self._reclaim()
        elif changed and self._may_ask():
            self._ask()

    def _may_ask(self) -> bool:
        progress = self._state.progress
        wanted = progress.shares_gpus and progress.trainer_waiting
        return wanted and not progress.update_pending

    def _ask(self) -> None:
        """Ask the role, and empty the instances that it names."""
        state = self._state
        if self._batch == state.progress.batches:
            return
        chosen = state.roles.lending.choose(state.fleet, state.progress)
        if not chosen:
            return
        serving = [i for i in state.fleet.instances.values() if i.status is SERVING]
        for instance in chosen:
            if instance.status is not SERVING or instance.leaving:
                raise PolicyError(f"lending chose {instance!r}, which does not serve")
        if len(set(chosen)) >= len(serving):
            raise PolicyError("lending chose all serving instances; at least one must keep serving")
        self._batch = state.progress.batches
        for instance in chosen:
            self._begin(instance)

    def emptied(self, instance: Instance) -> None:
        """The last attempt in flight on the instance has answered."""
        if instance.status is LENDING:
            del self._makes_way[instance.id]
            if instance.leaving:
                self._set_status(instance, SERVING)
            else:
                self._lend(instance)

    def call_off(self) -> None:
        """The batch is whole: instances that have not made way yet need not do so."""
        for instance in self._makes_way.values():
            self._set_status(instance, SERVING)
        self._makes_way.clear()

    def published(self) -> None:
        """If we load the new weights, lent instances get them when they return and never generate
        with older ones. Otherwise they return with the weights they have, and are reclaimed,
        because work may wait until the trainer brings the new ones."""
        self.call_off()
        fleet, progress = self._state.fleet, self._state.progress
        for name, held in self._lent.items():
            version = progress.version if progress.loads else held
            fleet.set_version(fleet.instances[name], version)
        if not progress.loads:
            self._reclaim()

    def found(self, instance: Instance) -> None:
        """Another party has loaded other weights into the instance."""
        if instance.id in self._lent:
            self._lent[instance.id] = instance.version

    def _reclaim(self) -> None:
        """Ask for each lent instance back, once."""
        for name in self._lent:
            if name not in self._reclaimed:
                self._reclaimed.add(name)
                self._state.orders.append(Reclaim(name))

    def returned(self, instance: Instance) -> bool:
        """The trainer returned an instance. False if it was not lent."""
        if instance.status is not LENT:
            return False
        held = self._forget(instance)
        self._set_status(instance, SERVING)
        if held < self._state.progress.version:
            self._state.fleet.set_version(instance, held)
            self._updater.joined(instance)
        return True

    def lost(self, instance: Instance) -> None:
        self._makes_way.pop(instance.id, None)
        if instance.id in self._lent:
            self._forget(instance)

    def _begin(self, instance: Instance) -> None:
        if not instance.attempts:
            self._lend(instance)
            return
        self._makes_way[instance.id] = instance
        self._set_status(instance, LENDING)
        for attempt in instance.attempts.values():
            if not attempt.abandoned and attempt.request.state is RUNNING:
                self._requests.interrupt(attempt.request)

    def _lend(self, instance: Instance) -> None:
        self._lent[instance.id] = instance.version
        self._set_status(instance, LENT)
        self._state.orders.append(Lend(instance.id))

    def _forget(self, instance: Instance) -> int:
        self._reclaimed.discard(instance.id)
        return self._lent.pop(instance.id)

    def _set_status(self, instance: Instance, status: InstanceStatus) -> None:
        instance.status = status
        self._state.fleet.touch(instance)
