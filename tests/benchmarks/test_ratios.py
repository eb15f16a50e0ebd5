"""Ratios: above 1 where the arm is better, draw by draw."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.ratios import ratio, shown, vacant_in_rollout
from rollout_sched.simulators.replay.runs import Run, run_policy
from tests.helpers import make_policy, make_scenario, make_trace


def runs(total_s: list[float]) -> list[Run]:
    run = run_policy(make_policy(), make_trace({"a": [5]}), make_scenario())
    replace = msgspec.structs.replace
    return [replace(run, summary=replace(run.summary, total_s=seconds)) for seconds in total_s]


def test_the_trace_says_how_much_and_the_draws_how_sure() -> None:
    got = ratio(runs([20.0, 10.0, 10.0]), runs([10.0, 10.0, 5.0]), "total")
    assert got.value == pytest.approx(2.0)
    assert got.low is not None
    assert got.high is not None
    assert got.low < 1.0 < 2.0 < got.high
    assert shown(got) == f"2.00x ({got.low:.2f}-{got.high:.2f})"
    assert shown(ratio(runs([10.0]), runs([10.0]), "total")) == "1.00x"


def test_a_larger_rate_is_better() -> None:
    run = runs([10.0])[0]
    replace = msgspec.structs.replace
    summary = run.summary
    faster = replace(
        summary,
        equal_length_tokens_per_s=2 * summary.equal_length_tokens_per_s,
        rollout_s=summary.rollout_s / 3,
    )
    arm = [replace(run, summary=faster)]
    assert ratio([run], arm, "tokens").value == pytest.approx(2.0)
    assert ratio([run], arm, "rollout").value == pytest.approx(3.0)


def test_the_bubble_of_the_rollout() -> None:
    """Two samples of 5 and 15 steps on one instance of two places; training takes 10 s."""
    trace = make_trace({"a": [5, 15]})
    run = run_policy(make_policy(), trace, make_scenario(colocated=True))
    assert vacant_in_rollout(run) == pytest.approx(0.5 * 10 / 15, abs=0.05)
    assert ratio([run], [run], "bubble").value == 1.0
