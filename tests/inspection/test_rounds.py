"""Rounds of clients are found, and are the steps of their trace."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.config import load_policy, shipped
from rollout_sched.core.model import events as ev
from rollout_sched.inspection.rounds import find_rounds, in_rounds, round_figures
from rollout_sched.inspection.trace_fold import TraceFold
from rollout_sched.metrics.fold import Folded
from rollout_sched.policies.batching import Sync
from rollout_sched.policies.routing import StaticSplit

Entries = list[tuple[float, ev.Event]]


@pytest.mark.parametrize("name", shipped("policies/presets"))
def test_a_policy_is_synchronous_in_rounds(name: str) -> None:
    roles = in_rounds(load_policy(name)).build()
    assert isinstance(roles.batching, Sync)
    assert (roles.freshness.oldest_allowed(9), roles.weights.every) == (9, 1)
    assert not isinstance(roles.routing, StaticSplit)


def asked(at_s: float, prompts: int, samples: int, name: str) -> Entries:
    """A burst: a tenth of a second from one request to the next, answers after 100 to 200 s."""
    found: Entries = []
    ends = random.Random(name)
    for prompt in range(prompts):
        for sample in range(samples):
            request, at = f"{name}.{prompt}.{sample}", at_s + (prompt * samples + sample) / 10
            found.append((at, ev.RequestSubmitted(request, f"p{prompt}", 9, 400)))
            end = ev.RequestFinished(request, 1, 7 + sample)
            found.append((at_s + ends.uniform(100.0, 200.0), end))
    return sorted(found, key=lambda entry: entry[0])


@given(st.integers(2, 6), st.integers(1, 6), st.integers(1, 4), st.integers(0, 3))
def test_rounds_are_the_steps_of_a_trace(
    rounds: int, prompts: int, samples: int, missing: int
) -> None:
    """Also if the last one was cut."""
    prompts += samples == 1
    missing = min(missing, prompts * samples)  # answers
    entries = [
        entry
        for number in range(rounds)
        for entry in asked(300.0 * number, prompts, samples, f"r{number}")
    ]
    entries = entries[: len(entries) - missing * (rounds > 2)]
    found = find_rounds(entries)
    figures = round_figures(found)
    assert figures is not None
    assert (figures.rounds, figures.prompts, figures.samples) == (rounds, prompts, samples)
    assert 100.0 <= figures.t50_s <= figures.t90_s <= figures.length_s <= 200.0
    assert figures.length_s + figures.silence_s == pytest.approx(300.0, abs=30.0)
    fold = TraceFold("here", found)
    for now, event in entries:
        Folded(fold).observe(now, event, ())
    trace, _ = fold.trace("rounds")
    assert (trace.prompts_per_step, trace.group_size) == (prompts, samples)
    assert len(trace.groups) == rounds * prompts
    assert not any(sample.arrival_s for sample in trace.samples())
    assert sum(sample.finish == "cut" for sample in trace.samples()) <= missing


@given(st.integers(0, 1000))
def test_clients_that_come_at_any_time_have_no_rounds(seed: int) -> None:
    rng = random.Random(seed)
    entries: Entries = []
    at_s = 0.0
    for number in range(60):
        at_s += rng.expovariate(1 / 100.0)
        entries += asked(at_s, 1, 1, f"r{number}.{seed}")
    entries.sort(key=lambda entry: entry[0])
    assert not find_rounds(entries)
