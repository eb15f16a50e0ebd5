"""Migration: a running request is interrupted on one instance to go on on another.

It keeps its tokens, whatever the interruption role says of weight updates, for the weights are the
same there. The answer to the interruption may be late, or another than was asked for: the request
has finished first, its attempt has failed, its instance is lost; and when it comes the instance
that was meant may be closed. So that instance is a wish of the request's next dispatch, and
nothing else: whatever happens in between, the ordinary rules hold.
"""

from __future__ import annotations

from typing import Final

from rollout_sched.core.errors import PolicyError
from rollout_sched.core.fleet import Fleet
from rollout_sched.core.lifecycle import RUNNING
from rollout_sched.core.model import Attempt, Instance, InstanceStatus, Request
from rollout_sched.core.requests import Requests
from rollout_sched.core.roles import Migration

SERVING: Final = InstanceStatus.SERVING
DRAINING: Final = InstanceStatus.DRAINING


class Migrator:
    """Asks the migration role, and remembers where those that were interrupted are to go.

    migration  the role that is asked
    due_at     when it is to be asked next, in seconds: every `interval_s`, once per event at most,
               however large the fleet
    """

    def __init__(self, migration: Migration, fleet: Fleet, requests: Requests) -> None:
        self.due_at = migration.interval_s  # at 0 there is nothing to move; never, if never asked
        self.migration = migration
        self._fleet = fleet
        self._requests = requests
        self._meant: dict[int, str] = {}  # attempt that was interrupted -> instance

    def ask(self, now: float) -> None:
        """Have those interrupted that the role names, unless others are still on their way.

        Asked while nothing waits, so that who was interrupted and is not in flight will not come.
        """
        self.due_at = now + self.migration.interval_s
        if self._meant:
            attempts = self._fleet.attempts
            self._meant = {n: where for n, where in self._meant.items() if n in attempts}
            if self._meant:
                return
        for migrant in self.migration.choose(self._fleet):
            attempt, instance = migrant.attempt, migrant.instance
            self._check(attempt, instance)
            if not self._fleet.sessions.may_begin(attempt.request, instance):
                continue  # too many sessions are there: it would wait, and now it runs
            attempt.request.migrations += 1
            self._meant[attempt.id] = instance.id
            self._requests.interrupt(attempt.request)

    def meant_for(self, request: Request) -> Instance | None:
        """Where a request goes on that was interrupted to migrate, if that is open; told once."""
        if not self._meant:
            return None
        instance = self._meant.pop(request.last_attempt, "")
        return self._fleet.open_instance(instance) if instance else None

    def _check(self, attempt: Attempt, instance: Instance) -> None:
        request, source = attempt.request, attempt.instance
        if request.attempt is not attempt or request.state is not RUNNING:
            raise PolicyError(f"migration chose {request!r}, which does not run")
        if source.status is not SERVING and source.status is not DRAINING:
            raise PolicyError(f"migration chose {request!r}, which stands still on {source!r}")
        if instance is source or instance.open_index < 0:
            raise PolicyError(f"migration of {request!r} from {source!r} to {instance!r}, not open")
        if instance.version != source.version:
            raise PolicyError(f"migration of {request!r} to other weights, on {instance!r}")
