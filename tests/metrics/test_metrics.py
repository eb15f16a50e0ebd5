"""The figures of a whole run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sched.core.model import events as ev
from rollout_sched.metrics import Metrics, Summary
from tests.helpers import make_policy, make_scenario, make_trace, watch
from tests.metrics.tape import Tape, deliver, sample


def test_asking_twice_changes_nothing() -> None:
    tape = Tape("i", "j", places=4)
    tape.start(1.0, ("a/0", "i"))
    tape.finish(3.0, "a/0", 1, 5)
    assert tape.metrics.summary(9.0) == tape.metrics.summary(9.0)


@pytest.mark.parametrize(("trained", "counted"), [(50, 50), (100, 100), (200, 100)])
def test_tokens_beyond_those_asked_for_do_not_count(trained: int, counted: int) -> None:
    tape = Tape(offered=lambda group: [100])
    tape.at(0.0, ev.BatchRequested(), deliver(sample("a/0", trained)))
    summary = tape.metrics.summary(10.0)
    assert summary.accepted_tokens_per_s == trained / 10
    assert summary.equal_length_tokens_per_s == counted / 10


def test_steps_add_up_to_the_total() -> None:
    tape = Tape("i", "j", places=4)
    for number in range(4):
        tape.start(number * 10, (f"g{number}/0", "i"))
        one = deliver(sample(f"g{number}/0"), version=number)
        tape.finish(number * 10 + 6, f"g{number}/0", number + 1, 5, one)
    summary = tape.metrics.summary(36.0)
    steps = tape.metrics.steps
    assert sum(step.capacity_s for step in steps) == 2 * 36
    assert sum(step.idle_bubble * step.capacity_s for step in steps) == pytest.approx(
        summary.idle_bubble * 72
    )
    assert sum(step.occupancy_bubble * step.capacity_s for step in steps) == pytest.approx(
        summary.occupancy_bubble * 72
    )


def consistent(summary: Summary) -> None:
    assert 0 <= summary.idle_bubble <= 1 + 1e-9
    assert summary.idle_bubble <= summary.occupancy_bubble + 1e-9 <= 1 + 2e-9
    assert sum(summary.idle_bubble_by_cause.values()) == pytest.approx(summary.idle_bubble)
    assert sum(summary.occupancy_bubble_by_cause.values()) == pytest.approx(
        summary.occupancy_bubble
    )
    assert all(
        summary.idle_bubble_by_cause[cause] <= summary.occupancy_bubble_by_cause[cause] + 1e-9
        for cause in ("weight_update", "barrier")
    )


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 25), min_size=2, max_size=2), min_size=1, max_size=6),
    places=st.sampled_from([1, 3, 8]),
    colocated=st.booleans(),
    at_update=st.sampled_from(["drain", "in_place", "resubmit"]),
    kv_tokens=st.sampled_from([32, 10_000]),
)
def test_idle_never_exceeds_occupancy_nor_occupancy_the_fleet(
    lengths: list[list[int]], places: int, colocated: bool, at_update: str, kv_tokens: int
) -> None:
    policy = make_policy(
        "async",
        batching="fully_async",
        admission="unbounded",
        freshness={"max_staleness": 2},
        interruption={"use": "partial", "at_update": at_update},
    )
    trace = make_trace({f"g{i}": members for i, members in enumerate(lengths)})
    scenario = make_scenario(
        instances=2, slots=3, kv_tokens=kv_tokens, colocated=colocated, poll_s=2.0, train_s=3.0
    )
    ran = watch(policy, trace, scenario, check=False)
    metrics = Metrics(places, colocated=colocated)
    for now, event, actions in ran.log:
        metrics.observe(now, event, actions)
    summary = metrics.summary(ran.total_s)
    consistent(summary)
    for step in metrics.steps:
        assert step.idle_bubble <= step.occupancy_bubble + 1e-9 <= 1 + 2e-9
    assert sum(step.capacity_s for step in metrics.steps) <= 2 * ran.total_s + 1e-9
