"""Rewards of a replay: how long they take, which groups they filter, and what that costs."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from rollout_sched.config import ConfigError
from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.events import GroupJudged, RequestFinished
from rollout_sched.core.model.records import DeliveredSample
from rollout_sched.simulators.replay.faults import SchedulerRestarts
from rollout_sched.simulators.replay.runs import run_policy
from rollout_sched.simulators.replay.scenario import RewardModel, load_scenario, parse_scenario
from rollout_sched.simulators.traces.model import Trace
from tests.helpers import make_policy, make_scenario, make_trace, watch


def counted(group: str, index: int = 0) -> DeliveredSample:
    return DeliveredSample(f"{group}/{index}", group, index, 1, 1, (), 0, "stop")


def trace(groups: int = 12, samples: int = 2) -> Trace:
    lengths = {f"g{n}": [3 + (5 * n + k) % 7 for k in range(samples)] for n in range(groups)}
    return make_trace(lengths)


class TestModel:
    def test_constant(self) -> None:
        model = RewardModel(seconds=2.5)
        assert {model.seconds_of(counted("a", n), 0) for n in range(9)} == {2.5}

    def test_a_spread_keeps_the_mean(self) -> None:
        model = RewardModel(seconds=4.0, spread=0.5)
        drawn = [model.seconds_of(counted("a", n), 0) for n in range(4000)]
        assert statistics.mean(drawn) == pytest.approx(4.0, rel=0.05)
        assert min(drawn) > 0
        assert len(set(drawn)) == 4000

    def test_a_share_of_the_groups_is_filtered(self) -> None:
        model = RewardModel(filtered=0.3)
        kept = [model.keeps(f"g{n}", 0) for n in range(3000)]
        assert statistics.mean(kept) == pytest.approx(0.7, abs=0.03)

    def test_by_sample_and_group_and_seed(self) -> None:
        model, other = RewardModel(1.0, 1.0, 0.5), RewardModel(1.0, 1.0, 0.5, seed=1)
        groups = [f"g{n}" for n in range(40)]
        for pair in pairwise([(model, 0), (other, 0), (other, 1)]):
            (a, seed), (b, other_seed) = pair
            assert [a.keeps(g, seed) for g in groups] != [b.keeps(g, other_seed) for g in groups]
            first, second = a.seconds_of(counted("g"), seed), b.seconds_of(counted("g"), other_seed)
            assert first != second

    def test_a_scenario_says_them(self) -> None:
        base = load_scenario("qwen7b-8xh100")
        assert base.rewards is None
        table = {"fleet": {"instances": 1, "kv_tokens": 4096}, "cost": {"step_s": 1.0}}
        table["cost"] |= {"weights_s": 0.0, "token_s": 0.0}
        found = parse_scenario("mine", {**table, "rewards": {"seconds": 3, "filtered": 0.2}})
        assert found.rewards == RewardModel(seconds=3.0, filtered=0.2)
        with pytest.raises(ConfigError, match=r"rewards\.second: unknown key; did you mean"):
            parse_scenario("mine", {**table, "rewards": {"second": 3}})


class TestRun:
    def test_each_reward_begins_when_its_sample_has_finished(self) -> None:
        scenario = make_scenario(rewards=RewardModel(seconds=100.0), prompts_per_step=1)
        ran = watch(make_policy("sync"), make_trace({"a": [3, 9]}), scenario)
        finished = [now for now, event, _ in ran.log if isinstance(event, RequestFinished)]
        (judged,) = (now for now, event, _ in ran.log if isinstance(event, GroupJudged))
        assert judged == finished[-1] + 100.0

    def test_slow_rewards_cost_a_round_their_time_and_overlap_where_nothing_waits(self) -> None:
        def seconds(policy: str, rewards: RewardModel | None, **roles: object) -> float:
            scenario = make_scenario(prompts_per_step=3, rewards=rewards, train_s=1.0)
            made = make_policy(policy, **roles)
            return run_policy(made, trace(), scenario).summary.total_s

        slow = RewardModel(seconds=20.0)
        in_rounds = seconds("sync", slow) - seconds("sync", None)
        assert in_rounds == pytest.approx(4 * 20.0)  # of four batches
        roles = {"batching": "fully_async", "freshness": {"max_staleness": 3}}
        ahead = seconds("async", slow, **roles) - seconds("async", None, **roles)
        assert ahead < in_rounds

    def test_filtered_groups_are_replaced_and_count_as_waste(self) -> None:
        scenario = make_scenario(prompts_per_step=3, rewards=RewardModel(seconds=1.0, filtered=0.4))
        policy = make_policy("sync")
        run = run_policy(policy, trace(20), scenario)
        ran = watch(policy, trace(20), scenario)
        sizes = [
            len({sample.group for sample in action.samples})
            for _, _, actions in ran.log
            for action in actions
            if isinstance(action, Deliver)
        ]
        filtered = run.summary.filtered_groups
        assert filtered > 2
        assert sizes[:-1] == [3] * (len(sizes) - 1)
        assert sum(sizes) + filtered == 20
        assert set(run.summary.discarded_tokens_by_cause) == {"filtered"}
        assert run.summary.discarded_tokens_by_cause["filtered"] == run.summary.discarded_tokens
        assert run.samples_lost == 0
        assert not run.anomalies

    def test_every_policy_loses_the_same_groups(self) -> None:
        scenario = make_scenario(
            prompts_per_step=3, rewards=RewardModel(seconds=2.0, spread=1.0, filtered=0.4)
        )
        asynchronous = make_policy("async", batching="fully_async", freshness={"max_staleness": 2})
        runs = [run_policy(p, trace(20), scenario) for p in (make_policy("sync"), asynchronous)]
        assert len({run.summary.filtered_groups for run in runs}) == 1
        assert len({run.summary.samples_delivered for run in runs}) == 1

    def test_a_scheduler_that_restarts_asks_again(self) -> None:
        scenario = make_scenario(
            prompts_per_step=2,
            rewards=RewardModel(seconds=50.0, filtered=0.2),
            faults=[SchedulerRestarts(at_s=at) for at in (30.0, 70.0)],
        )
        run = run_policy(make_policy("sync"), trace(8), scenario)
        assert run.samples_lost == 0
        assert not run.anomalies
