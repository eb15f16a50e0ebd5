"""Dispatches: which waiting request goes to which open instance."""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import Final

from rollout_sched.core.errors import PolicyError
from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import InstanceReported
from rollout_sched.core.model.model import Attempt, Instance, InstanceStatus, Request
from rollout_sched.core.model.records import ONE_IN
from rollout_sched.core.state.lifecycle import DISPATCH, RUNNING, move
from rollout_sched.core.work.parts import Parts

# ------------------------------------------------------------------------------------------
# Migration: a running request is interrupted on one instance to go on on another.
#
# The request keeps its tokens even if the interruption role drops them at weight updates, because
# the weights are the same on both instances. The answer to the interruption may be late, or be
# another event: the request finished first, its attempt failed, or its instance was lost. By then
# the target may be closed. So the target is only a preference for the request's next dispatch;
# whatever happens in between, the ordinary rules hold.
#
# The role is asked by time, because the balance of a fleet does not change with one answer: once
# per `interval_s`, and never while anything waits, because a free place then has a better use.

SERVING: Final = InstanceStatus.SERVING
DRAINING: Final = InstanceStatus.DRAINING


class Migrator:
    """Asks the migration role, and remembers the targets of interrupted requests.

    due_at  when to ask it next, in seconds: every `interval_s`, at most once per event, however
            large the fleet
    """

    def __init__(self, parts: Parts) -> None:
        # At 0 there is nothing to move; infinity: never asked.
        self.due_at = parts.state.roles.migration.interval_s
        self._state = parts.state
        self._requests = parts.requests
        self._meant: dict[int, str] = {}  # attempt that was interrupted -> instance

    def ask(self, now: float) -> None:
        """Interrupt the requests that the role names, unless earlier migrants are still in flight.

        Asked while nothing waits, so a migrant that is not in flight will not be dispatched.
        """
        fleet, migration = self._state.fleet, self._state.roles.migration
        self.due_at = now + migration.interval_s
        if self._meant:
            attempts = fleet.attempts
            self._meant = {n: where for n, where in self._meant.items() if n in attempts}
            if self._meant:
                return
        for migrant in migration.choose(fleet):
            attempt, instance = migrant.attempt, migrant.instance
            self._check(attempt, instance)
            if not (
                attempt.request.resumable and fleet.sessions.may_begin(attempt.request, instance)
            ):
                continue  # it would start over; or wait, as the target has too many sessions
            attempt.request.migrations += 1
            self._meant[attempt.id] = instance.id
            self._requests.interrupt(attempt.request)

    def target_of(self, request: Request) -> Instance | None:
        """The target of a request that was interrupted to migrate, if open; given only once."""
        if not self._meant:
            return None
        instance = self._meant.pop(request.last_attempt, "")
        return self._state.fleet.open_instance(instance) if instance else None

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


class Dispatcher:
    """Takes waiting requests in order and asks the routing for an instance for each; for a request
    of a session, the affinity decides whether it returns to its last instance instead. A request
    that no open instance suits is set aside."""

    def __init__(self, parts: Parts, migrator: Migrator) -> None:
        roles = parts.state.roles
        self._asks_affinity = not roles.routing.keeps_sessions and roles.affinity.keeps_sessions
        self._state = parts.state
        self._requests = parts.requests
        self._migrator = migrator
        # By instance: the report that `_take_back` acted on, and whether clients were beside.
        self._seen: dict[str, tuple[InstanceReported, bool]] = {}

    def dispatch(self) -> None:
        """Dispatch until no instance is open or no request can go."""
        waiting, fleet = self._requests.waiting, self._state.fleet
        routing = self._state.roles.routing
        capped = fleet.sessions.bound is not None
        waiting.recall()
        while fleet.open:
            request = waiting.first()
            if request is None:
                return
            if capped and not fleet.sessions.taking and request.kv_instance is None:
                waiting.hold(request)  # the requests behind it have no home either
                continue
            instance = self._migrator.target_of(request) or routing.choose(request, fleet)
            if instance is None:
                waiting.hold(request)
                continue
            if instance.open_index < 0:
                raise PolicyError(f"routing chose {instance!r}, which is not open")
            if request.session and self._asks_affinity:
                instance = self._home_or(request, instance)
            choosy = request.failed_on or fleet.contexts.mixed or capped
            if choosy and not self._suits(request, instance):
                instance = self._elsewhere(request)
                if instance is None:
                    waiting.set_aside(request)
                    continue
            waiting.remove(request)
            self._send(request, instance)

    def make_room(self, now: float) -> None:
        """Interrupt requests of clients that hold what others are to have. Each goes on from its
        tokens later, under every policy, as after a migration; one that cannot keeps its slot."""
        shares = self._state.shares
        if shares.in_flight:
            self._take_back(shares.beside(now))
            self._reclaim()
        shares.crowded = shares.contended = False

    def _take_back(self, beside: bool) -> None:
        """If requests wait inside an instance, or will before it reports again, interrupt those
        that came last, of the client that has most there: it does not hold up others by a queue
        that is not ours. A client that is alone is left alone."""
        before, self._seen = self._seen, {}
        shares = self._state.shares
        for instance in self._state.fleet.instances.values():
            report = instance.report
            if report is None:
                continue
            excess, size = _excess(instance, report)
            if not excess:
                continue
            self._seen[instance.id] = report, beside
            known, known_beside = before.get(instance.id, (None, False))
            if known is report and known_beside is beside:
                continue
            here = instance.attempts.values()
            running = [a for a in here if self._runs(a)]
            excess -= sum([a.id in shares.yielding for a in here])
            clients = Counter([a.request.client for a in running])
            most = max(clients, key=lambda client: (bool(client), clients[client]), default="")
            if most and (beside or len(clients) > 1):
                theirs = [a for a in running if a.request.client == most and a.request.resumable]
                keeps = max(1, report.running // ONE_IN)  # the trainer may be who fills it
                for attempt in theirs[keeps:][max(0, len(theirs) - keeps - max(0, excess)) :]:
                    flow = shares.flow(most)
                    flow.size = max(flow.size, size)
                    self._yields(attempt)

    def _reclaim(self) -> None:
        """Interrupt what clients hold beyond each other, those that began last first: slots beyond
        an equal part, and tokens."""
        shares = self._state.shares
        slots, tokens = shares.owed()
        if slots <= 0 and tokens <= 0:
            return
        held: Counter[str] = Counter()
        part = shares.part().slots
        may_yield: list[tuple[int, int, Attempt]] = []
        for attempt in self._state.fleet.attempts.values():
            client, resumable = attempt.request.client, attempt.request.resumable
            if client and resumable and self._runs(attempt):
                held[client] += 1
                may_yield.append((held[client], attempt.id, attempt))
        may_yield.sort(key=lambda entry: entry[:2])
        while may_yield and (slots > 0 or tokens > 0):
            place, _, attempt = may_yield.pop()
            if place <= part and tokens <= 0:
                return
            slots -= 1
            tokens -= shares.flow(attempt.request.client).size
            self._yields(attempt)

    def _yields(self, attempt: Attempt) -> None:
        """All are interrupted at once, which frees the instances soonest: a flood of long requests
        that went a few at a time slowed everybody down for seconds (docs/promises.md)."""
        self._state.shares.yields(attempt)
        self._requests.interrupt(attempt.request)

    @staticmethod
    def _runs(attempt: Attempt) -> bool:
        """The request of an abandoned attempt may run elsewhere by now."""
        return not attempt.abandoned and attempt.request.state is RUNNING

    def _home_or(self, request: Request, elsewhere: Instance) -> Instance:
        """The last instance of its session, if that is open and the affinity prefers it."""
        if request.last_instance is None:
            return elsewhere
        state = self._state
        kv_instance = state.fleet.open_instance(request.last_instance)
        if kv_instance is None or kv_instance is elsewhere:
            return elsewhere
        return (
            kv_instance
            if state.roles.affinity.stays(request, kv_instance, elsewhere)
            else elsewhere
        )

    def _suits(self, request: Request, instance: Instance) -> bool:
        if instance.id in request.failed_on:
            return False
        return self._state.fleet.may_take(request, instance)

    def _elsewhere(self, request: Request) -> Instance | None:
        """An open instance that the request fits on, if possible one where it has not failed."""
        fleet, load = self._state.fleet, self._state.roles.routing.load
        fitting = [instance for instance in fleet.open if fleet.may_take(request, instance)]
        return min(
            fitting, key=lambda i: (i.id in request.failed_on, load(i), i.serial), default=None
        )

    def _send(self, request: Request, instance: Instance) -> None:
        state = self._state
        interruption = state.roles.interruption
        limit = interruption.limit(request) if request.resumable else None
        max_new_tokens = self._requests.room_for(request) or 1
        if limit is not None and limit < max_new_tokens:
            max_new_tokens = limit
        move(request, DISPATCH)
        request.attempt = attempt = state.fleet.send(request, instance, max_new_tokens)
        request.last_attempt = attempt.id
        request.last_instance = instance.id
        if request.salt is None or not interruption.keeps_kv:
            request.salt = instance.version
        group = request.group
        if group is not None:
            state.sample_buffer.note_version(group, instance.version)
        elif request.session:
            state.sessions.sent(request.session, instance.id)
        state.orders.append(
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
            )
        )


def _excess(instance: Instance, report: InstanceReported) -> tuple[int, float]:
    """How many requests fewer would leave a part of the KV cache free until the next report, which
    comes when they have made as many tokens again as since the last one; and the tokens of each by
    then."""
    before = instance.report_before
    tokens = min(report.kv_usage, 1.0) * instance.kv_tokens
    if before is not None:
        made = report.generated_tokens - before.generated_tokens
        tokens += min(max(0, made), instance.kv_tokens)
    if not report.running or tokens < report.running:
        return report.waiting, 0.0
    size = tokens / report.running
    above = ceil((tokens - instance.kv_tokens * (1 - 1 / ONE_IN)) / size)
    room = report.running // ONE_IN if report.waiting else 0
    return report.waiting + max(above, room), size
