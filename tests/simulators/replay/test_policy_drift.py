"""How much of a draft passes in a replay."""

from __future__ import annotations

from statistics import mean

import pytest

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import Spans
from rollout_sched.simulators.replay.scenario import PolicyDrift


def dispatch(draft: Spans, attempt: int = 1, version: int = 3) -> Dispatch:
    return Dispatch("g/0", attempt, "i0", 10, 10, version, draft=draft)


def kept(hazard: float, draft: Spans, settled: int = 0, tries: int = 1) -> list[int]:
    drift = PolicyDrift(hazard)
    return [drift.kept(dispatch(draft, n), settled, seed=0) for n in range(tries)]


def test_without_drift_all_passes_and_with_all_of_it_nothing() -> None:
    assert kept(0.0, ((1, 40), (2, 60))) == [100]
    assert kept(1.0, ((1, 40), (2, 60))) == [0]
    assert kept(1.0, ((3, 40), (2, 60))) == [40]  # what this version made it does not reject


@pytest.mark.parametrize(("version", "distance"), [(2, 1), (0, 3)])
def test_each_token_is_rejected_with_the_same_probability_for_each_version(
    version: int, distance: int
) -> None:
    hazard, tokens = 0.01, 200
    survives = (1 - hazard) ** distance
    expected = sum(survives**n for n in range(1, tokens + 1))
    found = kept(hazard, ((version, tokens),), tries=4000)
    assert mean(found) == pytest.approx(expected, rel=0.05)
    assert mean(n >= tokens for n in found) == pytest.approx(survives**tokens, abs=0.02)


def test_the_dice_are_an_attempt_s_own() -> None:
    assert kept(0.01, ((2, 500),), tries=5) == kept(0.01, ((2, 500),), tries=5)
    assert len(set(kept(0.01, ((2, 500),), tries=5))) > 1
    drift = PolicyDrift(0.01)
    draft = dispatch(((2, 5000),))
    assert drift.kept(draft, 0, seed=1) != drift.kept(draft, 0, seed=2)


def test_a_cut_before_what_a_tool_has_answered_leaves_nothing() -> None:
    whole = kept(0.01, ((2, 200),), tries=50)
    assert [n if n >= 60 else 0 for n in whole] == kept(0.01, ((2, 200),), settled=60, tries=50)
