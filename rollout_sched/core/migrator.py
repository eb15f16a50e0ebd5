"""Migration: a running request is interrupted on one instance to go on on another.

The request keeps its tokens even if the interruption role drops them at weight updates, because the
weights are the same on both instances. The answer to the interruption may be late, or be another
event: the request finished first, its attempt failed, or its instance was lost. By then the target
may be closed. So the target is only a preference for the request's next dispatch; whatever happens
in between, the ordinary rules hold.
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
    """Asks the migration role, and remembers the targets of interrupted requests.

    migration  the role that is asked
    due_at     when to ask it next, in seconds: every `interval_s`, at most once per event,
               however large the fleet
    """

    def __init__(self, migration: Migration, fleet: Fleet, requests: Requests) -> None:
        self.due_at = migration.interval_s  # at 0 there is nothing to move; infinity: never asked
        self.migration = migration
        self._fleet = fleet
        self._requests = requests
        self._meant: dict[int, str] = {}  # attempt that was interrupted -> instance

    def ask(self, now: float) -> None:
        """Interrupt the requests that the role names, unless earlier migrants are still in flight.

        Asked while nothing waits, so a migrant that is not in flight will not be dispatched.
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
                continue  # the target has too many sessions: the request would wait instead of run
            attempt.request.migrations += 1
            self._meant[attempt.id] = instance.id
            self._requests.interrupt(attempt.request)

    def meant_for(self, request: Request) -> Instance | None:
        """The target of a request that was interrupted to migrate, if open; given only once."""
        if not self._meant:
            return None
        instance = self._meant.pop(request.last_attempt, "")
        return self._fleet.open_instance(instance) if instance else None

    def _check(self, attempt: Attempt, instance: Instance) -> None:
        request, source = attempt.request, attempt.instance
        if request.attempt is not attempt or request.state is not RUNNING:
            raise PolicyError(f"migration chose {request!r}, which does not run")
        if source.status is not SERVING and source.status is not DRAINING:
            raise PolicyError(
                f"migration chose {request!r} on {source!r}, which neither serves nor drains"
            )
        if instance is source or instance.open_index < 0:
            raise PolicyError(
                f"migration moves {request!r} from {source!r} to {instance!r}, which is not open"
            )
        if instance.version != source.version:
            raise PolicyError(
                f"migration moves {request!r} to {instance!r}, which has another version"
            )
