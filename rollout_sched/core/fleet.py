"""The fleet: instances, the attempts they hold, and which of them are open for more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from rollout_sched.core.events import InstanceReported
from rollout_sched.core.kv_sizes import KvSizes
from rollout_sched.core.model import Attempt, Instance, InstanceStatus, Request
from rollout_sched.core.open_instances import OpenInstances
from rollout_sched.core.roles import SessionAdmission
from rollout_sched.core.session_room import SessionRoom

# An enum member lookup costs as much as the rest of the test in `touch`.
SERVING: Final = InstanceStatus.SERVING


class Fleet:
    """All known instances and all attempts in flight.

    kv        KV cache sizes of the instances
    sessions  which instances may take a new session
    """

    def __init__(
        self,
        load: Callable[[Instance], Any],
        admits: Callable[[Instance], bool],
        sessions: SessionAdmission | None = None,
        *,
        counts_finished: bool = False,
    ) -> None:
        self.sessions = SessionRoom(sessions)
        self.counts_finished = counts_finished
        self.instances: dict[str, Instance] = {}
        self.attempts: dict[int, Attempt] = {}
        self.kv = KvSizes()
        self._ranked = ranked = OpenInstances(load)
        self.open = ranked.open
        self._admits = admits
        self._versions: Counter[int] = Counter()
        self._joined = 0
        self.dispatched = 0  # the id of the last attempt

    # -- read by policies ------------------------------------------------------------------

    def least(self) -> Instance | None:
        return self._ranked.least()

    def open_instance(self, instance: str) -> Instance | None:
        found = self.instances.get(instance)
        return found if found is not None and found.open_index >= 0 else None

    def may_take(self, request: Request, instance: Instance) -> bool:
        """Whether the instance has room for the request in its KV cache and its sessions."""
        return self.kv.fits(request, instance) and self.sessions.may_begin(request, instance)

    # -- facts derived from the instances --------------------------------------------------

    @property
    def version(self) -> int | None:
        """The oldest version any instance may still generate with; None without instances."""
        return min(self._versions, default=None)

    # -- changed by the scheduler ----------------------------------------------------------

    def join(self, name: str, slots: int, kv_tokens: int, version: int) -> Instance:
        instance = Instance(name, self._joined, slots, kv_tokens, version)
        self._joined += 1
        self.instances[name] = instance
        self._versions[version] += 1
        self.kv.measure(self.instances.values())
        self.touch(instance)
        return instance

    def lose(self, instance: Instance) -> list[Attempt]:
        """Remove an instance; its attempts are closed and returned."""
        del self.instances[instance.id]
        self._count_version(instance.version, -1)
        attempts = list(instance.attempts.values())
        for attempt in attempts:
            del self.attempts[attempt.id]
        instance.attempts.clear()
        self.kv.measure(self.instances.values())
        self._shut(instance)
        instance.heap_version += 1
        return attempts

    def set_version(self, instance: Instance, version: int) -> None:
        self._count_version(instance.version, -1)
        instance.version = version
        self._count_version(version, +1)

    def send(self, request: Request, instance: Instance, max_new_tokens: int) -> Attempt:
        """Start an attempt; the caller has checked that the instance is open."""
        self.dispatched += 1
        expected = min(max_new_tokens, max(0, request.expected_tokens - request.response_tokens))
        attempt = Attempt(
            self.dispatched,
            request,
            instance,
            instance.version,
            request.context_tokens,
            max_new_tokens,
            expected,
        )
        self.attempts[attempt.id] = attempt
        instance.attempts[attempt.id] = attempt
        instance.tokens += attempt.context_tokens + expected
        instance.last_dispatch = attempt.id
        instance.unreported += 1
        if request.home is not None:
            self.leave(request)
        self.touch(instance)
        return attempt

    def close(self, attempt: Attempt) -> None:
        """The instance has answered: the slot is free."""
        instance = attempt.instance
        del self.attempts[attempt.id]
        del instance.attempts[attempt.id]
        instance.tokens -= attempt.context_tokens + attempt.expected_tokens
        self.touch(instance)

    def keep(self, request: Request, instance: Instance) -> None:
        """A turn is over: the instance keeps its KV for the next one."""
        request.home = instance
        instance.kept[request.id] = request
        self.touch(instance)

    def leave(self, request: Request) -> None:
        """The KV of the request need not be kept any longer."""
        instance = request.home
        if instance is not None:
            request.home = None
            del instance.kept[request.id]
            self.touch(instance)

    def finished(self, request: Request) -> None:
        """The request is finished: count its final context for its last instance."""
        self.leave(request)
        if not self.counts_finished:
            return
        instance = self.instances.get(request.last_instance or "")
        if instance is not None:
            instance.finished += 1
            instance.finished_tokens += request.context_tokens
            self.touch(instance)

    def report(self, instance: Instance, report: InstanceReported) -> None:
        """Store a poll of an instance, which may change its load."""
        self.sessions.observe(instance, report)
        instance.report_before = instance.report
        instance.report = report
        instance.unreported = 0
        self.touch(instance)

    def shrink(self, attempt: Attempt, context_tokens: int, rejected: int) -> None:
        """Remove `context_tokens` tokens from the attempt's context, tool output included. The
        attempt may make `rejected` tokens more, and is expected to."""
        attempt.context_tokens -= context_tokens
        attempt.max_new_tokens += rejected
        attempt.instance.tokens -= context_tokens
        self.expect(attempt, attempt.expected_tokens + rejected)

    def expect(self, attempt: Attempt, expected_tokens: int) -> None:
        """A new prediction of how many tokens the attempt will make."""
        expected = min(attempt.max_new_tokens, max(0, expected_tokens))
        instance = attempt.instance
        instance.tokens += expected - attempt.expected_tokens
        attempt.expected_tokens = expected
        self.touch(instance)

    def touch(self, instance: Instance) -> None:
        """Something that openness or load depends on has changed: update both."""
        instance.heap_version += 1
        may_serve = instance.status is SERVING and not instance.rests_until and not instance.leaving
        if may_serve and not instance.gate_closed and self._admits(instance):
            self._ranked.put(instance)
            if self.sessions.bound is not None:
                self.sessions.update(instance)
        elif instance.open_index >= 0:
            self._shut(instance)

    # -- inside ----------------------------------------------------------------------------

    def _shut(self, instance: Instance) -> None:
        if instance.open_index >= 0:
            self.sessions.close(instance)
            self._ranked.remove(instance)

    def _count_version(self, version: int, by: int) -> None:
        self._versions[version] += by
        if not self._versions[version]:
            del self._versions[version]
