"""The lab: cases by seed, and what is said of them."""

from __future__ import annotations

from benchmarks import lab, tune_coverage
from benchmarks.lab import OURS, SHAPES, Reached, Verdict, bounded, case, others, shown, verdict
from rollout_sched.config import load_policy


def test_a_case_follows_from_its_seed_and_seeds_take_the_shapes_in_turn() -> None:
    drawn = [case(seed, 1) for seed in range(len(SHAPES))]
    assert [one.name.split()[1].rstrip(",") for one in drawn] == list(SHAPES)
    assert drawn == [case(seed, 1) for seed in range(len(SHAPES))]
    for one in drawn:
        job = one.scenario.job
        assert len(one.trace.groups) == job.prompts_per_step
        assert {len(members) for members in one.trace.groups.values()} == {job.samples_per_prompt}


def test_others_keep_the_bound_and_are_not_ours() -> None:
    for staleness in OURS:
        for policy in others(staleness):
            freshness = policy.build().freshness
            assert freshness.max_staleness == staleness, policy.name
            assert policy.name not in OURS.values()
    assert bounded(load_policy("areal"), 0) is None, "it lives by staleness"


def test_a_small_case_has_a_verdict(monkeypatch) -> None:
    monkeypatch.setattr(lab, "MOST_SAMPLES", 16)
    found = verdict(1, 0, 2)
    assert found.ours.policy == "best_on_policy"
    assert found.over_plain > 0.5
    assert found.over_other <= found.over_plain or not found.other.unbiased


def test_what_is_below_or_biased_is_listed() -> None:
    def one(name: str, plain: float, other: float, *, unbiased: bool = True) -> Verdict:
        ours = Reached("best_on_policy", plain, unbiased)
        return Verdict(name, ours, plain, Reached("streamed_sync", 1.0, True), other)

    some = [one("a", 1.5, 1.1), one("b", 1.2, 0.9), one("c", 1.4, 1.0, unbiased=False)]
    head, *listed = shown(0, some)
    assert "over the best of round_robin_sync and dplb 1.36 (" in head
    assert head.endswith("least 0.90; biased in 1")
    assert listed == ["  1.20 0.90 (streamed_sync): b", "  1.40 1.00 (streamed_sync), biased: c"]


def test_an_interval_of_tune_is_checked_on_prompts_of_its_own(monkeypatch) -> None:
    monkeypatch.setattr(lab, "MOST_SAMPLES", 32)
    found = tune_coverage.checked(3, 2)
    assert found.claimed.low < found.claimed.mean < found.claimed.high
    assert found.fresh > 0
    assert tune_coverage.shown([found]).startswith(f"{int(found.inside)} of 1 intervals")
