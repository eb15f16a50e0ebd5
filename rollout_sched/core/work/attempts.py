"""The ledger of attempts: whether the tokens of an attempt are kept, wasted or abandoned."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

from rollout_sched.core.model.actions import Action, Discard, Interrupt, Wake
from rollout_sched.core.model.events import OfAttempt, Spans
from rollout_sched.core.model.model import Attempt, Instance, Request
from rollout_sched.core.model.records import Segment
from rollout_sched.core.state.lifecycle import RUNNING
from rollout_sched.core.state.state import State


class AttemptLedger:
    """Records what attempts made. An answer is accepted as far as it can be true.

    Attempts are fencing tokens: an answer to an attempt that is not in flight is an anomaly.

    If the request has moved on, its attempt is *abandoned*: its slot stays taken until the instance
    has answered, and its tokens count as discarded.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def find(self, event: OfAttempt) -> Attempt | None:
        """The attempt in flight that an event is about; None, and an anomaly, without one."""
        attempt = self._state.fleet.attempts.get(event.attempt)
        if attempt is None or attempt.request.id != event.request:
            self._state.anomalies["unknown_attempt"] += 1
            return None
        return attempt

    def possible(self, attempt: Attempt, tokens: int) -> int:
        """Limit an impossible token count of an attempt to the possible range."""
        self._state.anomalies["tokens_out_of_range"] += 1
        return min(max(0, tokens), attempt.max_new_tokens)

    def record(self, attempt: Attempt, spans: Spans) -> None:
        """Add what the attempt made to its request."""
        request = attempt.request
        request.attempt = None
        if not attempt.tokens:
            return
        for version, tokens in self._true_spans(attempt, spans):
            request.segments += (Segment(version, tokens, attempt.instance.id),)
            if request.group is not None:
                self._state.sample_buffer.note_version(request.group, version)
        request.response_tokens += attempt.tokens
        request.context_tokens += attempt.tokens
        request.computed_tokens = request.context_tokens

    def record_cut(self, attempt: Attempt, spans: Spans) -> None:
        """Add what an attempt made that ended before its response, if that can be resumed."""
        if not (attempt.request.resumable or attempt.request.aborted):
            self.waste(attempt, "not_resumable")
            attempt.tokens = 0
        self.record(attempt, spans)

    def waste(self, attempt: Attempt, reason: str) -> None:
        """Throw away what an attempt made."""
        if attempt.tokens:
            wasted = discard(attempt.request, attempt.tokens, reason, attempt=attempt.id)
            self._state.orders.append(wasted)

    def abandon(self, request: Request, reason: str) -> None:
        """Drop the future answer of the request's attempt; the slot is free once it answers."""
        attempt = request.attempt
        if attempt is None:
            return
        attempt.abandoned = reason
        request.attempt = None
        if request.state is RUNNING:
            self._state.orders.append(Interrupt(request.id, attempt.id, attempt.instance.id))

    def _true_spans(self, attempt: Attempt, spans: Spans) -> Spans:
        """The spans that the instance reported; if they cannot be true, all tokens count as made by
        the version at dispatch.

        The scheduler knows which versions were loaded when; a span that contradicts it is an
        anomaly.
        """
        if not spans:
            return ((attempt.version, attempt.tokens),)
        if len(spans) == 1 and spans[0] == (attempt.version, attempt.tokens):
            return spans
        versions = [version for version, _ in spans]
        if (
            sum(tokens for _, tokens in spans) != attempt.tokens
            or any(tokens < 0 for _, tokens in spans)
            or versions != sorted(versions)
            or versions[-1] > attempt.instance.version
        ):
            self._state.anomalies["spans_do_not_fit"] += 1
            return ((attempt.version, attempt.tokens),)
        if versions[0] < attempt.version:
            self._state.anomalies["version_older_than_dispatched"] += 1
        return tuple(span for span in spans if span[1])


def discard(
    request: Request, tokens: int, reason: str, *, ends: bool = False, attempt: int = 0
) -> Discard:
    group, index = ("", 0) if request.group is None else (request.group.id, request.index)
    return Discard(request.id, tokens, reason, ends, attempt, group, index)


# ------------------------------------------------------------------------------------------
# Whether the request or the instance is at fault for a failed attempt.
#
# One failure does not tell. The request is tried on another instance: if it succeeds there, the
# first instance was at fault; if it keeps failing, the request is at fault. Until that is known,
# only the request is penalised: it waits longer after each failure. So a request that makes every
# server fail ("poison") costs no other request and no instance anything, and an instance that fails
# now and then keeps working.
#
# If a request could not be sent to an instance, that is the instance's fault; if it cannot be sent
# at all, it is the request's, and it ends. For a 500, a broken answer or a broken connection the
# fault is unclear. When every failure put its instance to rest, one request a second that no server
# can answer took a fleet of four from 2,782 answers a second to 52.

#: An instance rests when this many requests in a row failed there and succeeded elsewhere.
FAULTS_TO_REST = 3


def record_unclear(request: Request, instance: Instance) -> None:
    """An attempt failed, and the request or the instance may be at fault."""
    request.failures += 1
    if instance.id not in request.failed_on:
        request.failed_on += (instance.id,)
    instance.suspects.add(request.id)


def clear(instance: Instance) -> None:
    """The instance has answered: its earlier failures no longer count."""
    instance.faults = instance.rests = 0
    instance.suspects.clear()


def blame_failed_instances(request: Request, instances: Mapping[str, Instance]) -> list[Instance]:
    """The request got an answer, so the instances where it failed were at fault. Returns those that
    must rest."""
    at_fault = []
    for instance in _failed_on(request, instances):
        if request.id in instance.suspects:
            instance.suspects.remove(request.id)
            instance.faults += 1
            if instance.faults >= FAULTS_TO_REST:
                at_fault.append(instance)
    request.failures = 0
    request.failed_on = ()
    return at_fault


def forget(request: Request, instances: Mapping[str, Instance]) -> None:
    """The request ended without an answer: it blames no instance."""
    for instance in _failed_on(request, instances):
        instance.suspects.discard(request.id)
    request.failed_on = ()


def _failed_on(request: Request, instances: Mapping[str, Instance]) -> list[Instance]:
    return [instances[name] for name in request.failed_on if name in instances]


#: Each failure in a row doubles the rest, at most this many times.
MAX_DOUBLINGS = 6


class Backoff:
    """Instances and requests that rest until `rests_until`, earliest first.

    `first_s`: length of the first rest, in seconds.
    """

    def __init__(self, first_s: float, orders: list[Action]) -> None:
        self.first_s = first_s
        self._orders = orders
        self._rests: list[tuple[float, int, Instance | Request]] = []
        self._serial = 0
        self._wake_at = float("inf")

    def rest(self, who: Instance | Request, before: int, now: float) -> None:
        """Start a rest of `who`, after `before` earlier rests in a row."""
        at = now + self.first_s * 2 ** min(before, MAX_DOUBLINGS)
        who.rests_until = at
        self._serial += 1
        heappush(self._rests, (at, self._serial, who))
        if at < self._wake_at:
            self._wake(at)

    def wake(self, now: float) -> list[Instance | Request]:
        """Return those whose rest is over, and end their rest.

        A timer may fire slightly too early: those still resting get another Wake.
        """
        over: list[Instance | Request] = []
        while self._rests and self._rests[0][0] <= now:
            at, _, who = heappop(self._rests)
            if who.rests_until == at:  # else its rest ended earlier
                who.rests_until = 0.0
                over.append(who)
        self._wake_at = float("inf")
        if self._rests:
            self._wake(self._rests[0][0])
        return over

    def _wake(self, at: float) -> None:
        self._wake_at = at
        self._orders.append(Wake(at))
