"""The verdict: which policy, at what cost, bounded by what."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_sched.simulators.replay import report as reports
from rollout_sched.simulators.replay.comparison import CAUSES, verdict
from rollout_sched.simulators.replay.runs import replay
from tests.helpers import make_policy, make_scenario, make_trace


def spread(value: float) -> dict[str, float]:
    return {"mean": value, "min": value, "max": value}


def policy(
    name: str,
    speed_up: float,
    *,
    interval: tuple[float, float] | None = None,
    stale: float = 0,
    bias: str = "",
    ks: float = 0.0,
    discarded: float = 0.0,
    waits_s: float = 50.0,
    gap: float = 1.0,
    preemptions: int = 0,
    **idle: float,
) -> dict[str, Any]:
    low, high = interval or (None, None)
    return {
        "name": name,
        "comparison": {
            "speed_up": {"value": speed_up, "low": low, "high": high},
            "bias": bias,
            "step_ks_excess": ks,
            "discarded_share": discarded,
        },
        "staleness": {"mean": spread(stale / 2), "max": spread(stale)},
        "total_s": spread(100.0),
        "trainer_wait_s": spread(waits_s),
        "gap_to_offered_bound": spread(gap),
        "preemptions": spread(preemptions),
        "idle_bubble_by_cause": {cause: spread(idle.get(cause, 0.0)) for cause in CAUSES},
    }


def said(*policies: dict[str, Any], max_staleness: int | None = None) -> list[str]:
    return verdict({"prompts": 4, "policies": list(policies)}, max_staleness)


BASE = policy("base", 1.0)


class TestWhoIsFastest:
    def test_within_the_staleness_asked_for(self) -> None:
        fresh, old = policy("fresh", 1.5), policy("old", 2.0, stale=4)
        assert said(BASE, fresh, old)[0] == "Fastest: old, 2.00x of base."
        first, second, *_ = said(BASE, fresh, old, max_staleness=1)
        assert first == "Fastest at staleness 1 or less: fresh, 1.50x of base."
        assert second == "old is faster (2.00x) but trains samples up to 4 versions old."

    def test_shorter_samples_win_nothing(self) -> None:
        first, second, *_ = said(BASE, policy("short", 3.0, bias="shorter"))
        assert first == "Fastest: base, the policy that the others are compared with."
        assert second == "short is faster (3.00x) but trains shorter samples than requested."

    def test_an_interval_that_holds_1_may_be_chance(self) -> None:
        first, *_ = said(BASE, policy("lucky", 1.1, interval=(0.9, 1.3)))
        assert first == "Fastest: lucky, 1.10x (0.90-1.30) of base, which may be chance."

    def test_who_is_level_with_it(self) -> None:
        best = policy("best", 1.5, interval=(1.4, 1.6))
        near, far = policy("near", 1.45, interval=(1.3, 1.6)), policy("far", 1.2)
        assert "This replay cannot tell these from the fastest: near (1.45x (1.30-1.60))." in said(
            BASE, best, near, far
        )

    def test_nobody_may_be_allowed(self) -> None:
        [only] = said(policy("a", 1.0, stale=2), max_staleness=1)
        assert only.startswith("No policy here trains all the requested lengths")


class TestWhatItCosts:
    def test_nothing(self) -> None:
        assert "It has no cost that is measured here." in said(BASE)

    def test_everything(self) -> None:
        text = " ".join(said(policy("a", 1.0, stale=2, bias="long last", ks=0.3, discarded=0.25)))
        for cost in (
            "samples 1.00 versions old on average, 2 at most",
            "25 tokens discarded per 100 trained",
            "KS 0.30 beyond chance",
            "long samples trained only at the end",
        ):
            assert cost in text


class TestWhatBoundsIt:
    @pytest.mark.parametrize("cause", sorted(CAUSES))
    def test_the_largest_idle_share(self, cause: str) -> None:
        last = said(policy("a", 1.0, **{"tool_wait": 0.06, cause: 0.2}))[-1]
        what, remedy = CAUSES[cause]
        assert last == f"Bounded by {what} (20 % of instance time). Try {remedy}."

    @pytest.mark.parametrize(
        ("figures", "says"),
        [
            ({"gap": 0.03, "barrier": 0.5}, "at the bound"),
            ({"waits_s": 2.0, "barrier": 0.5}, "Bounded by the trainer"),
            ({"preemptions": 7}, "7 preemptions"),
            ({}, "Bounded by generation"),
        ],
    )
    def test_else(self, figures: dict[str, Any], says: str) -> None:
        assert says in said(policy("a", 1.0, **figures))[-1]


def test_a_real_report_has_all_that_is_looked_at() -> None:
    trace = make_trace({f"g{i}": [5 + 3 * i, 9 - i] for i in range(8)})
    scenario = make_scenario(prompts_per_step=2)
    policies = [make_policy("one"), make_policy("two", batching="fully_async")]
    runs = replay(trace, policies, scenario)
    sentences = verdict(reports.document(trace, scenario, runs, steps=0, seeds=1))
    assert sentences[0].startswith("Fastest: ")
    assert len(sentences) >= 3


def test_where_nobody_trains_there_is_no_verdict() -> None:
    assert verdict({"prompts": 0, "policies": []}) == []
