"""What the trainer is handed, and whether it is shorter than what was made."""

from __future__ import annotations

import pytest

from rollout_sched.core.model import actions as act
from rollout_sched.core.model import events as ev
from rollout_sched.metrics.steps import STALENESS, Trained
from tests.metrics.told import sample, tell


def test_staleness_falls_into_the_bucket_that_holds_it() -> None:
    trained = Trained()
    samples = tuple(sample("g/0", staleness=staleness) for staleness in (0, 0, 1, 5, 999))
    tell(trained, [(0.0, ev.Woke(), [act.Deliver(0, 0, samples)])])
    by_bound = dict(zip((*STALENESS, None), trained.staleness.counts, strict=True))
    assert {bound: n for bound, n in by_bound.items() if n} == {0: 2, 1: 1, 6: 1, None: 1}
    assert trained.staleness.sum == 1005


def test_long_ones_thrown_away_are_a_bias() -> None:
    trained = Trained()
    assert trained.length_ratio == 1.0
    samples = (sample("g/0", 10, group="g"), sample("g/1", 30, group="g"))
    thrown = act.Discard("g/2", 140, "surplus", ends=True, group="g")
    tell(trained, [(0.0, ev.Woke(), [act.Deliver(0, 0, samples), thrown])])
    assert trained.tokens.sum == 40
    assert trained.length_ratio == pytest.approx(20 / 60)


@pytest.mark.parametrize(
    "discard",
    [act.Discard("g/0", 99, "stale", group="g"), act.Discard("direct", 99, "failed", ends=True)],
)
def test_what_starts_over_or_is_a_client_s_is_none(discard: act.Discard) -> None:
    trained = Trained()
    delivered = act.Deliver(0, 0, (sample("g/0", 10, group="g"),))
    tell(trained, [(0.0, ev.Woke(), [delivered, discard])])
    assert trained.length_ratio == 1.0
