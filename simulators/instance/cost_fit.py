"""Fits the constants of the cost model to recorded steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_sched.simulators.instance.cost_model import CostModel
from rollout_sched.simulators.instance.step_time import StepTime


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
    time = StepTime(cost)
    errors = [abs(_predict(time, row) / row[4] - 1) for row in rows.tolist()]
    return Fit(cost, sum(errors) / len(errors), max(errors))


def _predict(time: StepTime, row: list[float]) -> float:
    sequences, prefill, context, attention, _ = row
    return time.step(int(sequences), int(sequences + prefill), int(context), attention)


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
