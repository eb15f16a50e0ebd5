"""How long one engine step takes, and how to learn it from recorded steps.

    step = t0 + G(n) + c_b * B + k * C + a * A
    G(n) = (t_w ** p + (s * n) ** p) ** (1 / p)

with B decode sequences, n tokens in the step (B plus the prefill tokens), C the sum of the
decode contexts and A the attention work of the prefill chunks, sum of q * (prefix + q / 2).

G joins the two regimes of a matrix multiplication smoothly: reading the weights (t_w, memory
bound) and multiplying (s per token, compute bound). With p = 1.6 it was fitted to the published
kernel tables of Vidur (arXiv 2405.05465) for 38 combinations of GPU, model and tensor
parallelism with a mean error of 3-7 %; a straight line misses the knee between the regimes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The constants of one instance type, all in seconds.

    step_s       t0   per step: launching, sampling, the scheduler itself
    weights_s    t_w  reading all weights once
    token_s      s    matrix multiplications of one token
    exponent     p    how sharply the two regimes meet, >= 1
    sequence_s   c_b  per decode sequence
    context_s    k    reading the KV of one context token in a decode
    attention_s  a    one query token attending to one key token in a prefill

    Raises ValueError if a constant is negative or not finite, or a step could take no time.
    """

    step_s: float
    weights_s: float
    token_s: float
    exponent: float = 1.6
    sequence_s: float = 0.0
    context_s: float = 0.0
    attention_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"cost model: {name} must be finite and >= 0, got {value}")
        if self.exponent < 1:
            raise ValueError(f"cost model: exponent must be >= 1, got {self.exponent}")
        if self.step_s + self.weights_s <= 0:
            raise ValueError("cost model: step_s + weights_s must be > 0, else time stands still")

    def step(self, sequences: int, tokens: int, context: int, attention: float) -> float:
        """Seconds of one step: B decode sequences, n tokens in all, context C, attention A."""
        return (
            self.step_s
            + _matmul_s(self.weights_s, self.token_s, self.exponent, tokens)
            + self.sequence_s * sequences
            + self.context_s * context
            + self.attention_s * attention
        )

    def jump(self, steps: int, sequences: int, context: int) -> float:
        """Seconds of `steps` decode steps of one unchanging batch whose contexts sum to
        `context` in the first of them: every step adds `sequences` tokens to that sum."""
        first = (
            self.step_s
            + _matmul_s(self.weights_s, self.token_s, self.exponent, sequences)
            + self.sequence_s * sequences
            + self.context_s * context
        )
        return steps * first + self.context_s * sequences * (steps * (steps - 1) / 2)

    def steps_within(self, seconds: float, sequences: int, context: int) -> int:
        """The inverse of jump: the largest m with jump(m, ...) <= seconds.

        The root of the quadratic only gives a guess; comparing with jump itself settles it, so
        that a time which jump returned is always worth the steps that it was asked for.
        """
        if seconds <= 0:
            return 0
        half = self.context_s * sequences / 2
        linear = self.step(sequences, sequences, context, 0.0) - half
        root = 2 * seconds / (linear + math.sqrt(linear * linear + 4 * half * seconds))
        steps = int(root)
        while self.jump(steps + 1, sequences, context) <= seconds:
            steps += 1
        while steps and self.jump(steps, sequences, context) > seconds:
            steps -= 1
        return steps


@lru_cache(maxsize=1 << 16)
def _matmul_s(weights_s: float, token_s: float, exponent: float, tokens: int) -> float:
    power = weights_s**exponent + (token_s * tokens) ** exponent
    return float(power ** (1 / exponent))


class Observation(NamedTuple):
    """One recorded engine step."""

    sequences: float
    """decode sequences"""
    prefill_tokens: float
    context: float
    """sum of the decode contexts, tokens"""
    attention: float
    """sum over prefill chunks of q * (prefix + q / 2)"""
    seconds: float


class Fit(NamedTuple):
    """A fitted cost model and how far it is from the rows it was fitted to (relative)."""

    cost: CostModel
    mean_error: float
    max_error: float


Floats = NDArray[np.float64]


def fit(observations: Iterable[Observation | tuple[float, ...]], exponent: float = 1.6) -> Fit:
    """Least squares of the relative error over recorded steps; no constant gets negative.

    For a given ratio s / t_w the formula is linear in the other constants, so a search over that
    one ratio is enough. Rows that only decode cannot tell t0 from t_w nor c_b from s: include
    prefill steps if the constants, and not only the total, shall mean something.

    Raises ValueError for no rows, rows of other than five numbers, or seconds <= 0.
    """
    rows = np.asarray(list(observations), dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] != len(Observation._fields):
        raise ValueError(
            f"fit needs rows of {Observation._fields}, got an array of shape {rows.shape}"
        )
    if not (np.isfinite(rows).all() and (rows[:, :4] >= 0).all() and (rows[:, 4] > 0).all()):
        raise ValueError("fit needs finite rows with counts >= 0 and seconds > 0")

    best_error, best_ratio = math.inf, 0.0
    low, high = -9.0, 3.0
    for _ in range(6):  # each round narrows the bracket to the neighbours of the best ratio
        grid = np.linspace(low, high, 25)
        for exponent_of_ten in grid:
            error, _ = _fit_at(rows, 10.0**exponent_of_ten, exponent)
            if error < best_error:
                best_error, best_ratio = error, float(exponent_of_ten)
        width = float(grid[1] - grid[0])
        low, high = best_ratio - width, best_ratio + width

    ratio = 10.0**best_ratio
    _, (step_s, weights_s, sequence_s, context_s, attention_s) = _fit_at(rows, ratio, exponent)
    cost = CostModel(
        step_s=step_s,
        weights_s=weights_s,
        token_s=ratio * weights_s,
        exponent=exponent,
        sequence_s=sequence_s,
        context_s=context_s,
        attention_s=attention_s,
    )
    errors = [abs(_predict(cost, row) / row[4] - 1) for row in rows.tolist()]
    return Fit(cost, sum(errors) / len(errors), max(errors))


def _predict(cost: CostModel, row: list[float]) -> float:
    sequences, prefill, context, attention, _ = row
    return cost.step(int(sequences), int(sequences + prefill), int(context), attention)


def _fit_at(rows: Floats, ratio: float, exponent: float) -> tuple[float, list[float]]:
    """Best (t0, t_w, c_b, k, a) >= 0 with s = ratio * t_w, and its sum of squared errors."""
    sequences, prefill, context, attention, seconds = rows.T
    matmul = (1 + (ratio * (sequences + prefill)) ** exponent) ** (1 / exponent)
    columns = np.stack([np.ones_like(seconds), matmul, sequences, context, attention], axis=1)
    columns /= seconds[:, None]
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    # The triangle of QR has the same least-squares problem in six rows, however many came in.
    stacked = np.column_stack([columns / scale, np.ones_like(seconds)])
    triangle: Any = np.linalg.qr(stacked, mode="r")
    error, scaled = _non_negative_least_squares(triangle[:, :-1], triangle[:, -1])
    return error, (scaled / scale).tolist()


def _non_negative_least_squares(matrix: Floats, target: Floats) -> tuple[float, Floats]:
    """Exact for a handful of columns: the best of all subsets whose solution is >= 0."""
    width = matrix.shape[1]
    best, solution = float(target @ target), np.zeros(width)
    for size in range(1, width + 1):
        for subset in combinations(range(width), size):
            part = matrix[:, list(subset)]
            found: Any = np.linalg.lstsq(part, target, rcond=None)[0]
            residual = part @ found - target
            error = float(residual @ residual)
            if (found >= 0).all() and error < best:
                best, solution = error, np.zeros(width)
                solution[list(subset)] = found
    return best, solution
