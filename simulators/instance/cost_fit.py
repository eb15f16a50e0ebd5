"""Fit the constants of the cost model to recorded steps, of which many are measured together."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_sched.simulators.instance.model import CostModel


class EngineSteps(NamedTuple):
    """Engine steps with equal sequences and prefill tokens; other fields are sums over them."""

    number: float
    sequences: float
    """decode sequences of each"""
    prefill_tokens: float
    """of each"""
    context: float
    """sum of the decode contexts, tokens"""
    attention: float
    """sum over prefill chunks of q * (prefix + q / 2)"""
    requests: float
    """that are admitted"""


class MeasuredSpan(NamedTuple):
    """What an engine did in `seconds`, and the client's extra work in that time."""

    steps: Sequence[EngineSteps]
    seconds: float
    calls: int = 0
    """round trips, one after the other"""


class Fit(NamedTuple):
    """A fitted cost model and its relative errors on the data it was fitted to.

    call_s    seconds per call, in addition to the engine's
    errors    predicted / recorded - 1 of each span
    """

    cost: CostModel
    call_s: float
    errors: list[float]

    @property
    def mean_error(self) -> float:
        return sum(map(abs, self.errors)) / len(self.errors)

    @property
    def max_error(self) -> float:
        return max(map(abs, self.errors))


Floats = NDArray[np.float64]

#: The constants that are linear once s / t_w is given, in the order of the columns.
_CONSTANTS = (
    "step_s",
    "weights_s",
    "sequence_s",
    "context_s",
    "attention_s",
    "request_s",
    "prefill_s",
    "call_s",
)

#: Columns and target are scaled to about one, so smaller values are rounding errors.
_NO_GAIN = 1e-13


def fit_spans(
    spans: Iterable[MeasuredSpan], exponent: float = 1.6, leave_out: Collection[str] = ()
) -> Fit:
    """Least squares of the relative error over recorded times; no constant becomes negative.

    For a given ratio s / t_w the formula is linear in the other constants, so a search over that
    ratio is enough. Rows that only decode cannot separate t0 from t_w nor c_b from s: include
    prefill steps if the single constants matter, not only the total. Constants named in `leave_out`
    are 0.

    Raises ValueError for no spans, one without steps, or seconds <= 0.
    """
    table = _Table(list(spans), exponent, leave_out)
    best_error, best_ratio = math.inf, 0.0
    low, high = -9.0, 3.0
    for _ in range(6):  # each round narrows the bracket to the neighbours of the best ratio
        grid = np.linspace(low, high, 25)
        for exponent_of_ten in grid:
            error, _ = table.fit_at(10.0**exponent_of_ten)
            if error < best_error:
                best_error, best_ratio = error, float(exponent_of_ten)
        width = float(grid[1] - grid[0])
        low, high = best_ratio - width, best_ratio + width

    ratio = 10.0**best_ratio
    _, constants = table.fit_at(ratio)
    found = dict(zip(_CONSTANTS, constants.tolist(), strict=True))
    call_s = found.pop("call_s")
    cost = CostModel(**found, token_s=ratio * found["weights_s"], exponent=exponent)
    predicted = table.columns(ratio) @ constants
    return Fit(cost, call_s, (predicted / table.seconds - 1).tolist())


class _Table:
    """Spans as arrays: a row of `steps` for each kind of step; the rows of a span are adjacent."""

    def __init__(
        self, spans: list[MeasuredSpan], exponent: float, leave_out: Collection[str]
    ) -> None:
        if not spans or not all(span.steps for span in spans):
            raise ValueError("fit needs spans, each with at least one step")
        sizes = [len(span.steps) for span in spans]
        steps = [row for span in spans for row in span.steps]
        self._steps = np.asarray(steps, dtype=np.float64)
        self._starts = np.cumsum([0, *sizes[:-1]])
        self._calls = np.asarray([span.calls for span in spans], dtype=np.float64)
        self.seconds = np.asarray([span.seconds for span in spans], dtype=np.float64)
        self._exponent = exponent
        self._fitted = np.asarray([name not in leave_out for name in _CONSTANTS])
        finite = np.isfinite(self._steps).all() and np.isfinite(self.seconds).all()
        if not (finite and (self._steps >= 0).all() and (self.seconds > 0).all()):
            raise ValueError("fit needs finite rows with counts >= 0 and seconds > 0")

    def columns(self, ratio: float) -> Floats:
        """The factor of each constant, one row per span, with s = ratio * t_w."""
        number, sequences, prefill, context, attention, requests = self._steps.T
        p = self._exponent
        matmul = number * (1 + (ratio * (sequences + prefill)) ** p) ** (1 / p)
        prefills = number * (prefill > 0)
        each = [number, matmul, number * sequences, context, attention, requests, prefills]
        sums: Floats = np.add.reduceat(np.stack(each, axis=1), self._starts, axis=0)
        columns: Floats = np.column_stack([sums, self._calls]) * self._fitted
        return columns

    def fit_at(self, ratio: float) -> tuple[float, Floats]:
        """The sum of squared errors of the best _CONSTANTS with s = ratio * t_w, and these
        constants; none is negative."""
        columns = self.columns(ratio) / self.seconds[:, None]
        scale = np.abs(columns).max(axis=0)
        met = scale > 0  # constants that no row involves stay unknown
        # The triangle of QR gives the same least-squares problem with few rows.
        stacked = np.column_stack([columns[:, met] / scale[met], np.ones_like(self.seconds)])
        triangle: Any = np.linalg.qr(stacked, mode="r")
        error, scaled = _non_negative_least_squares(triangle[:, :-1], triangle[:, -1])
        constants = np.zeros(len(scale))
        constants[met] = scaled / scale[met]
        return error, constants


def _non_negative_least_squares(matrix: Floats, target: Floats) -> tuple[float, Floats]:
    """Lawson and Hanson's active set (Solving Least Squares Problems, 1974, chapter 23): columns
    are added by how much they help, and removed when they would become negative."""
    width = matrix.shape[1]
    solution, free = np.zeros(width), np.zeros(width, dtype=bool)
    for _ in range(3 * width):
        gain = matrix.T @ (target - matrix @ solution)
        gain[free] = -np.inf
        if gain.max() <= _NO_GAIN:
            break
        free[gain.argmax()] = True
        while True:
            wanted = np.zeros(width)
            wanted[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            if (wanted[free] > 0).all():
                break
            back = free & (wanted <= 0)
            step = (solution[back] / (solution[back] - wanted[back])).min()
            solution += step * (wanted - solution)
            free &= solution > _NO_GAIN
        solution = wanted
    residual = target - matrix @ solution
    return float(residual @ residual), solution
