"""Limits: what exceeds one is said, and what is measured several times is put together."""

from __future__ import annotations

import msgspec
import pytest

from rollout_sched.simulators.tune.evaluation import CaseFigures, HardLimits, together

SOUND = CaseFigures(
    tokens_per_s=1.0, staleness_max=1, length_ratio=0.99, longest_kept=0.98, step_bias=0.1
)
LIMITS = HardLimits(max_staleness=1, max_length_bias=0.01, max_step_bias=0.1)


def test_at_the_limit_is_allowed() -> None:
    assert LIMITS.exceeded(SOUND) == []
    assert LIMITS.excess(SOUND) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("staleness_max", 2, "staleness 2 above 1"),
        ("length_ratio", 0.97, "length bias 0.030 above 0.01"),
        ("length_ratio", 1.03, "length bias 0.030 above 0.01"),
        ("longest_kept", 0.9, "length bias 0.050 above 0.01"),
        ("step_bias", 0.2, "step bias 0.200 above 0.1"),
    ],
)
def test_each_limit(field: str, value: float, said: str) -> None:
    figures = msgspec.structs.replace(SOUND, **{field: value})
    assert LIMITS.exceeded(figures) == [said]
    assert LIMITS.excess(figures) > 0


def test_what_failed_exceeds_everything() -> None:
    assert LIMITS.exceeded(CaseFigures(failed="it stood still")) == ["it stood still"]


def test_together_takes_means_and_the_stalest() -> None:
    figures = together(
        [
            CaseFigures(tokens_per_s=1.0, staleness_max=0),
            CaseFigures(tokens_per_s=3.0, staleness_max=2),
        ]
    )
    assert figures.tokens_per_s == 2.0
    assert figures.staleness_max == 2
    assert figures.length_ratio == 1.0


def test_one_failure_is_a_failure() -> None:
    assert together([SOUND, CaseFigures(failed="no")]).failed == "no"


def test_tightened_limits_allow_less_bias_and_the_same_staleness() -> None:
    assert HardLimits(2, 0.1, 0.4).tightened(0.25) == HardLimits(
        2, pytest.approx(0.075), pytest.approx(0.3)
    )
