"""Better parameters for a policy that runs: what is tried, what is found, and what is not."""

from __future__ import annotations

import msgspec
import pytest

from rollout_sched.config import PolicyFile, load_policy
from rollout_sched.simulators.replay.scenario import Job, load_scenario
from rollout_sched.simulators.traces.synthetic import synthetic
from rollout_sched.simulators.tune.evaluation import HardLimits, bench_of
from rollout_sched.simulators.tune.retuning import Question, better, neighbours, with_parameters
from tests.helpers import make_policy

WIDE = HardLimits(9, 1.0, 1.0)
FEW_AT_ONCE = make_policy(
    batching={"use": "fully_async", "max_groups": 8},
    freshness={"use": "bounded", "max_staleness": 4},
)


@pytest.fixture(autouse=True)
def _as_nice_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.nice", lambda more: 0)


def question(policy: PolicyFile, limits: HardLimits = WIDE) -> Question:
    trace = synthetic(40, 4, median=2000, cap=20_000, prompt_median=50, seed=3)
    scenario = load_scenario("qwen7b-8xh100-disaggregated")
    job = Job(prompts_per_step=8, samples_per_prompt=4, max_tokens=20_000)
    return Question(policy, {}, trace, msgspec.structs.replace(scenario, job=job), limits)


def tried(policy: PolicyFile) -> list[dict[str, dict[str, float]]]:
    asked = question(policy)
    return list(neighbours(policy, bench_of(asked.trace, asked.scenario, seed=0).setting(1)))


def test_the_values_next_to_the_present_ones() -> None:
    assert tried(make_policy(batching={"use": "sync", "over_prompts": 1.25})) == [
        {"batching": {"over_prompts": 1.125}},
        {"batching": {"over_prompts": 1.375}},
    ]
    assert tried(make_policy()) == [{"batching": {"over_prompts": 1.0625}}]


def test_what_the_user_bounds_is_not_tried() -> None:
    names = {
        (role, name)
        for preset in ("best_async", "best_on_policy")
        for parameters in tried(load_policy(preset))
        for role, values in parameters.items()
        for name in values
    }
    assert ("batching", "max_ahead") in names
    assert ("lending", "whole") in names
    assert not {name for _, name in names} & {"max_staleness", "max_step_bias", "part_prompts"}


def test_a_policy_of_the_users_own_is_left_alone() -> None:
    policy = make_policy()

    class Mine:
        tunable = ("over_prompts",)

    roles = {**policy.roles, "batching": (Mine, {"over_prompts": 1.0})}
    assert tried(msgspec.structs.replace(policy, roles=roles)) == []


def test_what_would_have_been_faster_is_found_and_sure() -> None:
    found = better(question(FEW_AT_ONCE))
    assert found is not None
    assert found.parameters["batching"]["max_groups"] != 8
    assert found.ratio.low is not None
    assert 1 < found.ratio.low < found.ratio.value


def test_limits_are_kept() -> None:
    assert better(question(FEW_AT_ONCE, HardLimits(0, 0.0, 0.0))) is None


def test_told_parameters_are_the_present_ones() -> None:
    policy = make_policy(batching={"use": "sync", "over_prompts": 1.5})
    told = with_parameters(policy, {"batching": {"over_prompts": 2.0}})
    assert told.roles["batching"][1] == {"over_prompts": 2.0}
    assert policy.roles["batching"][1] == {"over_prompts": 1.5}
