"""The frontier: what nothing else is better than in every respect."""

from __future__ import annotations

from typing import Any

from rollout_sched.simulators.tune.evaluation import CaseFigures
from rollout_sched.simulators.tune.search import frontier


def names(**items: dict[str, Any]) -> list[str]:
    return frontier(list(items), lambda name: CaseFigures(**{"tokens_per_s": 100.0, **items[name]}))


def test_slower_and_staler_is_not_on_it() -> None:
    assert names(
        fresh={"tokens_per_s": 100.0},
        fast={"tokens_per_s": 150.0, "staleness_mean": 1.0},
        beaten={"tokens_per_s": 120.0, "staleness_mean": 1.5},
    ) == ["fast", "fresh"]


def test_every_respect_counts() -> None:
    everything = {
        "best": {},
        "fast": {"tokens_per_s": 110.0, "step_bias": 0.5, "length_ratio": 0.5, "staleness_mean": 9},
        "a": {"tokens_per_s": 105.0, "step_bias": 0.5},
        "b": {"tokens_per_s": 105.0, "longest_kept": 0.5},
        "c": {"tokens_per_s": 105.0, "staleness_mean": 1.0},
    }
    assert set(names(**everything)) == set(everything)


def test_differences_too_small_to_matter_are_none() -> None:
    assert names(first={"tokens_per_s": 100.0}, same={"tokens_per_s": 100.2}) == ["first"]
    assert names(a={"step_bias": 0.101}, b={"step_bias": 0.099}) == ["a"]


def test_what_made_nothing_is_not_there() -> None:
    assert names(a={"tokens_per_s": 0.0}) == []
    assert names() == []
