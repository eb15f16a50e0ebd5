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
from rollout_sched.simulators.replay.comparison import (
    LIMITS,
    Compared,
    compared,
    limited_by,
    verdict,
)
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

    def test_a_bias_has_an_interval_of_the_resamples_or_else_of_the_seeds(self) -> None:
        """Student's t with 2 degrees of freedom is 4.303; 0.8, 0.9, 1.0 have a deviation of 0.1."""
        three = [run(1.0, mean_ratio=ratio) for ratio in (0.8, 0.9, 1.0)]
        of_seeds = beside([run(1.0)] * 3, three).mean_ratio
        assert of_seeds.value == pytest.approx(0.9)
        assert of_seeds.high == pytest.approx(0.9 + 0.4303 / math.sqrt(3), abs=1e-4)
        drawn = beside([run(1.0)], three[:1], [run(1.0)] * 3, three).mean_ratio
        assert drawn.interval == pytest.approx((0.8 - 0.4303, 0.8 + 0.4303), abs=1e-4)
        assert beside([run(1.0)], three[:1]).mean_ratio.interval is None

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
        assert found.mean_ratio.value == pytest.approx(0.9)
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
        "max_staleness": round(stale),
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
        "idle_bubble_by_cause": {cause: spread(idle.get(cause, 0.0)) for cause in IDLE},
    }


IDLE = ("barrier", "queue_empty", "weight_update", "tool_wait", "kv_stall")


def said(
    *policies: dict[str, Any], max_staleness: int | None = None, **tables: dict[str, Any]
) -> list[str]:
    """The verdict, the last policy having these `tables`."""
    settings = {policies[-1]["name"]: tables}
    return verdict({"prompts": 4, "policies": list(policies)}, max_staleness, settings)


BASE = policy("base", 1.0)


class TestWhoIsFastest:
    def test_the_fastest_at_each_staleness_that_brings_speed(self) -> None:
        fresh, old, idle = (policy(*one, stale=at) for *one, at in OF_STALENESS)
        first, second, *rest = said(BASE, fresh, old, idle, policy("older", 1.7, stale=4))
        assert first == "Fastest at staleness 0: fresh, 1.50x of base; next: base 1.00x."
        assert second == "Fastest at staleness 4: old, 2.00x of base; next: older 1.70x."
        assert "staleness 2" not in " ".join(rest)

    def test_only_policies_within_the_staleness_can_win(self) -> None:
        fresh, old = policy("fresh", 1.5), policy("old", 2.0, stale=4)
        first, second, *_ = said(BASE, fresh, old, max_staleness=1)
        assert first == "Fastest at staleness 0: fresh, 1.50x of base; next: base 1.00x."
        assert second == "old is faster (2.00x) but trains samples up to 4 versions old."

    def test_a_policy_that_was_allowed_less_is_to_be_compared_at_equal_staleness(self) -> None:
        less, more = policy("best_async", 1.5, stale=1), policy("areal", 2.0, stale=4)
        advice = "add --policy 'best_async freshness.max_staleness=4' to compare at 4."
        assert any(text.endswith(advice) for text in said(BASE, less, more))
        equal = policy("best_async freshness.max_staleness=4", 3.0, stale=4)
        for others in ((equal, more), (more, equal)):
            assert not any(" to compare at " in text for text in said(BASE, less, *others))

    def test_shorter_samples_win_nothing(self) -> None:
        first, second, *_ = said(BASE, policy("short", 3.0, bias="shorter"))
        assert first.endswith("staleness 0: base, the policy that the others are compared with.")
        assert second == "short is faster (3.00x) but trains shorter samples than requested."

    def test_an_interval_that_holds_1_may_be_chance(self) -> None:
        first, *_ = said(BASE, policy("lucky", 1.1, interval=(0.9, 1.3)))
        assert "lucky, 1.10x (0.90-1.30) of base, which may be chance; level with it: base" in first

    def test_policies_level_with_the_winner_are_named(self) -> None:
        best = policy("best", 1.5, interval=(1.4, 1.6))
        near, far = policy("near", 1.45, interval=(1.3, 1.6)), policy("far", 1.2)
        first, *_ = said(BASE, best, near, far)
        assert first.endswith("of base; level with it: near 1.45x (1.30-1.60).")

    def test_no_policy_may_be_allowed(self) -> None:
        [only] = said(policy("a", 1.0, stale=2), max_staleness=1)
        assert only.startswith("No policy here trains all the requested lengths")


OF_STALENESS = (("fresh", 1.5, 0), ("old", 2.0, 4), ("no faster", 1.4, 2))


class TestWhatItCosts:
    def test_a_policy_without_cost_says_so(self) -> None:
        assert "base has no cost that is measured here." in said(BASE)

    def test_every_cost_is_named(self) -> None:
        text = " ".join(said(policy("a", 1.0, stale=2, bias="long last", ks=0.3, discarded=0.25)))
        for cost in (
            "samples 1.00 versions old on average, 2 at most",
            "25 tokens discarded per 100 trained",
            "KS 0.30 beyond chance",
            "long samples trained only at the end",
        ):
            assert cost in text


class TestWhatLimitsIt:
    @pytest.mark.parametrize("cause", IDLE)
    def test_the_largest_idle_share(self, cause: str) -> None:
        limited = policy("a", 1.0, **{"tool_wait": 0.06, cause: 0.2})
        label, sentence, _ = LIMITS[cause]
        assert said(limited)[-1].startswith(f"{sentence} (20 % of instance time")
        assert limited_by(limited) == f"{label} 20 %"

    def test_the_link_that_limits(self) -> None:
        sent = {"thin": {"mean": 9e9}, "thick": {"mean": 2e9}}
        slow = {**policy("a", 1.0, weight_update=0.2), "weights": {"sent_bytes": sent}}
        last = said(slow)[-1]
        assert "they come by thin. Try" in last
        assert "weights.plan" in last

    @pytest.mark.parametrize(
        ("figures", "name"),
        [
            ({"gap": 0.03, "barrier": 0.5}, "bound"),
            ({"waits_s": 2.0, "barrier": 0.5}, "trainer"),
            ({"preemptions": 7}, "kv_stall"),
            ({}, "generation"),
        ],
    )
    def test_each_limit_is_named(self, figures: dict[str, Any], name: str) -> None:
        limited = policy("a", 1.0, **figures)
        assert said(limited)[-1].startswith(LIMITS[name][1])
        assert limited_by(limited) == LIMITS[name][0]

    def test_no_remedy_was_replayed_already_or_is_in_the_policy(self) -> None:
        for cause in ("barrier", "queue_empty"):
            mine = policy("mine", 1.0, **{cause: 0.2})
            assert "best_on_policy or best_async" in said(mine)[-1]
            assert "best_async" not in said(mine, max_staleness=0)[-1]
            slower = policy("best_async freshness.max_staleness=2", 0.9, stale=2)
            assert "best_" not in said(policy("best_on_policy", 0.5), slower, mine)[-1]
        last = said(policy("mine", 1.0, queue_empty=0.2), batching={"max_groups": 64})[-1]
        assert "a larger batching.max_groups" in last
        slow = policy("mine", 1.0, weight_update=0.2)
        has = {"interruption": {"use": "partial"}, "weights": {"use": "rolling"}}
        assert said(slow, **has)[-1].endswith("Try a faster transfer.")
        assert "in_place" in said(slow)[-1]
        assert "admission" not in said(policy("a", 1.0, kv_stall=0.2), admission={"use": "x"})[-1]


def test_a_real_report_has_all_that_is_looked_at() -> None:
    trace = make_trace({f"g{i}": [5 + 3 * i, 9 - i] for i in range(8)})
    scenario = make_scenario(prompts_per_step=2)
    policies = [make_policy("one"), make_policy("two", batching="fully_async")]
    runs = replay(trace, policies, scenario)
    sentences = verdict(reports.document(trace, scenario, runs, steps=0, seeds=1))
    assert sentences[0].startswith("Fastest at staleness 0: ")
    assert len(sentences) >= 3


def test_no_trainer_means_no_verdict() -> None:
    assert verdict({"prompts": 0, "policies": []}) == []
