"""Law: a recorded run, replayed in the scenario of its journal, takes as long as it took."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rollout_sched.config import load_policy, shipped
from rollout_sched.inspection.recording import Recording
from rollout_sched.inspection.run_scenario import run_scenario, run_times
from rollout_sched.inspection.trace_fold import recorded_trace
from rollout_sched.simulators.replay.faults import Joins, Leaving, Lost
from rollout_sched.simulators.replay.runs import run_policy
from rollout_sched.simulators.replay.scenario import (
    Job,
    RewardModel,
    Scenario,
    TrafficModel,
    load_scenario,
)
from rollout_sched.simulators.traces import read

#: How far a replay may be from the run, in the scenario that is fitted to its journal.
BOUND = 0.02

CHANGE = msgspec.structs.replace
TRACE = read("lrm_token_economy").head(32)
PRESETS = shipped("policies/presets")
#: That one cuts samples, so that their lengths are not known.
CUTTING = ("tail_batching",)


def scenario(name: str) -> Scenario:
    """A sample that starts over gets its length again, so that the replay can be exact."""
    return load_scenario(name).with_job({"redraws": False})


RAN = [scenario(name) for name in ("qwen7b-8xh100-disaggregated", "qwen7b-8xh100")]
OTHERS = [scenario(name) for name in ("qwen32b-16xh100", "qwen32b-16xh100-disaggregated")]


def slower(base: Scenario, times: float) -> Scenario:
    cost = {name: times * value for name, value in msgspec.structs.asdict(base.cost).items()}
    return CHANGE(base, cost=CHANGE(base.cost, **{**cost, "exponent": base.cost.exponent}))


def small(ran: Scenario) -> Scenario:
    return CHANGE(
        ran, job=CHANGE(ran.job, prompts_per_step=8), fleet=CHANGE(ran.fleet, instances=3)
    )


def again(path: Path, policy: str, ran: Scenario, *bases: Scenario) -> list[tuple[float, Scenario]]:
    """How far the replay in the scenario of the journal, one for each base, is from the run."""
    loaded = load_policy(policy)
    run = run_policy(loaded, TRACE, ran, journal_path=path)
    recordings = [Recording(path)]
    trace, _ = recorded_trace("again", recordings)
    found = [run_scenario(recordings, trace, base).scenario for base in bases]
    replayed = [run_policy(loaded, trace, one).summary.total_s for one in found]
    return [(s / run.summary.total_s - 1, one) for s, one in zip(replayed, found, strict=True)]


@pytest.mark.parametrize(("number", "policy"), list(enumerate(PRESETS)))
def test_a_run_is_replayed_in_its_scenario(number: int, policy: str, tmp_path: Path) -> None:
    ran = RAN[number % 2]
    another = slower(OTHERS[number // 2 % 2], 30.0 if number % 3 else 1.0)
    own, other = again(tmp_path / "j", policy, small(ran), ran, another)
    off, found = own
    assert abs(off) <= (BOUND if policy in CUTTING else 1e-12)
    assert (found.cost, found.trainer, found.weights) == (ran.cost, ran.trainer, ran.weights)
    off, found = other
    assert abs(off) <= BOUND
    assert found.fleet == small(ran).fleet
    assert found.trainer.placement == ran.trainer.placement


def test_what_happens_to_instances_and_rewards(tmp_path: Path) -> None:
    ran = CHANGE(
        small(RAN[0]),
        rewards=RewardModel(seconds=7.5),
        faults=(
            Lost(at_s=50.0, instance=1, returns_after_s=30.0),
            Joins(at_s=80.0, instance=2),
            Leaving(at_s=150.0, instance=0, returns_after_s=20.0),
        ),
    )
    ((off, found),) = again(tmp_path / "j", "best_async", ran, RAN[0])
    assert abs(off) <= BOUND
    assert found.rewards == ran.rewards
    told = {type(fault): (fault.at_s, fault.instance) for fault in found.faults}
    assert told == {Lost: (50.0, 1), Joins: (80.0, 2), Leaving: (150.0, 0)}


@pytest.mark.parametrize("rounds", [True, False])
def test_clients_are_a_trainer_or_traffic(rounds: bool, tmp_path: Path) -> None:
    groups = {
        name: [CHANGE(sample, arrival_s=1.0 + 2000.0 * (number // 8)) for sample in members]
        for number, (name, members) in enumerate(TRACE.groups.items())
    }
    traffic = TrafficModel() if rounds else TrafficModel(rate=1.0, for_s=100.0)
    ran = CHANGE(small(RAN[0]), traffic=traffic, job=Job(batches=False))
    policy, journal = load_policy("dplb"), tmp_path / "j"
    run_policy(policy, CHANGE(TRACE, groups=groups), ran, journal_path=journal)
    recordings = [Recording(journal)]
    trace, _ = recorded_trace("again", recordings)
    found = run_scenario(recordings, trace, RAN[0])
    assert found.scenario.job.batches == rounds
    run_policy(policy, trace, found.scenario, journal_path=tmp_path / "again")
    replayed = run_times([Recording(tmp_path / "again")])
    assert replayed.total_s == pytest.approx(found.times.total_s, rel=BOUND)
    if rounds:
        assert found.scenario.job.prompts_per_step == 8


def test_the_experts_of_a_mixture_are_fitted_with_its_other_weights(tmp_path: Path) -> None:
    """A base whose weights are read too slowly, those of the experts most of all."""
    ran = small(RAN[0])
    ran = CHANGE(ran, cost=CHANGE(ran.cost, experts_s=3 * ran.cost.weights_s, expert_share=0.05))
    base = CHANGE(
        ran,
        cost=CHANGE(
            ran.cost,
            step_s=2 * ran.cost.step_s,
            weights_s=2 * ran.cost.weights_s,
            experts_s=2 * ran.cost.experts_s,
        ),
    )
    ((off, found),) = again(tmp_path / "run.journal", "round_robin_sync", ran, base)
    assert abs(off) < BOUND
    assert found.cost.experts_s == pytest.approx(ran.cost.experts_s, rel=0.05)
