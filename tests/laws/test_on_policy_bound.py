"""Training at staleness 0 takes at least as long as its rounds, whatever a policy starts and
discards, and in whatever order. (`test_rough_replay` tests this in a rough world, too.)
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollout_sched.config import PolicyFile, load_policy
from rollout_sched.simulators.replay.bounds import offered_on_policy_bound
from rollout_sched.simulators.replay.runs import run_policy
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import Trace
from tests.helpers import make_policy
from tests.simulators.replay.test_runs import scenarios, small_traces

OVER_SAMPLES = load_policy("tail_batching")
IN_PARTS = [
    load_policy("streamed_sync"),
    make_policy(
        "fused",
        batching={"use": "sync", "part_prompts": 1},
        lending={"use": "stage_fusion", "whole": 0.3, "fill": 1.0, "slowdown": 9.0},
    ),
]
POLICIES = [
    OVER_SAMPLES,
    *IN_PARTS,
    *map(load_policy, ("static_split", "round_robin_sync", "dplb")),
    make_policy("over", batching={"use": "sync", "over_prompts": 2.0}),
    make_policy("kept", batching={"use": "sync", "over_prompts": 1.5}, interruption="partial"),
    make_policy("rolling", batching="fully_async", weights={"use": "rolling"}),
    make_policy("drop", batching="fully_async", freshness={"when_stale": "drop"}),
    make_policy("rounds", selection="like_lengths", batching={"use": "sync", "over_prompts": 1.25}),
]


@settings(max_examples=150, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    trace=small_traces(),
    scenario=scenarios,
    seconds_per_token=st.sampled_from([0.0, 0.2]),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 3),
)
def test_no_run_at_staleness_0_beats_it(
    policy: PolicyFile,
    trace: Trace,
    scenario: Scenario,
    seconds_per_token: float,
    epochs: int,
    seed: int,
) -> None:
    if epochs > 1:
        assume(scenario.job.samples_per_prompt)
        assume(not any(sample.arrival_s for sample in trace.samples()))
    job = msgspec.structs.replace(scenario.job, epochs=epochs)
    trainer = msgspec.structs.replace(scenario.trainer, seconds_per_token=seconds_per_token)
    scenario = msgspec.structs.replace(scenario, job=job, trainer=trainer)
    run = run_policy(policy, trace, scenario, seed=seed)
    assert run.max_staleness == run.summary.staleness_max == 0
    assert run.gap_to_on_policy_bound is not None
    assert run.gap_to_on_policy_bound >= -1e-9
    offered = offered_on_policy_bound(Workload(trace, scenario.job, seed=seed), scenario)
    assert offered.parts_s <= offered.whole_batches_s * (1 + 1e-9)
    assert run.bound_s <= (run.on_policy_bound_s or 0.0) * (1 + 1e-9)
    if policy is not OVER_SAMPLES and not run.summary.resumed_attempts + run.summary.preemptions:
        bounds = [offered.whole_batches_s, *([offered.parts_s] if policy in IN_PARTS else [])]
        assert run.on_policy_bound_s in [pytest.approx(bound) for bound in bounds]
