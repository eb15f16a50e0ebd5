"""Budgets of tokens per round, under a bound on staleness: every run comes to an end.

Groups that have spent their budget are open, wait, and are due like others. So a batch may have to
wait for one that waits itself, and where no more groups come there is nobody else to fill it.
"""

from __future__ import annotations

from itertools import count, product
from typing import Any

import pytest

from benchmarks.synthetic import synthetic
from rollout_sched.config import parse_policy
from rollout_sched.core.model.actions import Action, Deliver, Discard
from rollout_sched.core.model.events import Event
from rollout_sched.simulators.replay.closed_loop import ClosedLoop
from rollout_sched.simulators.replay.workload import Workload
from tests.helpers import make_scenario

GROUPS = 12
#: Twelve groups of two, 60 tokens at most in segments of 4, ten times over.
MAX_EVENTS = 3_600

BATCHINGS: list[dict[str, Any]] = [
    {"use": "sync"},
    {"use": "sync", "over_prompts": 1.5},
    {"use": "sync", "part_prompts": 2},
    {"use": "one_step_off"},
    {"use": "pooled"},
    {"use": "tail_batching"},
    {"use": "fully_async", "max_ahead": 1.5},
]


@pytest.mark.parametrize("kv", ["retain", "recompute"])
@pytest.mark.parametrize(
    "batching", BATCHINGS, ids=lambda table: "-".join(map(str, table.values()))
)
def test_a_run_comes_to_an_end_and_starts_nothing_over(batching: dict[str, Any], kv: str) -> None:
    cases = product(("drain", "resubmit"), (4, 8), (1, 2), ("fifo", "shortest_first"), (1, 3))
    for at_update, segment_tokens, bound, ordering, slots in cases:
        interruption = {"kv": kv, "at_update": at_update, "segment_tokens": segment_tokens}
        policy = {
            "batching": batching,
            "interruption": {"use": "partial", **interruption},
            "freshness": {"use": "bounded", "max_staleness": bound},
            "ordering": {"use": ordering},
            "prediction": {"use": "group_history"},
        }
        assert delivered(policy, slots) == {str(group) for group in range(GROUPS)}


def delivered(policy: dict[str, Any], slots: int) -> set[str]:
    """The groups that a run under this policy delivers, none of which starts over."""
    trace = synthetic(GROUPS, 2, median=20, cap=60, seed=1)
    scenario = make_scenario(instances=2, slots=slots, prompts_per_step=4, colocated=True)
    workload = Workload(trace, scenario.job, steps=GROUPS // 4, seed=1)
    events = count(1)
    names: set[str] = set()

    def watch(now: float, event: Event, actions: list[Action]) -> None:
        assert next(events) < MAX_EVENTS, "the run does not come to an end"
        for action in actions:
            assert not (isinstance(action, Discard) and action.reason == "stale"), action
            if isinstance(action, Deliver):
                names.update(sample.group for sample in action.samples)

    ClosedLoop(parse_policy("budgeted", policy).scheduler(4), workload, scenario, [watch]).run()
    return names
