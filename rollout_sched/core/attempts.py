"""The ledger of attempts: whether the tokens of an attempt are kept, wasted or abandoned."""

from __future__ import annotations

from collections import Counter

from rollout_sched.core.actions import Action, Discard, Interrupt
from rollout_sched.core.events import (
    PrefixVerified,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    Spans,
    TokensArrived,
    TurnFinished,
)
from rollout_sched.core.fleet import Fleet
from rollout_sched.core.lifecycle import RUNNING
from rollout_sched.core.model import Attempt, Request
from rollout_sched.core.sample_buffer import SampleBuffer
from rollout_sched.core.samples import Segment

OfAttempt = (
    RequestFinished
    | TurnFinished
    | RequestInterrupted
    | RequestFailed
    | TokensArrived
    | PrefixVerified
)


class AttemptLedger:
    """Records what attempts made. An answer is accepted as far as it can be true.

    Attempts are fencing tokens: an answer to an attempt that is not in flight is an anomaly.
    """

    def __init__(
        self, fleet: Fleet, samples: SampleBuffer, anomalies: Counter[str], out: list[Action]
    ) -> None:
        self._fleet = fleet
        self._samples = samples
        self._anomalies = anomalies
        self._out = out

    def find(self, event: OfAttempt) -> Attempt | None:
        """The attempt in flight that an event is about; None, and an anomaly, without one."""
        attempt = self._fleet.attempts.get(event.attempt)
        if attempt is None or attempt.request.id != event.request:
            self._anomalies["unknown_attempt"] += 1
            return None
        return attempt

    def possible(self, attempt: Attempt, tokens: int) -> int:
        """Limit an impossible token count of an attempt to the possible range."""
        self._anomalies["tokens_out_of_range"] += 1
        return min(max(0, tokens), attempt.max_new_tokens)

    def keep(self, attempt: Attempt, spans: Spans) -> None:
        """Add what the attempt made to its request."""
        request = attempt.request
        request.attempt = None
        if not attempt.tokens:
            return
        for version, tokens in self._true_spans(attempt, spans):
            request.segments += (Segment(version, tokens, attempt.instance.id),)
            group = request.group
            if group is not None and group in self._samples:
                self._samples.note_version(group, version)
        request.response_tokens += attempt.tokens
        request.context_tokens += attempt.tokens
        request.computed_tokens = request.context_tokens

    def waste(self, attempt: Attempt, reason: str) -> None:
        """Throw away what an attempt made."""
        if attempt.tokens:
            self._out.append(discard(attempt.request, attempt.tokens, reason, attempt=attempt.id))

    def abandon(self, request: Request, reason: str) -> None:
        """Drop the future answer of the request's attempt; the slot is free once it answers."""
        attempt = request.attempt
        if attempt is None:
            return
        attempt.abandoned = reason
        request.attempt = None
        if request.state is RUNNING:
            self._out.append(Interrupt(request.id, attempt.id, attempt.instance.id))

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
            self._anomalies["spans_do_not_fit"] += 1
            return ((attempt.version, attempt.tokens),)
        if versions[0] < attempt.version:
            self._anomalies["version_older_than_dispatched"] += 1
        return tuple(span for span in spans if span[1])


def discard(
    request: Request, tokens: int, reason: str, *, ends: bool = False, attempt: int = 0
) -> Discard:
    group, index = ("", 0) if request.group is None else (request.group.id, request.index)
    return Discard(request.id, tokens, reason, ends, attempt, group, index)
