"""The distribution of values of which some are only known to be greater than a bound.

Up to where enough values are at risk it is the Kaplan-Meier estimate; from there on it goes on as a
normal distribution does beyond a point, whose standard deviation and distance to the mean are
fitted to the upper three quarters by maximum likelihood. Of logarithms that is the tail of a
log-normal distribution, and far from the mean that of a Pareto distribution, whose hazard is
constant (Brown, Hollander and Korwar 1974 complete the estimate so). The data often allow several
distances: the tail is their average, weighted by likelihood, with the constant hazard preferred for
its one parameter less (Schwarz 1978).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Where fewer values are at risk, the hazard is not known well.
_FEW = 20

#: The tail is fitted from where this share is alive.
_BODY = 0.75

#: Where that is, in standard deviations from the mean of a normal distribution. 30: the hazard is
#: constant, within some per cent.
_STARTS = (-1.5, -1.25, -1.0, -0.75, -0.5, -0.25, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 30.0)

#: Standard deviations that are tried, relative to that of the right hazard at the start.
_SCALES = np.exp(np.linspace(-1.5, 1.5, 31))

#: The cumulative hazard of the normal distribution, up to where its tail is a float.
_Z = np.linspace(-4.0, 36.0, 4001)
_CUMULATIVE = np.array([-math.log(math.erfc(z / math.sqrt(2)) / 2) for z in _Z.tolist()])


def distribution(ended: Floats, censored: Floats) -> Floats:
    """By bin, the chance that a value is in it. `ended`: the number of values in each bin;
    `censored`: of those that are at least so great. What would be beyond the last bin is in it."""
    at_risk = np.cumsum((ended + censored)[::-1])[::-1]
    hazard = np.divide(ended, at_risk, out=np.zeros(len(ended)), where=at_risk > 1e-9)
    alive = np.concatenate([[1.0], np.cumprod(1 - hazard)])
    last = int(np.flatnonzero(ended > 1e-9).max(initial=0))
    known = min(max(int(np.searchsorted(-at_risk, -_FEW)) - 1, 0), last)
    if censored[:last].sum() < 1e-6:  # the greatest values are all known
        known = last
    if at_risk[known] - ended[known] > 1e-6:
        first = min(int(np.searchsorted(-alive, -_BODY)), known)
        there = slice(first, known + 1)
        tail = np.ones(len(alive))
        tail[known + 1 :] = _tail(ended[there], at_risk[there], len(ended) - first)
        known = _last_contradiction(tail, ended, at_risk, known)
        alive[known + 1 :] = alive[known + 1] * tail[known + 1 :] / max(tail[known + 1], 1e-300)
    alive[-1] = 0.0
    density: Floats = -np.diff(alive)
    return density


def _last_contradiction(tail: Floats, ended: Floats, at_risk: Floats, known: int) -> int:
    """The bin from which the tail is better than the few values that are at risk there: `known`,
    but if many fewer or more of them ended than it says, the last one with any.

    So runaways, which outlive everything else, are a class of their own.
    """
    beyond = slice(known + 1, None)
    alive = np.maximum(tail[known + 1 :], 1e-300)
    expected = float((at_risk[beyond] * -np.diff(np.log(alive))).sum())
    if abs(float(ended[beyond].sum()) - expected) <= 2 * math.sqrt(expected) + 1:
        return known
    return int(np.flatnonzero(at_risk > 0.05).max(initial=known))


def _tail(ended: Floats, at_risk: Floats, size: int) -> Floats:
    """The share alive at the edges of `size` bins, from the end of those that are given, relative
    to there."""
    events = max(float(ended.sum()), 0.5)
    seen, edges = len(ended), np.arange(size + 1.0)
    logs, tails = [], []
    for start in _STARTS:
        rate = math.exp(_cumulative(start) - start * start / 2) / math.sqrt(2 * math.pi)
        scales = rate * float(at_risk.sum()) / events * _SCALES
        each = np.diff(_cumulative(start + edges[: seen + 1] / scales[:, None]))
        each = np.maximum(each, 1e-12)
        fits = (ended * np.log(-np.expm1(-each)) - (at_risk - ended) * each).sum(axis=1)
        best = int(fits.argmax())
        hazard = _cumulative(start + edges[seen:] / scales[best])
        logs.append(float(fits[best]))
        tails.append(np.exp(hazard[0] - hazard))
    logs[-1] += math.log(events) / 2
    weights = np.exp(np.array(logs) - max(logs))
    tail: Floats = (weights[:, None] * np.array(tails)).sum(axis=0) / weights.sum()
    return tail


def _cumulative(z: Floats | float) -> Floats:
    """The cumulative hazard of the normal distribution up to z."""
    beyond = np.maximum(z, _Z[-1])
    far = (beyond**2 - _Z[-1] ** 2) / 2 + np.log(beyond / _Z[-1])
    hazard: Floats = np.interp(z, _Z, _CUMULATIVE) + far
    return hazard
