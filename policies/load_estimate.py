"""An estimate of what an instance holds now.

Unless answers are streamed, no event tells how far a running request is. What is known is the last
poll of its instance: the KV cache in use, divided by the requests that share it, is the average
context of one of them.
"""

from __future__ import annotations

from rollout_sched.core.model.roles import Attempt, Instance

#: A decode step reads the weights and all contexts. This many tokens of context take as long to
#: read as the weights: a 7B on one H100 and a 32B on two, in the shipped scenarios, are near it.
WEIGHTS_TOKENS = 250_000.0


def decode_step(context: float, weights_tokens: float) -> float:
    """Duration of a decode step, in units of the time to read the weights."""
    return 1 + context / weights_tokens


class LoadEstimate:
    """The load of an instance now, and after the requests that `add` and `take` move.

    tokens    in its KV cache, or in the queue for it; `found` is their number before any move
    requests  that run on it, or wait in it
    """

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.requests = instance.in_flight
        report = instance.report
        self._mean = 0.0
        if report is not None and report.running:
            self._mean = report.kv_usage * instance.kv_tokens / report.running
        known = sum(a.context_tokens + a.tokens for a in instance.attempts.values())
        self.found = self.tokens = max(self.requests * self._mean, known)

    def context(self, attempt: Attempt) -> float:
        """The present number of tokens in its context."""
        known = attempt.context_tokens + attempt.tokens
        return known if attempt.tokens else max(known, self._mean)

    def tokens_left(self, attempt: Attempt) -> float:
        """Tokens it has yet to make: by the estimate of its siblings, or as many as it has made.

        The tail is heavy: the requests that have run the longest run on the longest.
        """
        siblings = attempt.request.siblings
        made = attempt.request.response_tokens + self.context(attempt) - attempt.context_tokens
        left = (siblings.estimate or 0) - made
        return min(left if left > 0 else made, siblings.max_tokens - made)

    def has_room(self, context: float, fill: float) -> bool:
        """Whether `context` more tokens keep within `fill` of its KV cache, and find a slot."""
        instance = self.instance
        fits = self.tokens + context <= fill * instance.kv_tokens
        return fits and self.requests < instance.slots

    def add(self, context: float) -> None:
        self.requests += 1
        self.tokens += context

    def take(self, context: float) -> None:
        self.requests -= 1
        self.tokens -= context
