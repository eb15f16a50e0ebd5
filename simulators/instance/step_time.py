"""The duration of one engine step, and of many at once: the formulas of the cost model.

Drafted tokens make the number of tokens per step a matter of chance. Only its mean counts here: a
step that verifies k drafts of acceptance a makes E = 1 + a + ... + a^k tokens of each of its B
sequences, and takes

    D = t0 + G((k + 1) B) + c_b B + c C + k (d G(B) + 0.3 t0)

with d the share of a draft step, which takes 0.3 t0 only if a model drafts. So the instance goes on
by steps of one token, which take D / E each: tokens stay whole, k depends on B alone, and m steps
stay one formula. What a step prefills, it takes in addition. Left out: that sequences of one step
gain different numbers of tokens, and the last one of a request more than it needs; that drafts
count as tokens of the step's budget, and take KV slots; the prefill of the drafter.
"""

from __future__ import annotations

from math import inf, sqrt

from rollout_sched.simulators.instance.model import (
    CostModel,
    Speculation,
    acceptance_giving,
    tokens_per_step,
)

#: Drafted tokens per sequence, the seconds to draft them, and the expected tokens of a step.
Drafts = tuple[int, float, float]
NO_DRAFTS: Drafts = (0, 0.0, 1.0)
DRAFT_LAUNCH = 0.3  # of t0


class StepTime:
    """The formulas of `CostModel` with the constants of one instance type. All in seconds."""

    __slots__ = (
        "_acceptance",
        "_attention_s",
        "_chosen",
        "_context_s",
        "_cost",
        "_drafter",
        "_exponent",
        "_factor",
        "_matmuls",
        "_prefill_s",
        "_request_s",
        "_sequence_s",
        "_speculation",
        "_step_s",
        "_token_s",
        "_version",
        "speculates",
    )

    def __init__(self, cost: CostModel, speculation: Speculation | None = None) -> None:
        self.speculates = speculation is not None
        self._cost = cost
        self._matmuls: dict[int, float] = {}  # by tokens; few different values occur
        self._speculation = speculation
        self._version = self._drafter = 0
        self._acceptance = 0.0 if speculation is None else speculation.acceptance_of(0)
        self._chosen: dict[int, Drafts] = {}  # by sequences
        self.slow(1.0)

    def slow(self, factor: float) -> None:
        """Steps take `factor` times as long as the cost model says."""
        cost = self._cost
        self._step_s: float = factor * cost.step_s
        self._factor = factor
        self._token_s: float = factor * cost.token_s
        self._exponent: float = cost.exponent
        self._sequence_s: float = factor * cost.sequence_s
        self._context_s: float = factor * cost.context_s
        self._attention_s: float = factor * cost.attention_s
        self._request_s: float = factor * cost.request_s
        self._prefill_s: float = factor * cost.prefill_s
        self._matmuls.clear()
        self._chosen.clear()

    def set_version(self, version: int) -> None:
        """The weights have changed, and the drafter may not fit them."""
        self._version = version
        self._find_acceptance()

    def update_drafter(self) -> None:
        """It fits the present weights."""
        self._drafter = self._version
        self._find_acceptance()

    def _find_acceptance(self) -> None:
        speculation = self._speculation
        if speculation is not None:
            acceptance = speculation.acceptance_of(self._version, self._drafter)
            if acceptance != self._acceptance:
                self._acceptance = acceptance
                self._chosen.clear()

    def step(
        self, sequences: int, tokens: int, context: int, attention: float, admitted: int
    ) -> float:
        """One step: B decode sequences, n tokens in total without drafts, context C, attention A, R
        requests that are admitted. Without tokens no model runs."""
        if not tokens:
            return self._step_s
        decode_s = self._decode(sequences, tokens, context)
        if tokens == sequences:
            return decode_s
        return (
            decode_s + self._attention_s * attention + self._request_s * admitted + self._prefill_s
        )

    def jump(self, steps: int, sequences: int, context: int) -> float:
        """`steps` decode steps of one constant batch whose contexts sum to `context` in the first
        step; every step adds `sequences` tokens to that sum."""
        first = self._decode(sequences, sequences, context)
        return steps * first + self._growth(sequences) * (steps * (steps - 1) / 2)

    def steps_within(self, seconds: float, sequences: int, context: int) -> int:
        """The inverse of jump: the largest m with jump(m, ...) <= seconds.

        The root of the quadratic is only a guess. It is corrected by comparing with jump itself, so
        that a time returned by jump always gives the steps that jump was called with.
        """
        if seconds <= 0:
            return 0
        half = self._growth(sequences) / 2
        linear = self._decode(sequences, sequences, context) - half
        root = 2 * seconds / (linear + sqrt(linear * linear + 4 * half * seconds))
        steps = int(root)
        while self.jump(steps + 1, sequences, context) <= seconds:
            steps += 1
        while steps and self.jump(steps, sequences, context) > seconds:
            steps -= 1
        return steps

    def schedule(self, most: int) -> tuple[tuple[int, int, int], ...]:
        """The drafts for 1 to `most` decoding sequences, as rows of (first, last, drafts)."""
        rows: list[tuple[int, int, int]] = []
        for sequences in range(1, most + 1):
            first, drafts = sequences, self.drafts(sequences)[0]
            if rows and rows[-1][2] == drafts:
                first = rows.pop()[0]
            rows.append((first, sequences, drafts))
        return tuple(rows)

    def break_even(self, sequences: int, drafts: int) -> float:
        """The acceptance from which so many drafts take no longer per token than none; more than 1
        if they always do."""
        assert self._speculation is not None
        context = self._speculation.context * sequences
        seconds = self._per_token(
            sequences, context, (drafts, drafts * self._draft_s(sequences), 1)
        )
        return acceptance_giving(seconds / self._pass(sequences, sequences, context), drafts)

    def drafts(self, sequences: int) -> Drafts:
        """Those of a step with so many decoding sequences."""
        speculation = self._speculation
        if speculation is None or not sequences:
            return NO_DRAFTS
        known = self._chosen.get(sequences)
        if known is None:
            known = self._chosen[sequences] = self._choose(speculation, sequences)
        return known

    def _growth(self, sequences: int) -> float:
        """By how much a decode step is longer than the one before it."""
        if not self.speculates:
            return self._context_s * sequences
        return self._context_s * sequences / self.drafts(sequences)[2]

    def _decode(self, sequences: int, tokens: int, context: int) -> float:
        if not self.speculates:
            return self._pass(sequences, tokens, context)
        drafts = self.drafts(sequences)
        if not drafts[0]:
            return self._pass(sequences, tokens, context)
        verified = (drafts[0] + 1) * sequences
        prefill_s = self._matmul(verified + tokens - sequences) - self._matmul(verified)
        return self._per_token(sequences, context, drafts) + prefill_s

    def _per_token(self, sequences: int, context: int, drafts: Drafts) -> float:
        """Seconds until each sequence has one more token, in steps with these drafts."""
        count, drafting_s, made = drafts
        return (self._pass(sequences, (count + 1) * sequences, context) + drafting_s) / made

    def _choose(self, speculation: Speculation, sequences: int) -> Drafts:
        context, each_s = speculation.context * sequences, self._draft_s(sequences)
        best, best_s = NO_DRAFTS, inf
        for count in speculation.choices(sequences):
            drafts = (count, count * each_s, tokens_per_step(count, self._acceptance))
            seconds = self._per_token(sequences, context, drafts)
            if seconds < best_s:
                best, best_s = drafts, seconds
        return best

    def _draft_s(self, sequences: int) -> float:
        share = 0.0 if self._speculation is None else self._speculation.draft_cost
        return share * self._matmul(sequences) + (DRAFT_LAUNCH * self._step_s if share else 0.0)

    def _pass(self, sequences: int, tokens: int, context: int) -> float:
        """One run of the model."""
        return (
            self._step_s
            + self._matmul(tokens)
            + self._sequence_s * sequences
            + self._context_s * context
        )

    def _matmul(self, tokens: int) -> float:
        known = self._matmuls.get(tokens)
        if known is not None:
            return known
        read_s = self._factor * self._cost.read_s(tokens)
        power = read_s**self._exponent + (self._token_s * tokens) ** self._exponent
        found: float = power ** (1 / self._exponent)
        self._matmuls[tokens] = found
        return found


class DraftedTokens:
    """Generated tokens by the drafts of their steps."""

    __slots__ = ("_generated", "_time")

    def __init__(self, time: StepTime) -> None:
        self._generated: dict[Drafts, int] = {}
        self._time = time

    def add(self, sequences: int, tokens: int) -> None:
        """Steps of so many sequences generated so many tokens."""
        if self._time.speculates:
            drafts = self._time.drafts(sequences)
            if drafts[0]:
                self._generated[drafts] = self._generated.get(drafts, 0) + tokens

    def totals(self, sequences: int, tokens: int) -> tuple[int, int, int]:
        """The expected drafts, drafted and accepted tokens, with those of so many more tokens in
        steps of so many sequences."""
        if not self._time.speculates:
            return 0, 0, 0
        times = drafted = accepted = 0.0
        generated, drafts = dict(self._generated), self._time.drafts(sequences)
        generated[drafts] = generated.get(drafts, 0) + tokens
        for (count, _, made), number in sorted(generated.items()):
            if count:
                times += number / made
                drafted += number / made * count
                accepted += number / made * (made - 1)
        return round(times), round(drafted), round(accepted)
