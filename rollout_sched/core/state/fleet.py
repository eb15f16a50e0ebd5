"""The fleet: instances, the attempts they hold, and which of them are open for more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Final

from rollout_sched.core.model.events import InstanceReported
from rollout_sched.core.model.model import Attempt, Instance, InstanceStatus, Request
from rollout_sched.core.model.roles import SessionAdmission
from rollout_sched.core.state.waiting import Shares

# ------------------------------------------------------------------------------------------
# The open instances, and which of them is least loaded.
#
# `least()` must not cost more as the fleet grows, so open instances are in a heap of (load, serial,
# heap version). A change increases the instance's heap version, which makes its entry stale, and
# marks it as moved. The new entry is made at the next query, because no dispatch follows most
# changes. Stale entries are dropped when they reach the top, and the heap is rebuilt when they
# outnumber live ones, so every operation is O(log instances) amortised.

Heap = list[tuple[Any, int, int, Instance]]


class OpenInstances:
    """`open` lists the open instances by their `open_index`, which is -1 for all others."""

    def __init__(self, load: Callable[[Instance], Any]) -> None:
        self.open: list[Instance] = []
        self._load = load
        self._heap: Heap = []
        self._moved: set[Instance] = set()  # open or not: their entries are stale

    def least(self) -> Instance | None:
        """The open instance of least load; among equals, the one that joined first."""
        if self._moved:
            self._settle()
        heap = self._heap
        while heap:
            _, _, version, instance = heap[0]
            if version == instance.heap_version and instance.open_index >= 0:
                return instance
            heappop(heap)
        return None

    def put(self, instance: Instance) -> None:
        """The instance is open, and its load may have changed."""
        if instance.open_index < 0:
            instance.open_index = len(self.open)
            self.open.append(instance)
        self._moved.add(instance)

    def remove(self, instance: Instance) -> None:
        """The instance is no longer open; the last of the list takes its place."""
        last = self.open.pop()
        if last is not instance:
            self.open[instance.open_index] = last
            last.open_index = instance.open_index
        instance.open_index = -1

    def _settle(self) -> None:
        """Make new heap entries for the instances that have moved."""
        heap, moved = self._heap, self._moved
        if len(heap) + len(moved) > 64 + 4 * len(self.open):
            heap[:] = [(self._load(i), i.serial, i.heap_version, i) for i in self.open]
            heapify(heap)
            moved.clear()
            return
        for instance in moved:
            if instance.open_index < 0:
                continue
            entry = (self._load(instance), instance.serial, instance.heap_version, instance)
            if heap and heap[0][3] is instance:
                heapreplace(heap, entry)  # its old entry is stale: saves the pop
            else:
                heappush(heap, entry)
        moved.clear()


class SessionRoom:
    """Which instances may take a new session, if the admission bounds sessions. `taking` counts the
    open instances that take new sessions (`Instance.accepts_sessions`).

    bound    the admission that bounds sessions; None if there is none
    """

    def __init__(self, bound: SessionAdmission | None) -> None:
        self.bound = bound
        self.taking = 0

    def may_begin(self, request: Request, instance: Instance) -> bool:
        """Whether there is room; a request that has KV somewhere is not checked."""
        return instance.accepts_sessions or self.bound is None or request.kv_instance is not None

    def observe(self, instance: Instance, report: InstanceReported) -> None:
        if self.bound is not None:
            instance.observed = self.bound.observe(instance, report)

    def update(self, instance: Instance) -> None:
        """The instance is open, and something has changed."""
        if self.bound is not None:
            self._take_new(instance, self.bound.begins(instance))

    def close(self, instance: Instance) -> None:
        """The instance is no longer open."""
        self._take_new(instance, False)

    def _take_new(self, instance: Instance, accepts_sessions: bool) -> None:
        self.taking += accepts_sessions - instance.accepts_sessions
        instance.accepts_sessions = accepts_sessions


class ContextLimits:
    """How many tokens one request may have on each instance, and so which request fits where.

    largest     of the current instances; None if there are none
    most        also of the instances that were lost and may join again
    mixed       whether some current instance takes less than `most`
    largest_kv  the largest KV cache of the current instances, in tokens; None if there are none
    """

    def __init__(self) -> None:
        self.largest: int | None = None
        self.most = 0
        self.mixed = False
        self.largest_kv: int | None = None
        self._known: dict[str, int] = {}

    def restore(self, most: int) -> None:
        """An instance of an earlier scheduler, which may join again, took so much."""
        self.most = self._known[""] = most

    def update(self, instances: Collection[Instance], removed: str | None = None) -> None:
        """Take the limits of the current instances; one was `removed` for good."""
        limits = {instance.id: instance.max_context for instance in instances}
        self._known.update(limits)
        if removed is not None:
            del self._known[removed]
        self.largest = max(limits.values(), default=None)
        self.most = max(self._known.values(), default=0)
        self.mixed = any(limit < self.most for limit in limits.values())
        self.largest_kv = max([instance.kv_tokens for instance in instances], default=None)

    def fits(self, request: Request, instance: Instance) -> bool:
        """Whether the instance takes all that the request may become, or as much as any.

        A request that fits only on an instance that was lost waits for it, or another one of that
        size, so that its response is not cut short.
        """
        needed = max(request.context_tokens + request.remaining_tokens, request.least_context)
        return instance.max_context >= needed or instance.max_context >= self.most


# An enum member lookup costs as much as the rest of the test in `touch`.
SERVING: Final = InstanceStatus.SERVING


class Fleet:
    """All known instances and all attempts in flight.

    contexts  how many tokens one request may have on each instance
    sessions  which instances may take a new session
    """

    def __init__(
        self,
        load: Callable[[Instance], Any],
        admits: Callable[[Instance], bool],
        shares: Shares,
        sessions: SessionAdmission | None = None,
        *,
        counts_finished: bool = False,
    ) -> None:
        self.sessions = SessionRoom(sessions)
        self._shares = shares
        self.counts_finished = counts_finished
        self.instances: dict[str, Instance] = {}
        self.attempts: dict[int, Attempt] = {}
        self.contexts = ContextLimits()
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
        """Whether the request fits the instance's limit of tokens and its sessions."""
        return self.contexts.fits(request, instance) and self.sessions.may_begin(request, instance)

    # -- facts derived from the instances --------------------------------------------------

    @property
    def version(self) -> int | None:
        """The oldest version any instance may still generate with; None without instances."""
        return min(self._versions, default=None)

    # -- changed by the scheduler ----------------------------------------------------------

    def join(
        self, name: str, slots: int, kv_tokens: int, version: int, max_model_len: int = 0
    ) -> Instance:
        instance = Instance(name, self._joined, slots, kv_tokens, version)
        if max_model_len:
            instance.max_context = min(kv_tokens, max_model_len)
        self._joined += 1
        self.instances[name] = instance
        self._shares.slots += slots
        self._shares.kv_tokens += kv_tokens
        self._versions[version] += 1
        self.contexts.update(self.instances.values())
        self.touch(instance)
        return instance

    def lose(self, instance: Instance, *, removed: bool = False) -> list[Attempt]:
        """The instance is gone, for good if it was removed; its attempts are closed and
        returned."""
        del self.instances[instance.id]
        self._shares.slots -= instance.slots
        self._shares.kv_tokens -= instance.kv_tokens
        self._count_version(instance.version, -1)
        attempts = list(instance.attempts.values())
        for attempt in attempts:
            del self.attempts[attempt.id]
            self._shares.ended(attempt)
        instance.attempts.clear()
        self.contexts.update(self.instances.values(), instance.id if removed else None)
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
        self._shares.began(attempt)
        instance.last_dispatch = attempt.id
        instance.unreported += 1
        if request.kv_instance is not None:
            self.release_kv(request)
        self.touch(instance)
        return attempt

    def close(self, attempt: Attempt) -> None:
        """The instance has answered: the slot is free."""
        instance = attempt.instance
        del self.attempts[attempt.id]
        del instance.attempts[attempt.id]
        instance.tokens -= attempt.context_tokens + attempt.expected_tokens
        self._shares.ended(attempt)
        self.touch(instance)

    def retain_kv(self, request: Request, instance: Instance) -> None:
        """A turn is over: the instance keeps its KV for the next one."""
        request.kv_instance = instance
        instance.resident[request.id] = request
        self.touch(instance)

    def release_kv(self, request: Request) -> None:
        """The KV of the request need not be kept any longer."""
        instance = request.kv_instance
        if instance is not None:
            request.kv_instance = None
            del instance.resident[request.id]
            self.touch(instance)

    def finished(self, request: Request) -> None:
        """The request is finished: count its final context for its last instance."""
        self.release_kv(request)
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

    def expect(self, attempt: Attempt, expected_tokens: int) -> None:
        """A new prediction of how many tokens the attempt will make."""
        expected = min(attempt.max_new_tokens, max(0, expected_tokens))
        instance = attempt.instance
        instance.tokens += expected - attempt.expected_tokens
        self._shares.expect(attempt.request.client, expected - attempt.expected_tokens)
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
