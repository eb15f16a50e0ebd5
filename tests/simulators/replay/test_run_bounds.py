"""Generation and training together: what no run can beat, by hand on tiny worlds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollout_sched.simulators.replay.bounds import (
    Demand,
    OnPolicyBound,
    offered_bound,
    offered_on_policy_bound,
    on_policy_bound,
    run_bound,
)
from rollout_sched.simulators.replay.runs import run_policy
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import SampleRecord, Turn
from tests.helpers import make_policy, make_scenario, make_trace


class TestAnyStaleness:
    def test_disaggregated_training_overlaps(self) -> None:
        # One sample of 9 tokens takes nine steps of a second; training takes 10 s a batch.
        scenario = make_scenario(train_s=10.0)
        samples = list(make_trace({"a": [9]}).samples())
        assert run_bound(Demand.of_samples(samples), 1, scenario) == pytest.approx(19.0)
        assert run_bound(Demand.of_samples(samples), 5, scenario) == pytest.approx(50.0)

    def test_colocated_training_takes_turns(self) -> None:
        scenario = make_scenario(train_s=10.0, colocated=True)
        samples = list(make_trace({"a": [9]}).samples())
        assert run_bound(Demand.of_samples(samples), 5, scenario) == pytest.approx(59.0)

    def test_colocated_training_in_parts_leaves_gpus_to_the_tail(self) -> None:
        scenario = make_scenario(train_s=10.0, colocated=True, instances=2)
        demand = Demand.of_samples(make_trace({"a": [9]}).samples())
        assert run_bound(demand, 5, scenario) == pytest.approx(59.0)
        assert run_bound(demand, 5, scenario, in_parts=True) == pytest.approx(54.5)

    def test_tools_go_on_while_colocated_trainers_train(self) -> None:
        scenario = make_scenario(train_s=10.0, colocated=True)
        sample = SampleRecord("a", 0, 4, (Turn(3, 1, 100.0), Turn(2)))
        assert run_bound(Demand.of_samples([sample]), 5, scenario) == pytest.approx(105.0 + 10.0)
        assert run_bound(Demand.of_samples([sample]), 20, scenario) == pytest.approx(5.0 + 200.0)

    def test_offered_bound_counts_short_batches(self) -> None:
        scenario = make_scenario(train_s=10.0, prompts_per_step=2, colocated=True)
        workload = Workload(make_trace({"a": [9], "b": [9], "c": [9]}), scenario.job)
        assert offered_bound(workload, scenario) == pytest.approx(9.0 + 20.0)


class TestOnPolicy:
    """Groups of 9, 3, 8 and 2 steps of a second, two a batch: the best rounds take 9 and 3."""

    trace = make_trace({"a": [9], "b": [3], "c": [8], "d": [2]})

    def bound(self, scenario: Scenario) -> OnPolicyBound:
        return offered_on_policy_bound(Workload(self.trace, scenario.job), scenario)

    def scenario(self, seconds_per_token: float = 0.0, **world: Any) -> Scenario:
        scenario = make_scenario(train_s=10.0, update_s=2.0, prompts_per_step=2, **world)
        trainer = msgspec.structs.replace(scenario.trainer, seconds_per_token=seconds_per_token)
        return msgspec.structs.replace(scenario, trainer=trainer)

    @pytest.mark.parametrize("colocated", [False, True])
    def test_rounds_training_and_updates_take_turns(self, colocated: bool) -> None:
        bound = self.bound(self.scenario(colocated=colocated))
        assert bound.whole_batches_s == pytest.approx((9 + 3) + 2 * 10 + 2)

    def test_a_trainer_that_takes_parts_trains_the_last_group_when_it_is_whole(self) -> None:
        """Of 13, 7, 12 and 6 tokens, prompts included."""
        bound = self.bound(self.scenario(0.1))
        assert bound.whole_batches_s == pytest.approx((9 + 3) + 2 * 10 + 3.8 + 2)
        assert bound.parts_s == pytest.approx((10.3 + 3.7) + 2 * 10 + 2)

    def test_what_it_trains_takes_its_time_however_early_it_comes(self) -> None:
        bound = self.bound(self.scenario(3.0))
        assert bound.parts_s == pytest.approx(2 * 10 + 3.0 * 38 + 2)

    def test_shared_gpus_do_one_thing_at_a_time(self) -> None:
        """All 22 tokens one after the other, on one instance with one slot."""
        narrow = self.bound(self.scenario(0.1, colocated=True, slots=1))
        assert narrow.parts_s == narrow.whole_batches_s == pytest.approx(22 + 2 * 10 + 3.8 + 2)

    def test_the_best_order_meets_it(self) -> None:
        trace = make_trace({"a": [9], "c": [8], "b": [3], "d": [2]})
        run = run_policy(make_policy(), trace, self.scenario(0.1))
        assert run.summary.total_s == pytest.approx(run.on_policy_bound_s)
        other = run_policy(make_policy(), self.trace, self.scenario(0.1))
        assert other.on_policy_bound_s == run.on_policy_bound_s
        assert other.summary.total_s > run.summary.total_s

    def test_a_policy_that_allows_older_samples_is_not_bound_by_it(self) -> None:
        policy = make_policy(batching="fully_async", freshness={"max_staleness": 1})
        assert run_policy(policy, self.trace, self.scenario()).on_policy_bound_s is None

    def test_nor_is_one_that_has_new_weights_approve_of_old_tokens(self) -> None:
        policy = make_policy(interruption={"use": "partial", "kv": "verify"})
        assert run_policy(policy, self.trace, self.scenario()).on_policy_bound_s is None

    def test_nothing_to_train_takes_no_time(self) -> None:
        assert on_policy_bound(Demand.of_samples([]), 2, 0, self.scenario()) == OnPolicyBound(
            0.0, 0.0
        )
