"""Policies side by side: paired ratios, their intervals, and whose samples are not as asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from benchmarks.synthetic import synthetic
from rollout_sched.metrics.length_bias import LengthBias
from rollout_sched.simulators.replay import report as reports
from rollout_sched.simulators.replay.comparison import CAUSES, Compared, compared, verdict
from rollout_sched.simulators.replay.runs import Run, replay, replay_resampled, run_policy
from tests.helpers import make_policy, make_scenario, make_trace

ANY = run_policy(
    make_policy(), make_trace({f"g{i}": [9] for i in range(8)}), make_scenario(prompts_per_step=2)
)


def run(total_s: float, tokens_per_s: float = 0.0, **bias: Any) -> Run:
    summary = msgspec.structs.replace(
        ANY.summary,
        total_s=total_s,
        equal_length_tokens_per_s=tokens_per_s or 1000 / total_s,
        length_bias=LengthBias(**bias),
    )
    return msgspec.structs.replace(ANY, summary=summary)


def beside(first: Sequence[Run], other: Sequence[Run], *drawn: Sequence[Run]) -> Compared:
    return compared([first, other], drawn)[1]


class TestRatios:
    def test_the_first_policy_has_ratio_one(self) -> None:
        first = compared([[run(3.0), run(4.0)], [run(1.0), run(2.0)]])[0]
        assert first.speed_up.value == first.time.value == 1

    def test_the_ratio_is_taken_per_seed(self) -> None:
        """Twice as fast on the one order, half as fast on the other: as fast as the first."""
        found = beside([run(10.0), run(40.0)], [run(5.0), run(80.0)])
        assert found.time.value == pytest.approx(1.0)
        assert found.time.interval is None

    def test_time_is_seconds_and_speed_is_tokens(self) -> None:
        found = beside([run(10.0, 100.0)], [run(5.0, 120.0)])
        assert found.time.value == pytest.approx(2.0)
        assert found.speed_up.value == pytest.approx(1.2)

    def test_intervals_are_paired_over_the_resamples(self) -> None:
        """Each resample is harder than the one before, but the ratio is always the same."""
        seconds = (10.0, 20.0, 30.0, 40.0)
        drawn = [run(s) for s in seconds], [run(s / 2) for s in seconds]
        found = beside([run(10.0)], [run(5.0)], *drawn)
        assert found.time.interval == pytest.approx((2.0, 2.0))

    def test_an_interval_widens_with_the_spread_of_resamples(self) -> None:
        drawn = [run(10.0)] * 3, [run(5.0), run(4.0), run(6.25)]
        low, high = beside([run(10.0)], [run(4.0)], *drawn).time.interval or (0.0, 0.0)
        assert low < 2.5 < high
        assert math.sqrt(low * high) == pytest.approx(2.5)
        # sd of the logs is ln 1.25, Student's t with 2 degrees of freedom 4.303
        assert high / 2.5 == pytest.approx(1.25**4.303)

    def test_one_resample_says_nothing(self) -> None:
        assert beside([run(1.0)], [run(1.0)], [run(1.0)], [run(2.0)]).time.interval is None

    def test_without_steady_steps_on_both_sides_there_is_no_steady_ratio(self) -> None:
        assert ANY.summary.steady_accepted_tokens_per_s
        assert beside([ANY], [ANY]).steady == compared([[ANY]])[0].steady
        without = msgspec.structs.replace(ANY.summary, steady_accepted_tokens_per_s=None)
        assert beside([ANY], [msgspec.structs.replace(ANY, summary=without)]).steady is None


class TestBias:
    @pytest.mark.parametrize(
        ("bias", "said"),
        [
            ({}, ""),
            ({"mean_ratio": 0.98}, "shorter"),
            ({"mean_ratio": 1.2}, ""),
            ({"longest_tenth_kept": 0.97}, "shorter"),
            ({"steady_mean_ratio": 0.57}, "long last"),
            ({"steady_mean_ratio": 0.57, "mean_ratio": 0.9}, "shorter"),
            ({"steady_mean_ratio": 0.96, "ks": 0.3, "step_ks": 0.5}, ""),
        ],
    )
    def test_biased_samples_are_reported(self, bias: dict[str, float], said: str) -> None:
        assert beside([run(1.0)], [run(1.0, **bias)]).bias == said

    def test_figures_are_means_over_the_seeds(self) -> None:
        found = beside([run(1.0)] * 2, [run(1.0, mean_ratio=0.8), run(2.0, step_ks=0.2)])
        assert found.mean_ratio == pytest.approx(0.9)
        assert found.step_ks_excess == pytest.approx(0.1)
        assert found.total_s == 1.5


class TestResamples:
    trace = synthetic(24, 4, median=200, cap=1500, seed=3)
    scenario = make_scenario(instances=2, slots=8, kv_tokens=20_000, prompts_per_step=4)
    policies = (
        make_policy("one"),
        make_policy("two", batching="fully_async", freshness={"max_staleness": 1}),
    )

    def runs(self) -> list[list[Run]]:
        return replay_resampled(self.trace, self.policies, self.scenario, resamples=3)

    def test_all_policies_get_the_same_prompts_and_each_resample_others(self) -> None:
        one, two = self.runs()
        assert [r.offered_bound_s for r in one] == [r.offered_bound_s for r in two]
        assert len({r.offered_bound_s for r in one}) == 3

    def test_resamples_are_as_large_as_the_trace(self) -> None:
        whole = replay(self.trace, self.policies, self.scenario)
        for of_policy in self.runs():
            assert {r.summary.samples_delivered for r in of_policy} == {24 * 4}
            assert {r.summary.steps for r in of_policy} == {whole[0][0].summary.steps}

    def test_in_processes_of_their_own_runs_are_the_same(self) -> None:
        told: list[tuple[str, int, int]] = []

        def progress(policy: str, number: int) -> Any:
            return lambda groups: told.append((policy, number, groups))

        runs = replay_resampled(
            self.trace, self.policies, self.scenario, resamples=2, jobs=2, progress=progress
        )
        assert runs == replay_resampled(self.trace, self.policies, self.scenario, resamples=2)
        assert sorted(told) == [(name, number, 24) for name in ("one", "two") for number in (0, 1)]

    def test_a_policy_that_is_the_first_by_another_name_has_no_doubt(self) -> None:
        policies = (make_policy("one"), make_policy("again"))
        runs = replay(self.trace, policies, self.scenario, seeds=2)
        drawn = replay_resampled(self.trace, policies, self.scenario, resamples=3)
        assert compared(runs, drawn)[1].speed_up.interval == (1.0, 1.0)

    def test_the_interval_holds_what_other_prompts_of_the_kind_show(self) -> None:
        """Eleven other traces of the same law; the interval is of 95 %, so one may miss."""
        drawn = replay_resampled(self.trace, self.policies, self.scenario, resamples=10)
        runs = replay(self.trace, self.policies, self.scenario)
        low, high = compared(runs, drawn)[1].speed_up.interval or (0.0, 0.0)
        width = high / low
        others = [synthetic(24, 4, median=200, cap=1500, seed=seed) for seed in range(10, 21)]
        ratios = [
            compared(replay(trace, self.policies, self.scenario))[1].speed_up.value
            for trace in others
        ]
        middle = math.exp(sum(map(math.log, ratios)) / len(ratios))
        inside = sum(middle / math.sqrt(width) < r < middle * math.sqrt(width) for r in ratios)
        assert inside >= 9


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
    def test_only_policies_within_the_staleness_can_win(self) -> None:
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

    def test_policies_level_with_the_winner_are_named(self) -> None:
        best = policy("best", 1.5, interval=(1.4, 1.6))
        near, far = policy("near", 1.45, interval=(1.3, 1.6)), policy("far", 1.2)
        assert "This replay cannot tell these from the fastest: near (1.45x (1.30-1.60))." in said(
            BASE, best, near, far
        )

    def test_no_policy_may_be_allowed(self) -> None:
        [only] = said(policy("a", 1.0, stale=2), max_staleness=1)
        assert only.startswith("No policy here trains all the requested lengths")


class TestWhatItCosts:
    def test_a_policy_without_cost_says_so(self) -> None:
        assert "It has no cost that is measured here." in said(BASE)

    def test_every_cost_is_named(self) -> None:
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

    def test_the_link_that_limits(self) -> None:
        sent = {"thin": {"mean": 9e9}, "thick": {"mean": 2e9}}
        slow = {**policy("a", 1.0, weight_update=0.2), "weights": {"sent_bytes": sent}}
        last = said(slow)[-1]
        assert "which come by thin (20 % of instance time)" in last
        assert "weights.plan" in last

    @pytest.mark.parametrize(
        ("figures", "says"),
        [
            ({"gap": 0.03, "barrier": 0.5}, "at the bound"),
            ({"waits_s": 2.0, "barrier": 0.5}, "Bounded by the trainer"),
            ({"preemptions": 7}, "7 preemptions"),
            ({}, "Bounded by generation"),
        ],
    )
    def test_each_bound_is_named(self, figures: dict[str, Any], says: str) -> None:
        assert says in said(policy("a", 1.0, **figures))[-1]


def test_a_real_report_has_all_that_is_looked_at() -> None:
    trace = make_trace({f"g{i}": [5 + 3 * i, 9 - i] for i in range(8)})
    scenario = make_scenario(prompts_per_step=2)
    policies = [make_policy("one"), make_policy("two", batching="fully_async")]
    runs = replay(trace, policies, scenario)
    sentences = verdict(reports.document(trace, scenario, runs, steps=0, seeds=1))
    assert sentences[0].startswith("Fastest: ")
    assert len(sentences) >= 3


def test_no_trainer_means_no_verdict() -> None:
    assert verdict({"prompts": 0, "policies": []}) == []
