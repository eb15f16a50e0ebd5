"""Distributions that are seen up to a bound only: the shortest eight of twelve values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.simulators.traces.survival import distribution

BINS = 400
Values = npt.NDArray[np.float64]
Rng = np.random.Generator


def counts(values: Values) -> Values:
    bins = np.clip(values.astype(int), 0, BINS - 1).ravel()
    return np.bincount(bins, minlength=BINS).astype(np.float64)


def shortest(values: Values) -> tuple[Values, Values]:
    """What ended, and what is censored, if the longest third of each row is cut."""
    values = np.sort(values, axis=1)
    keep = values.shape[1] * 2 // 3
    return counts(values[:, :keep]), counts(np.repeat(values[:, keep - 1], values.shape[1] - keep))


@pytest.mark.parametrize(
    ("draw", "p99"),
    [
        (lambda rng: rng.normal(90, 20, (200, 12)), 90 + 2.326 * 20),
        (lambda rng: 20 + rng.exponential(40, (200, 12)), 20 + 4.605 * 40),
    ],
    ids=["normal", "exponential"],
)
def test_the_tail_goes_on_as_its_family_does(draw: Callable[[Rng], Values], p99: float) -> None:
    """Also where nothing was seen to end: the 99 % quantile, of values above the 80 % quantile none
    of which is known."""
    quantiles = []
    for seed in range(5):
        ended, censored = shortest(draw(np.random.default_rng(seed)))
        upto = np.cumsum(distribution(ended, censored))
        quantiles.append(int(np.searchsorted(upto, 0.99)))
        assert p99 > np.flatnonzero(ended)[-1]
    assert np.mean(quantiles) == pytest.approx(p99, rel=0.05)


@pytest.mark.parametrize("at_the_cap", [False, True])
def test_runaways_outlive_the_tail_of_the_others(at_the_cap: bool) -> None:
    """One of a hundred, known from the rows that were not cut; `at_the_cap`: not to their end."""
    rng = np.random.default_rng(0)
    values = rng.normal(90, 20, (300, 12))
    whole = np.where(rng.random((100, 12)) < 0.01, 390.0, values[200:])
    ended, censored = shortest(values[:200])
    ended += counts(whole)
    runaways = ended[390]
    assert runaways > 5
    if at_the_cap:
        ended[390], censored[390] = 0, runaways
    found = distribution(ended, censored)[300:].sum()
    assert found == pytest.approx(runaways / whole.size, rel=0.3)


@given(
    st.lists(st.floats(0, 50), min_size=30, max_size=30),
    st.lists(st.floats(0, 50), min_size=30, max_size=30),
)
def test_any_counts_have_a_distribution(ended: list[float], censored: list[float]) -> None:
    found = distribution(np.array(ended), np.array(censored))
    assert (found >= -1e-12).all()
    assert found.sum() == pytest.approx(1)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=30).filter(any))
def test_values_that_are_all_known_are_distributed_as_seen(ended: list[int]) -> None:
    seen = np.array(ended, dtype=np.float64)
    assert distribution(seen, np.zeros(len(seen))) == pytest.approx(seen / seen.sum())
