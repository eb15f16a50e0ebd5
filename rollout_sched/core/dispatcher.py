"""Dispatches: which waiting request goes to which open instance."""

from __future__ import annotations

from rollout_sched.core.actions import Action, Dispatch
from rollout_sched.core.errors import PolicyError
from rollout_sched.core.events import Spans
from rollout_sched.core.fleet import Fleet
from rollout_sched.core.lifecycle import DISPATCH, move
from rollout_sched.core.migrator import Migrator
from rollout_sched.core.model import Instance, Request
from rollout_sched.core.requests import Requests
from rollout_sched.core.roles import Roles
from rollout_sched.core.sample_buffer import SampleBuffer
from rollout_sched.core.sessions import Sessions
from rollout_sched.core.verification import Verification


class Dispatcher:
    """Takes waiting requests in order and asks the routing for an instance for each; for a request
    of a session, the affinity decides whether it returns to its last instance instead. A request
    that no open instance suits is set aside."""

    def __init__(
        self,
        roles: Roles,
        fleet: Fleet,
        requests: Requests,
        migrator: Migrator,
        verification: Verification,
        samples: SampleBuffer,
        sessions: Sessions,
        out: list[Action],
    ) -> None:
        self._roles = roles
        self._asks_affinity = not roles.routing_keeps_sessions and roles.affinity.keeps_sessions
        self._fleet = fleet
        self._requests = requests
        self._migrator = migrator
        self._verification = verification
        self._sample_buffer = samples
        self._sessions = sessions
        self._out = out

    def dispatch(self) -> None:
        """Dispatch until no instance is open or no request can go."""
        waiting, fleet, routing = self._requests.waiting, self._fleet, self._roles.routing
        capped = fleet.sessions.bound is not None
        waiting.recall()
        while fleet.open:
            request = waiting.first()
            if request is None:
                return
            if capped and not fleet.sessions.taking and request.home is None:
                return  # the requests after it have no home either
            instance = self._migrator.meant_for(request) or routing.choose(request, fleet)
            if instance is None:
                return
            if instance.open_index < 0:
                raise PolicyError(f"routing chose {instance!r}, which is not open")
            if request.session and self._asks_affinity:
                instance = self._home_or(request, instance)
            choosy = request.failed_on or fleet.kv.unlike or capped
            if choosy and not self._suits(request, instance):
                instance = self._elsewhere(request)
                if instance is None:
                    waiting.set_aside(request)
                    continue
            waiting.remove(request)
            self._send(request, instance)

    def _home_or(self, request: Request, elsewhere: Instance) -> Instance:
        """The last instance of its session, if that is open and the affinity prefers it."""
        if request.last_instance is None:
            return elsewhere
        home = self._fleet.open_instance(request.last_instance)
        if home is None or home is elsewhere:
            return elsewhere
        return home if self._roles.affinity.stays(request, home, elsewhere) else elsewhere

    def _suits(self, request: Request, instance: Instance) -> bool:
        if instance.id in request.failed_on:
            return False
        return self._fleet.may_take(request, instance)

    def _elsewhere(self, request: Request) -> Instance | None:
        """An open instance that the request fits on, if possible one where it has not failed."""
        load, fleet = self._roles.routing.load, self._fleet
        fitting = [instance for instance in fleet.open if fleet.may_take(request, instance)]
        return min(
            fitting, key=lambda i: (i.id in request.failed_on, load(i), i.serial), default=None
        )

    def _send(self, request: Request, instance: Instance) -> None:
        interruption = self._roles.interruption
        if self._verification.on:
            self._verification.trim(request, instance.version)
        limit = interruption.limit(request)
        max_new_tokens = self._requests.room_for(request) or 1
        if limit is not None and limit < max_new_tokens:
            max_new_tokens = limit
        move(request, DISPATCH)
        request.attempt = attempt = self._fleet.send(request, instance, max_new_tokens)
        request.last_attempt = attempt.id
        request.last_instance = instance.id
        if request.salt is None or not interruption.keeps_kv:
            request.salt = instance.version
        draft: Spans = ()
        if self._verification.on:
            draft = self._verification.draft(request, instance.version)
            attempt.draft_tokens = sum([tokens for _, tokens in draft])
        group = request.group
        if group is not None:
            self._sample_buffer.note_version(group, instance.version)
        elif request.session:
            self._sessions.sent(request.session, instance.id)
        self._out.append(
            Dispatch(
                request.id,
                attempt.id,
                instance.id,
                request.context_tokens,
                max_new_tokens,
                request.salt,
                request.response_tokens,
                request.computed_tokens,
                request.turn,
                "" if group is None else group.id,
                0 if group is None else request.index,
                draft,
                request.ends,
            )
        )
