"""Laws of batches in parts, over whole runs: the bound on staleness holds for each sample and costs
no tokens, and a batch has the same groups as without parts.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sched.core.model.actions import Deliver, Discard
from tests.helpers import Watched, make_policy, make_scenario, make_trace, watch

groups = st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=2), min_size=4, max_size=24)
interruptions = st.sampled_from(
    [
        {"use": "partial", "at_update": "in_place", "kv": "retain"},
        {"use": "partial", "at_update": "resubmit"},
        {"use": "partial", "at_update": "drain"},
    ]
)


def batches_of(ran: Watched) -> list[list[Deliver]]:
    """The parts of each batch."""
    batches: list[list[Deliver]] = []
    for _, part in ran.said(Deliver):
        if part.part == 0:
            batches.append([])
        batches[-1].append(part)
    return batches


def check(ran: Watched, size: int, least: int) -> None:
    batches = batches_of(ran)
    whole = [{sample.group for part in parts for sample in part.samples} for parts in batches]
    assert [len(batch) for batch in whole[:-1]] == [size] * (len(batches) - 1)
    for number, parts in enumerate(batches):
        assert [part.batch for part in parts] == [number] * len(parts)
        assert [part.part for part in parts] == list(range(len(parts)))
        assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
        assert len({part.version for part in parts}) == 1
        for part in parts[:-1]:
            assert len({sample.group for sample in part.samples}) >= max(1, least)
        assert least or len(parts) == 1


@settings(max_examples=150, deadline=None)
@given(
    lengths=groups,
    size=st.integers(1, 4),
    staleness=st.integers(0, 3),
    least=st.integers(0, 3),
    batching=st.sampled_from(["fully_async", "sync", "tail_batching"]),
    interruption=interruptions,
    slots=st.sampled_from([1, 3, 50]),
    train_s=st.sampled_from([0.0, 8.0, 100.0]),
    rolling=st.booleans(),
)
def test_the_bound_holds_and_costs_nothing(
    lengths: list[list[int]],
    size: int,
    staleness: int,
    least: int,
    batching: str,
    interruption: dict[str, Any],
    slots: int,
    train_s: float,
    rolling: bool,
) -> None:
    trace = make_trace({f"g{number}": of for number, of in enumerate(lengths)})
    policy = make_policy(
        batching={"use": batching, "part_prompts": least},
        freshness={"use": "bounded", "max_staleness": staleness},
        interruption=interruption,
        weights="rolling" if rolling else "all_at_once",
    )
    ran = watch(
        policy,
        trace,
        make_scenario(instances=2, slots=slots, train_s=train_s, prompts_per_step=size, samples=1),
    )
    check(ran, size, least)
    assert len(ran.samples) == len(lengths)
    assert max(sample.staleness for sample in ran.samples) <= staleness
    stale = [action for _, action in ran.said(Discard) if action.reason == "stale"]
    assert not stale, "a sample was discarded that could have been delivered in time"


@settings(max_examples=50, deadline=None)
@given(lengths=groups, size=st.integers(1, 4), train_s=st.sampled_from([0.0, 8.0, 100.0]))
def test_on_policy_the_batches_are_those_of_a_trainer_that_waits(
    lengths: list[list[int]], size: int, train_s: float
) -> None:
    """With parts it trains the same samples, and never later."""
    trace = make_trace({f"g{number}": of for number, of in enumerate(lengths)})
    world = make_scenario(instances=2, train_s=train_s, prompts_per_step=size)
    whole, parts = (
        watch(make_policy(batching={"use": "sync", "part_prompts": least}), trace, world)
        for least in (0, 1)
    )
    assert [
        {sample.request for part in batch for sample in part.samples} for batch in batches_of(parts)
    ] == [{sample.request for sample in batch[0].samples} for batch in batches_of(whole)]
    assert {sample.staleness for sample in parts.samples} == {0}
    assert parts.total_s <= whole.total_s + 1e-9
