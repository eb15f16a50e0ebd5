"""Prediction: expected lengths against hand-computed quantiles and Kaplan-Meier curves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.core.model.model import Attempt, Instance, PromptLengths, Request
from rollout_sched.policies.prediction import GroupHistory, NoPrediction, Oracle, PromptHistory
from tests.helpers import make_group, make_request


def expect(policy: Any, request: Request) -> int:
    """What the policy expects, once it has made an estimate of the siblings."""
    request.siblings.estimate = policy.estimate(request.siblings)
    return int(policy.expect(request))


def test_unknown_expects_only_generated_tokens() -> None:
    request = make_request(made=30)
    assert expect(NoPrediction(), request) == 30
    instance = Instance("i", 0, 1, 1000, 0)
    request.attempt = Attempt(1, request, instance, 0, 130, 1000, 0)
    request.attempt.tokens = 12
    assert expect(NoPrediction(), request) == 42


def test_oracle_asks_for_group_and_index() -> None:
    group = make_group(running=[0, 0])
    lengths = {("g", 0): 7, ("g", 1): 11}
    oracle = Oracle(lambda name, index: lengths[name, index])
    assert [expect(oracle, request) for request in group.requests] == [7, 11]


@pytest.mark.parametrize("method", ["quantile", "censored"])
def test_the_cap_until_a_sibling_has_finished(method: Any) -> None:
    group = make_group(running=[40, 500], max_tokens=777)
    policy = GroupHistory(method=method)
    assert {expect(policy, request) for request in group.requests} == {777}


@pytest.mark.parametrize(
    ("quantile", "expected"), [(0.1, 10), (0.5, 20), (0.51, 30), (0.75, 30), (0.9, 40), (1.0, 40)]
)
def test_quantile_of_the_finished(quantile: float, expected: int) -> None:
    group = make_group(finished=[40, 10, 30, 20], running=[0])
    assert expect(GroupHistory(quantile=quantile), group.requests[-1]) == expected


@pytest.mark.parametrize("method", ["quantile", "censored"])
def test_quantile_does_not_stumble_over_rounding(method: Any) -> None:
    """0.56 * 25 is 14.000000000000002 in floats, and still the 14th of 25."""
    target = make_request()
    target.siblings = make_group(finished=range(1, 26)).siblings
    for rank in range(1, 26):
        assert expect(GroupHistory(quantile=4 * rank / 100, method=method), target) == rank


@pytest.mark.parametrize("method", ["quantile", "censored"])
def test_prediction_is_never_below_the_generated_tokens(method: Any) -> None:
    group = make_group(finished=[10, 20], running=[300])
    assert expect(GroupHistory(method=method, quantile=0.5), group.requests[-1]) >= 300


@pytest.mark.parametrize(
    # Finished 10, 20, 40; running 15 and 30, so at risk: 5, then 3 (of 20), then 1 (of 40).
    # Survival: 4/5 after 10, 4/5 * 2/3 = 8/15 after 20, 0 after 40.
    ("quantile", "expected"),
    [(0.19, 10), (0.2, 10), (0.21, 20), (7 / 15, 20), (0.47, 40), (1.0, 40)],
)
def test_kaplan_meier_by_hand(quantile: float, expected: int) -> None:
    group = make_group(finished=[10, 20, 40], running=[15, 30])
    policy = GroupHistory(quantile=quantile, method="censored")
    assert expect(policy, group.requests[3]) == max(expected, 15)


def test_censored_falls_back_to_the_cap_where_the_curve_does_not_reach() -> None:
    # One of two has finished, the other is already longer: half survive, for ever.
    group = make_group(finished=[10], running=[50], max_tokens=900)
    policy = GroupHistory(quantile=0.9, method="censored")
    assert expect(policy, group.requests[1]) == 900


def test_one_censored_at_the_very_length_was_at_risk() -> None:
    # At 10 there are two at risk: survival 1/2, not 0.
    group = make_group(finished=[10], running=[10], max_tokens=900)
    assert expect(GroupHistory(0.5, "censored"), group.requests[1]) == 10
    assert expect(GroupHistory(0.6, "censored"), group.requests[1]) == 900


@given(
    finished=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    quantile=st.integers(1, 100).map(lambda percent: percent / 100),
)
def test_without_censoring_kaplan_meier_is_the_quantile(
    finished: list[int], quantile: float
) -> None:
    target = make_request()  # no member of its group, so that nobody is censored
    target.siblings = make_group(finished=finished).siblings
    plain = expect(GroupHistory(quantile), target)
    assert expect(GroupHistory(quantile, "censored"), target) == plain


@given(
    finished=st.lists(st.integers(1, 60), max_size=6),
    running=st.lists(st.integers(0, 60), min_size=1, max_size=6),
)
def test_censoring_only_lengthens(finished: list[int], running: list[int]) -> None:
    group = make_group(finished=finished, running=running, max_tokens=60)
    last = group.requests[-1]
    plain, censored = expect(GroupHistory(0.5), last), expect(GroupHistory(0.5, "censored"), last)
    assert plain <= censored <= 60


class TestPromptHistory:
    """Siblings first, then what the prompt came to before, then what the trainer says."""

    def test_finished_siblings_predict_the_length(self) -> None:
        group = make_group(finished=[40, 10, 30, 20], running=[0])
        group.siblings.history = PromptLengths([500])
        assert expect(PromptHistory(quantile=0.5), group.requests[-1]) == 20

    def test_prompt_history_predicts_the_length(self) -> None:
        group = make_group(running=[0, 600])
        group.siblings.history = PromptLengths([500, 300, 400])
        group.siblings.expected_tokens = 50
        policy = PromptHistory(quantile=0.5)
        assert [expect(policy, request) for request in group.requests] == [400, 600]

    def test_trainer_estimate_predicts_the_length(self) -> None:
        group = make_group(running=[0])
        group.siblings.history = PromptLengths()
        group.siblings.expected_tokens = 50
        assert expect(PromptHistory(), group.requests[0]) == 50

    @pytest.mark.parametrize("known", [None, PromptLengths(), PromptLengths([5000])])
    def test_prediction_never_exceeds_the_limit(self, known: PromptLengths | None) -> None:
        group = make_group(running=[0], max_tokens=777)
        group.siblings.history = known
        assert expect(PromptHistory(), group.requests[0]) == 777
