"""The duration of one engine step, and of many at once: the formulas of the cost model."""

from __future__ import annotations

from math import sqrt

from rollout_sched.simulators.instance.model import CostModel


class StepTime:
    """The formulas of `CostModel` with the constants of one instance type. All in seconds."""

    __slots__ = (
        "_attention_s",
        "_context_s",
        "_exponent",
        "_matmuls",
        "_prefill_s",
        "_request_s",
        "_sequence_s",
        "_step_s",
        "_token_s",
        "_weights_s",
    )

    def __init__(self, cost: CostModel) -> None:
        self._step_s: float = cost.step_s
        self._weights_s: float = cost.weights_s
        self._token_s: float = cost.token_s
        self._exponent: float = cost.exponent
        self._sequence_s: float = cost.sequence_s
        self._context_s: float = cost.context_s
        self._attention_s: float = cost.attention_s
        self._request_s: float = cost.request_s
        self._prefill_s: float = cost.prefill_s
        self._matmuls: dict[int, float] = {}  # by tokens; few different values occur

    def step(
        self, sequences: int, tokens: int, context: int, attention: float, admitted: int
    ) -> float:
        """One step: B decode sequences, n tokens in total, context C, attention A, R requests that
        are admitted. Without tokens no model runs."""
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
        return steps * first + self._context_s * sequences * (steps * (steps - 1) / 2)

    def steps_within(self, seconds: float, sequences: int, context: int) -> int:
        """The inverse of jump: the largest m with jump(m, ...) <= seconds.

        The root of the quadratic is only a guess. It is corrected by comparing with jump itself, so
        that a time returned by jump always gives the steps that jump was called with.
        """
        if seconds <= 0:
            return 0
        half = self._context_s * sequences / 2
        linear = self._decode(sequences, sequences, context) - half
        root = 2 * seconds / (linear + sqrt(linear * linear + 4 * half * seconds))
        steps = int(root)
        while self.jump(steps + 1, sequences, context) <= seconds:
            steps += 1
        while steps and self.jump(steps, sequences, context) > seconds:
            steps -= 1
        return steps

    def _decode(self, sequences: int, tokens: int, context: int) -> float:
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
        power = self._weights_s**self._exponent + (self._token_s * tokens) ** self._exponent
        found: float = power ** (1 / self._exponent)
        self._matmuls[tokens] = found
        return found
