"""Fits the engine's cost constants to the attempts of a run.

Between two changes of an instance's batch each of its B sequences gets a token per step, and a step
takes D = a (t0 + t_w .. s B) + .. as in the cost model, so that an attempt of n tokens over the
stretches j of d_j seconds fulfils sum(d_j / D_j) = n. Constants of a base are multiplied by
factors, so that what the run cannot separate stays in the proportion of the base:

    per step      t0, t_w, t_e
    per sequence  s, c_b
    per context   k
    per prefill   a, and the costs of a request and of a step that prefills
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout_sched.simulators.instance import CostModel, Speculation, StepTime

Floats = NDArray[np.float64]

#: The constants that each factor multiplies.
FACTORS: tuple[tuple[str, ...], ...] = (
    ("step_s", "weights_s", "experts_s"),
    ("token_s", "sequence_s"),
    ("context_s",),
    ("attention_s", "request_s", "prefill_s"),
)
#: The least attempts for a fit, and tokens of each: that they begin between two steps is an error.
_LEAST, _LEAST_TOKENS = 10, 32
#: A standard error, of a logarithm, above which a factor is unknown.
_UNKNOWN = 0.1
#: A base is kept that explains the attempts so well in the median, and so little worse than a fit.
_AS_GOOD = 0.01
#: Share of the KV cache above which attempts may have been preempted.
_CROWDED = 0.95


@dataclass(slots=True)
class EngineAttempt:
    """An attempt on one instance, as its journal shows it.

    context_tokens  at its beginning, of which no prefix cache had `fresh_tokens`
    tokens          that it made until `ended_s`; `known`: its end reported them
    """

    instance: str
    request: str
    began_s: float
    context_tokens: int
    fresh_tokens: int
    ended_s: float = np.inf
    tokens: int = 0
    known: bool = False


class Standstill(NamedTuple):
    """`cleared`: afterwards the contexts are computed again."""

    since: float
    until: float
    cleared: bool


class EngineFit(NamedTuple):
    """cost      the fitted constants, or those of the base
    kept      the base explains the run as well
    errors    standard error of each factor, relative; None: it is tied to another
    off       median of |predicted / recorded - 1| of the attempts' tokens
    attempts  that were fitted
    most      sequences at once
    """

    cost: CostModel
    kept: bool
    errors: tuple[float | None, ...]
    off: float
    attempts: int
    most: int


class _Stretch(NamedTuple):
    """Between two changes of an instance's batch.

    prefilled  tokens of the requests that are `admitted` at its beginning, and their attention
    """

    seconds: float
    sequences: int
    context: int
    prefilled: int
    attention: float
    admitted: int


class _Running(NamedTuple):
    """An attempt in the batch since the stretch `first`; its context is level + slope * time."""

    first: int
    level: float
    slope: float


class _RunningTime:
    """The clock of an instance that stands still in its pauses."""

    def __init__(self, pauses: Sequence[Standstill]) -> None:
        self._since = [pause.since for pause in pauses]
        self._pauses = pauses
        self._before = [0.0, *accumulate(pause.until - pause.since for pause in pauses)]

    def at(self, now: float) -> float:
        number = bisect_right(self._since, now)
        if number and now < self._pauses[number - 1].until:
            return self._since[number - 1] - self._before[number - 1]
        return now - self._before[number]


class _Timeline:
    """The stretches of one instance.

    measured  the usable attempts: (first stretch, end, tokens)

    Its time stands still in its `pauses`, which are disjoint and in order. Attempts beyond its
    `slots` wait, in the order of their dispatch.
    """

    def __init__(
        self,
        attempts: Sequence[EngineAttempt],
        pauses: Sequence[Standstill],
        slots: int,
        kv_tokens: int,
    ) -> None:
        self.measured: list[tuple[int, int, int]] = []
        self._stretches: list[_Stretch] = []
        self._slots = slots
        self._kv_tokens = kv_tokens
        self._waiting: deque[EngineAttempt] = deque()
        self._running: dict[int, _Running] = {}
        time = _RunningTime(pauses)
        self._cleared = {time.at(pause.since) for pause in pauses if pause.cleared}
        self._level = self._slope = 0.0  # the sum of the contexts is level + slope * time
        self._crowded = [0]  # how many stretches were, before each
        begun: dict[float, list[EngineAttempt]] = {}
        ended: dict[float, list[EngineAttempt]] = {}
        self._ends_s = {id(attempt): time.at(attempt.ended_s) for attempt in attempts}
        for attempt in attempts:
            begun.setdefault(time.at(attempt.began_s), []).append(attempt)
            ended.setdefault(self._ends_s[id(attempt)], []).append(attempt)
        times = sorted({*begun, *ended, *self._cleared})
        for now, until in zip(times, [*times[1:], times[-1]], strict=True):
            for attempt in ended.get(now, ()):
                self._end(attempt)
            self._waiting.extend(begun.get(now, ()))
            self._stretch(now, until)

    @property
    def most(self) -> int:
        """Sequences at once."""
        return max(stretch.sequences for stretch in self._stretches)

    def eighths(self) -> list[int]:
        """In which eighth of the stretches each usable attempt ends."""
        return [8 * end // len(self._stretches) for _, end, _ in self.measured]

    def _end(self, attempt: EngineAttempt) -> None:
        entered = self._running.pop(id(attempt), None)
        if entered is None:
            self._waiting = deque(one for one in self._waiting if one is not attempt)
            return
        self._level -= entered.level
        self._slope -= entered.slope
        crowded = self._crowded[-1] > self._crowded[entered.first]
        if attempt.known and attempt.tokens >= _LEAST_TOKENS and not crowded:
            self.measured.append((entered.first, len(self._stretches), attempt.tokens))

    def _stretch(self, now: float, until: float) -> None:
        prefilled, attention, admitted = 0, 0.0, 0
        if now in self._cleared and self._running:
            contexts = [one.level + one.slope * now for one in self._running.values()]
            prefilled, admitted = round(sum(contexts)), len(contexts)
            attention = sum([context * context for context in contexts]) / 2
        while self._waiting and len(self._running) < self._slots:
            attempt = self._waiting.popleft()
            ends_s = self._ends_s[id(attempt)]
            if ends_s <= now:
                continue
            rate = attempt.tokens / (ends_s - now)
            level = attempt.context_tokens - rate * now
            self._running[id(attempt)] = _Running(len(self._stretches), level, rate)
            self._level += level
            self._slope += rate
            fresh, admitted = attempt.fresh_tokens, admitted + 1
            prefilled += fresh
            attention += fresh * (attempt.context_tokens - fresh / 2)
        context = max(0, round(self._level + self._slope * (now + until) / 2))
        self._crowded.append(self._crowded[-1] + (context > _CROWDED * self._kv_tokens))
        sequences = len(self._running)
        stretch = _Stretch(until - now, sequences, context, prefilled, attention, admitted)
        self._stretches.append(stretch)

    def made(self, time: StepTime, budget: int) -> Floats:
        """Tokens that each usable attempt makes if steps take this time."""
        owed = made = 0.0  # seconds of prefills that are not over yet
        so_far = [0.0]
        for stretch in self._stretches:
            if stretch.sequences:
                step_s = time.step(stretch.sequences, stretch.sequences, stretch.context, 0.0, 0)
                if stretch.admitted:
                    owed += _prefill_s(stretch, time, budget) - step_s
                used = min(owed, stretch.seconds)
                owed -= used
                made += (stretch.seconds - used) / step_s
            else:
                owed = 0.0
            so_far.append(made)
        table = np.asarray(so_far)
        first, end, _ = np.asarray(self.measured).T
        found: Floats = table[end] - table[first]
        return found


def _prefill_s(stretch: _Stretch, time: StepTime, budget: int) -> float:
    """The steps that prefill what is admitted, of which the last makes the first tokens."""
    decoding = stretch.sequences - stretch.admitted
    steps = max(1.0, stretch.prefilled / budget)
    tokens = decoding + max(stretch.admitted, round(stretch.prefilled / steps))
    attention = stretch.attention / steps
    last_s = time.step(decoding, tokens, stretch.context, attention, stretch.admitted)
    return last_s + (steps - 1) * time.step(decoding, tokens, stretch.context, attention, 0)


def fit_engine(
    attempts: Iterable[EngineAttempt],
    pauses: Mapping[str, Sequence[Standstill]],
    slots: Mapping[str, int],
    kv_tokens: Mapping[str, int],
    base: CostModel,
    *,
    budget: int,
    speculation: Speculation | None,
) -> EngineFit | None:
    """The constants that explain how long attempts took; None if there are too few of them.

    `pauses`: of each instance, disjoint. `budget`: most tokens of a step.
    """
    by_instance: dict[str, list[EngineAttempt]] = {}
    for attempt in attempts:
        by_instance.setdefault(attempt.instance, []).append(attempt)
    timelines = [
        _Timeline(each, pauses.get(name, ()), slots[name], kv_tokens[name])
        for name, each in by_instance.items()
    ]
    timelines = [timeline for timeline in timelines if timeline.measured]
    fit = _Fit(timelines, base, budget, speculation)
    return fit.result() if len(fit.tokens) >= _LEAST else None


class _Fit:
    """Robust least squares of log(recorded / predicted tokens), by Gauss and Newton."""

    def __init__(
        self,
        timelines: list[_Timeline],
        base: CostModel,
        budget: int,
        speculation: Speculation | None,
    ) -> None:
        self._timelines = timelines
        self._base = base
        self._budget = budget
        self._speculation = speculation
        self.tokens = np.asarray([row[2] for each in timelines for row in each.measured], float)
        # Attempts that overlap have the same errors: those of an instance in an eighth of its time.
        self._clusters = np.asarray(
            [8 * number + at for number, each in enumerate(timelines) for at in each.eighths()]
        )

    def result(self) -> EngineFit:
        of_base = self._residuals(np.zeros(len(FACTORS)))
        leaders = [
            n if any(getattr(self._base, name) for name in FACTORS[n]) else -1
            for n in range(len(FACTORS))
        ]
        while True:
            factors, errors = self._solve(leaders)
            free = sorted({n for n in leaders if n >= 0}, key=lambda n: errors[n])
            if errors[free[-1]] <= _UNKNOWN or len(free) == 1:
                break
            leaders = [free[0] if n == free[-1] else n for n in leaders]
        residuals = self._residuals(factors)
        off, off_base = float(np.median(np.abs(residuals))), float(np.median(np.abs(of_base)))
        unsure = errors[free[0]] > _UNKNOWN
        kept = abs(float(np.median(of_base))) <= _AS_GOOD and off_base <= off + _AS_GOOD
        most = max(each.most for each in self._timelines)
        if unsure or kept:
            return EngineFit(
                self._base, True, (None,) * len(FACTORS), off_base, len(self.tokens), most
            )
        known = tuple(errors[n] if leaders[n] == n else None for n in range(len(FACTORS)))
        return EngineFit(self._cost(factors), False, known, off, len(self.tokens), most)

    def _cost(self, factors: Floats) -> CostModel:
        changed = {
            name: getattr(self._base, name) * float(factor)
            for names, factor in zip(FACTORS, np.exp(factors), strict=True)
            for name in names
        }
        return msgspec.structs.replace(self._base, **changed)

    def _residuals(self, factors: Floats) -> Floats:
        time = StepTime(self._cost(factors), self._speculation)
        made = np.concatenate([each.made(time, self._budget) for each in self._timelines])
        found: Floats = np.log(self.tokens / np.maximum(made, 1e-3))
        return found

    def _solve(self, leaders: Collection[int]) -> tuple[Floats, list[float]]:
        """The logarithms of the factors, and the standard error of each, if those with the same
        leader are equal."""
        free = sorted({leader for leader in leaders if leader >= 0})
        ties = np.asarray([[float(leader == each) for each in free] for leader in leaders])
        # From the base at the right speed.
        found = np.full(len(free), -np.median(self._residuals(np.zeros(len(FACTORS)))))
        for _ in range(20):
            residuals = self._residuals(ties @ found)
            slopes = self._slopes(residuals, ties, found)
            weights = _weights(residuals)
            step: Any = np.linalg.lstsq(
                slopes * np.sqrt(weights)[:, None], -residuals * np.sqrt(weights), rcond=None
            )[0]
            found = found + np.clip(step, -1.0, 1.0)
            if np.abs(step).max() < 1e-4:
                break
        errors = [np.inf] * len(FACTORS)
        for number, error in zip(free, self._errors(slopes, residuals, weights), strict=True):
            errors[number] = float(error)
        return ties @ found, errors

    def _slopes(self, residuals: Floats, ties: Floats, found: Floats) -> Floats:
        little = 0.01
        moved = [self._residuals(ties @ (found + little * one)) for one in np.eye(len(found))]
        return np.column_stack([(one - residuals) / little for one in moved])

    def _errors(self, slopes: Floats, residuals: Floats, weights: Floats) -> Floats:
        """Standard errors that allow for equal errors within a cluster."""
        inverse = np.linalg.pinv(slopes.T @ (slopes * weights[:, None]))
        scores = slopes * (weights * residuals)[:, None]
        names = np.unique(self._clusters)
        sums = np.stack([scores[self._clusters == name].sum(axis=0) for name in names])
        spread = inverse @ (sums.T @ sums) @ inverse
        few = len(names) / max(1, len(names) - slopes.shape[1])
        found: Floats = np.sqrt(few * np.diag(spread))
        flat = np.abs(slopes).max(axis=0) < 1e-3  # it changes nothing that the run shows
        return np.where(flat, np.inf, found)


def _weights(residuals: Floats) -> Floats:
    """Those of Cauchy: an attempt that is far off hardly counts."""
    scale = max(1.4826 * float(np.median(np.abs(residuals - np.median(residuals)))), 1e-4)
    found: Floats = 1 / (1 + (residuals / (2.385 * scale)) ** 2)
    return found
