"""Law: the trace of a run is the workload of that run, under every policy.

Where the policy of the run cut nothing, the trace replayed under another policy gives exactly the
run under that policy. Where it did, the order, the steps and the verdicts are exact. If a request
that starts over gets the same response again, finished samples have their lengths, and no cut one
is longer than it really is.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from rollout_sched.config import PolicyFile, load_policy, shipped
from rollout_sched.inspection.recording import Recording
from rollout_sched.inspection.trace_fold import recorded_trace
from rollout_sched.policies.batching import TailBatching
from rollout_sched.simulators import traces
from rollout_sched.simulators.replay.runs import Run, run_policy
from rollout_sched.simulators.replay.scenario import Job, RewardModel, Scenario
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import VERDICT, Trace
from tests.simulators.replay.test_runs import EXTRA, scenarios, small_traces

PRESETS = [load_policy(name) for name in shipped("policies/presets")]
POLICIES = [*PRESETS, *(policy for policy in EXTRA if policy.name != "random")]
CUTTING = [policy for policy in POLICIES if policy.roles["batching"][0] is TailBatching]
policies = st.sampled_from(POLICIES) | st.sampled_from(CUTTING)
rewards = st.none() | st.builds(
    RewardModel, seconds=st.sampled_from([0.0, 5.0]), filtered=st.sampled_from([0.0, 0.4])
)


def uniform(trace: Trace) -> Trace:
    """The trace with groups of equal size, without arrivals, and with times that clocks show."""
    size = max(map(len, trace.groups.values()))
    replace = msgspec.structs.replace
    groups = {}
    for group, members in trace.groups.items():
        groups[group] = [
            replace(
                sample,
                sample=index,
                arrival_s=0.0,
                turns=tuple([replace(turn, tool_s=round(turn.tool_s, 2)) for turn in sample.turns]),
            )
            for index, sample in enumerate((members * size)[:size])
        ]
    return replace(trace, groups=groups)


def recorded(path: Path, out: Path) -> Trace:
    trace, _ = recorded_trace("again", [Recording(path, allow_code=True)])
    traces.write(trace, out)
    assert traces.read(out) == trace
    return trace


def figures(run: Run) -> object:
    return run.summary, run.steps, run.events


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    ran=policies,
    other=policies,
    trace=small_traces().map(uniform),
    scenario=scenarios,
    rewards=rewards,
    redraws=st.booleans(),
)
def test_a_recorded_run_is_its_workload(
    tmp_path: Path,
    ran: PolicyFile,
    other: PolicyFile,
    trace: Trace,
    scenario: Scenario,
    rewards: RewardModel | None,
    redraws: bool,
) -> None:
    job = msgspec.structs.replace(scenario.job, samples_per_prompt=0, redraws=redraws)
    scenario = msgspec.structs.replace(scenario, job=job, rewards=rewards)
    journal, again = tmp_path / "j.jsonl", tmp_path / "again.jsonl"
    run_policy(ran, trace, scenario, journal_path=journal)
    found = recorded(journal, tmp_path / "found.jsonl")
    asked, offered = Workload(trace, scenario.job), Workload(found, Job())
    assert list(found.groups) == list(trace.groups) == offered.groups
    assert offered.prompts_per_step == asked.prompts_per_step
    assert offered.samples_per_prompt == asked.samples_per_prompt
    assert offered.max_tokens == asked.max_tokens
    cuts = 0
    for group, members in found.groups.items():
        if rewards is not None:
            kept = rewards.keeps(group, 0)
            assert members[0].labels[VERDICT] == ("kept" if kept else "filtered")
        for sample in members:
            if redraws:
                continue
            if sample.finish == "cut" and sample.sample >= asked.samples_per_prompt:
                cuts += 1  # a start that another replaced, if not a sample that the policy added
                continue
            truth = asked.sample(group, sample.sample)
            assert sample.prompt_tokens == asked.prompt_tokens(group)
            if sample.finish == "cut":
                cuts += 1
                assert sample.response_tokens <= truth.response_tokens
            else:
                assert sample.finish == truth.finish
                assert sample.turns == truth.turns
    event(f"cut: {cuts > 0}")
    if cuts or redraws:
        return
    told = msgspec.structs.replace(scenario, job=Job(redraws=False))
    if rewards is not None and not rewards.seconds:
        told = msgspec.structs.replace(told, rewards=None)  # the verdicts are in the trace
    truth = run_policy(other, trace, scenario)
    # Lengths that neither has are drawn, and a cap on the recorded run hides some of the trace.
    if truth.samples_drawn and any(sample.finish == "length" for sample in found.samples()):
        return
    assert figures(run_policy(other, found, told)) == figures(truth)
    run_policy(ran, found, told, journal_path=again)
    assert again.read_bytes() == journal.read_bytes()
