"""Estimates that several policies compute: what an instance holds now, how long rounds take.

Unless answers are streamed, no event tells how far a running request is. What is known is the last
poll of its instance: the KV cache in use, divided by the requests that share it, is the average
context of one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from rollout_sched.core.model.records import DeliveredGroup
from rollout_sched.core.model.roles import Attempt, Capacity, Instance

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


# ------------------------------------------------------------------------------------------
# The length of rounds in decode steps, from response lengths and fleet size.
#
# A round takes as many steps as its longest response has tokens, plus the steps that this response
# waits for a place. With C places for N requests of T tokens, a share 1 - C/N of them waits, and
# the places become free at the rate at which C of them make T tokens. That is list scheduling with
# the longest job last (Graham, 1966). Steps also grow longer: each reads the weights and all
# contexts, so reading contexts of c tokens T times takes as long as T c / (n r) steps of n
# instances, if they read r tokens of context in the time of their weights.


class RoundCost:
    """The cost of batches of `prompts` groups that are like `groups`."""

    def __init__(self, groups: Sequence[DeliveredGroup], prompts: int, capacity: Capacity) -> None:
        self._groups = sorted(groups, key=_longest)
        self._prompts = prompts
        self._capacity = capacity

    def steps_per_batch(self, over_prompts: float) -> float:
        """Mean steps per batch, if rounds start `over_prompts` times the prompts of a batch, and
        the prompts that are too long for them have rounds of their own."""
        if over_prompts <= 1:
            return self._round(self._groups, self._prompts, None)
        share = 1 / over_prompts
        kept = max(1, round(share * len(self._groups)))
        cut = _longest(self._groups[kept - 1])
        late = self._groups[kept:] or self._groups[-1:]
        short = self._round(self._groups, self._prompts * over_prompts, cut)
        return share * short + (1 - share) * self._round(late, self._prompts, None)

    def _round(self, groups: Sequence[DeliveredGroup], prompts: float, cut: int | None) -> float:
        """The steps of a round of `prompts` prompts like `groups`. It ends when all responses are
        complete; with `cut`, when those of at most `cut` tokens are."""
        most = _longest(groups[-1]) if cut is None else cut
        lengths = [min(length, most) for group in groups for length in group.lengths]
        made = max(1, sum(lengths))
        prompt = sum(group.prompt_tokens for group in groups) / len(groups)
        context = prompt + sum(length * length for length in lengths) / (2 * made)
        tokens = made * prompts / len(groups)
        return (
            (self._expected_longest(groups) if cut is None else cut)
            + self._waiting(prompts * len(lengths) / len(groups), tokens, context)
            + tokens * context / (self._capacity.instances * WEIGHTS_TOKENS)
        )

    def _waiting(self, requests: float, tokens: float, context: float) -> float:
        places = max(1.0, min(self._capacity.slots, self._capacity.kv_tokens / max(1.0, context)))
        return max(0.0, 1 - places / requests) * tokens / places

    def _expected_longest(self, groups: Sequence[DeliveredGroup]) -> float:
        """The longest response of as many groups as a batch has, drawn from ascending `groups`."""
        number, drawn = len(groups), self._prompts
        return sum(
            _longest(group) * (((place + 1) / number) ** drawn - (place / number) ** drawn)
            for place, group in enumerate(groups)
        )


def best_over_prompts(cost: RoundCost, most: float, least_gain: float) -> float:
    """By how much to multiply the prompts of a batch: at most `most`, in eighths, and 1 if that
    does not save the share `least_gain` of the steps."""
    eighths = [1 + eighth / 8 for eighth in range(1, ceil((most - 1) * 8))]
    best = min([*eighths, most], key=cost.steps_per_batch)
    return (
        best if cost.steps_per_batch(best) <= (1 - least_gain) * cost.steps_per_batch(1.0) else 1.0
    )


def _longest(group: DeliveredGroup) -> int:
    return max(group.lengths)
