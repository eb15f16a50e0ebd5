"""Bounds: closed forms, what each limit does, and never above a simulated makespan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import synthetic
from rollout_sched.simulators.instance import CostModel
from rollout_sched.simulators.replay.bounds import (
    Bound,
    Demand,
    OnPolicyBound,
    joint,
    longest,
    lower_bound,
    offered_bound,
    offered_on_policy_bound,
    on_policy_bound,
    rounds,
    run_bound,
)
from rollout_sched.simulators.replay.runs import run_policy
from rollout_sched.simulators.replay.scenario import FleetModel, Scenario
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces import SampleRecord, Turn, read
from rollout_sched.simulators.traces.model import SampleRecord as SampleRecordRunBounds
from rollout_sched.simulators.traces.model import Turn as TurnRunBounds
from tests.helpers import make_policy, make_scenario, make_trace


@dataclass(frozen=True)
class Cost:
    step_s: float = 0.6e-3
    weights_s: float = 5.95e-3
    token_s: float = 23.1e-6
    exponent: float = 1.6
    sequence_s: float = 4.4e-6
    context_s: float = 26.3e-9
    attention_s: float = 1e-9
    experts_s: float = 0.0
    expert_share: float = 0.0
    read_s = CostModel.read_s

    def step(self, tokens: int, decodes: int, context: int, attention: float = 0.0) -> float:
        p = self.exponent
        body: float = (self.read_s(tokens) ** p + (self.token_s * tokens) ** p) ** (1 / p)
        extra = self.sequence_s * decodes + self.context_s * context + self.attention_s * attention
        return self.step_s + body + extra


COST = Cost()
MIXTURE = Cost(weights_s=2e-3, experts_s=12e-3, expert_share=1 / 16)
WIDE = FleetModel(instances=1, max_num_seqs=256, kv_tokens=10**9)


def single(*lengths: int, prompt: int = 100) -> list[SampleRecord]:
    return [SampleRecord(str(i), 0, prompt, (Turn(n),)) for i, n in enumerate(lengths)]


class TestClosedForms:
    def test_one_sample_alone_is_its_steps_one_by_one(self) -> None:
        by_hand = COST.step(1, 0, 0) + sum(COST.step(1, 1, 100 + i - 2) for i in range(2, 51))
        assert longest(Demand.of_samples(single(50)), COST) == pytest.approx(by_hand)

    def test_turns_read_the_growing_context_and_wait_for_tools(self) -> None:
        sample = SampleRecord("g", 0, 100, (Turn(3, 10, 2.0), Turn(2)))
        steps = [(0, 0), (1, 100), (1, 101), (0, 0), (1, 113)]
        by_hand = 2.0 + sum(COST.step(1, decodes, context) for decodes, context in steps)
        assert longest(Demand.of_samples([sample]), COST) == pytest.approx(by_hand)

    def test_equal_samples_in_full_batches(self) -> None:
        fleet = FleetModel(instances=2, max_num_seqs=4, kv_tokens=10**9)
        batch = COST.step(4, 0, 0) + sum(COST.step(4, 4, 4 * (100 + i - 2)) for i in range(2, 11))
        assert joint(Demand.of_samples(single(*[10] * 8)), fleet, COST) == pytest.approx(batch)

    def test_scarce_kv_forces_more_steps(self) -> None:
        tight = FleetModel(instances=1, max_num_seqs=256, kv_tokens=400)
        demand = Demand.of_samples(single(*[200] * 16))
        # 16 samples of 200 on 100 tokens of prompt hold on average 199 tokens: two at a time.
        assert joint(demand, tight, COST) > 4 * joint(demand, WIDE, COST)

    def test_a_group_holds_its_prompt_once(self) -> None:
        tight = FleetModel(instances=1, max_num_seqs=256, kv_tokens=5000)
        alone = Demand.of_samples(single(*[50] * 8, prompt=4000))
        shared = Demand.of_samples([SampleRecord("g", i, 4000, (Turn(50),)) for i in range(8)])
        assert joint(shared, tight, COST) < joint(alone, tight, COST)

    def test_the_batched_token_budget_counts_as_slots(self) -> None:
        few = FleetModel(instances=1, max_num_seqs=256, kv_tokens=10**9, max_num_batched_tokens=2)
        assert joint(Demand.of_samples(single(*[10] * 8)), few, COST) == pytest.approx(
            joint(Demand.of_samples(single(*[10] * 8)), FleetModel(1, 10**9, max_num_seqs=2), COST)
        )

    def test_total_is_the_larger(self) -> None:
        bound = lower_bound(single(1000, *[10] * 5), WIDE, COST)
        assert bound.total_s == max(bound.longest_s, bound.joint_s)
        # One instance must at least run the longest sample's steps.
        assert bound.joint_s > bound.longest_s
        many = FleetModel(instances=8, max_num_seqs=256, kv_tokens=10**9)
        spread = lower_bound(single(1000, *[10] * 5), many, COST)
        assert spread.total_s == spread.longest_s > spread.joint_s

    def test_restarts_only_loosen_and_never_below_the_bare_steps(self) -> None:
        demand = Demand.of_samples(single(50, 50))
        bounds = [lower_bound(demand, WIDE, COST, restarts=r).total_s for r in (0, 1, 2, 10**6)]
        assert bounds == sorted(bounds, reverse=True)
        assert bounds[0] > bounds[1]
        assert longest(demand, COST, 10**6) == pytest.approx(50 * COST.step(1, 0, 0))

    def test_nothing_to_do_takes_no_time(self) -> None:
        assert lower_bound([], WIDE, COST) == Bound(0.0, 0.0, 0.0)

    def test_parts_equal_whole_single_turn_samples(self) -> None:
        parts = Demand.of_parts([100, 100], [50, 70])
        assert lower_bound(parts, WIDE, COST) == lower_bound(single(50, 70), WIDE, COST)

    def test_the_composite_lands_where_the_formula_was_first_evaluated(self) -> None:
        # 8 H100-like instances of 56,000 blocks: 726 s by a separate implementation that reads
        # one token more, and shares no prompts; ours is a little looser.
        fleet = FleetModel(instances=8, max_num_seqs=256, kv_tokens=56_000 * 16)
        bound = lower_bound(read("composite_math_512x8").samples(), fleet, COST)
        assert 0.95 * 726 < bound.total_s <= 726

    @pytest.mark.parametrize(
        ("context", "output", "held"),
        [([1], [0], 0), ([-1], [1], 0), ([1, 2], [1], 0), ([5], [1], [6]), ([math.nan], [1], 0)],
    )
    def test_parts_that_make_no_sense(
        self, context: list[float], output: list[float], held: list[float] | float
    ) -> None:
        with pytest.raises(ValueError, match=r"expected|shapes"):
            Demand.of_parts(context, output, held)


def partitions(groups: list[str], size: int) -> Iterator[list[list[str]]]:
    """Every way to make batches of at most so many groups."""
    if not groups:
        yield []
        return
    first, *others = groups
    for count in range(min(size, len(groups))):
        for mates in combinations(others, count):
            left = [group for group in others if group not in mates]
            yield from ([[first, *mates], *batches] for batches in partitions(left, size))


class TestRounds:
    @settings(max_examples=60, deadline=None)
    @given(
        lengths=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), max_size=6),
        size=st.integers(1, 4),
        training=st.sampled_from([0.0, 0.01]),
    )
    def test_no_way_to_make_batches_takes_less_and_one_takes_as_long(
        self, lengths: list[list[int]], size: int, training: float
    ) -> None:
        members = {
            str(number): [SampleRecord(str(number), i, 10, (Turn(n),)) for i, n in enumerate(of)]
            for number, of in enumerate(lengths)
        }

        def takes(batch: list[str]) -> float:
            return max(
                longest(Demand.of_samples(members[group]), COST)
                + training * sum(10 + sample.response_tokens for sample in members[group])
                for group in batch
            )

        samples = [sample for of in members.values() for sample in of]
        found = rounds(Demand.of_samples(samples), size, COST, trained_s_per_token=training)
        least = min(sum(map(takes, batches)) for batches in partitions(list(members), size))
        assert found == pytest.approx(least)

    def test_one_round_is_the_longest(self) -> None:
        demand = Demand.of_samples(single(50, 20, 70))
        assert rounds(demand, 3, COST) == pytest.approx(longest(demand, COST))

    def test_batches_joined_are_as_good_as_all_samples_at_once(self) -> None:
        batches = [
            [SampleRecord(group, i, 10, (Turn(n + i),)) for group, n in batch for i in range(2)]
            for batch in ([("a", 50), ("b", 20)], [], [("c", 70)])
        ]
        joined = Demand.joined([Demand.of_samples(batch) for batch in batches])
        every = Demand.of_samples([sample for batch in batches for sample in batch])
        assert joined.tokens.tolist() == every.tokens.tolist() == [60, 61, 30, 31, 80, 81]
        found = rounds(joined, 1, COST, trained_s_per_token=0.1)
        assert found == rounds(every, 1, COST, trained_s_per_token=0.1)

    def test_restarts_loosen_it_once_and_not_in_every_round(self) -> None:
        demand = Demand.of_samples(single(50, 50))
        saved = COST.sequence_s + COST.context_s * 150
        assert rounds(demand, 1, COST, restarts=3) == pytest.approx(
            rounds(demand, 1, COST) - 3 * saved
        )


@dataclass
class Job:
    """A sample in the simulation: its turn, tokens made in it, tokens before it."""

    sample: SampleRecord
    before: int
    turn: int = 0
    made: int = 0
    ready_s: float = 0.0
    decoding: bool = False

    @property
    def context(self) -> int:
        return self.before + self.made

    def token_made(self, now: float) -> None:
        turn = self.sample.turns[self.turn]
        self.made, self.decoding, self.ready_s = self.made + 1, True, now
        if self.made == turn.output_tokens:
            self.before += self.made + turn.observation_tokens
            self.turn, self.made, self.decoding = self.turn + 1, 0, False
            self.ready_s = now + turn.tool_s

    @property
    def done(self) -> bool:
        return self.turn == len(self.sample.turns)


@dataclass
class Engine:
    """Takes what fits and steps. As flattering as the model allows: siblings share their whole
    prompt, waiting jobs need no KV, and every prefill, restarts included, costs one token."""

    fleet: FleetModel
    cost: Cost = COST
    now: float = 0.0
    running: list[Job] = field(default_factory=list)
    restarts: int = 0

    def fits(self, jobs: list[Job]) -> bool:
        prompts = {job.sample.group: job.sample.prompt_tokens for job in jobs}
        private = sum(job.context - job.sample.prompt_tokens for job in jobs)
        slots = min(self.fleet.max_num_seqs, self.fleet.max_num_batched_tokens)
        return len(jobs) <= slots and sum(prompts.values()) + private <= self.fleet.kv_tokens

    def admit(self, queue: list[Job]) -> None:
        while not self.fits(self.running):
            queue.append(self.interrupted())
        for job in [job for job in queue if job.ready_s <= self.now]:
            if self.fits([*self.running, job]):
                queue.remove(job)
                self.running.append(job)

    def interrupted(self) -> Job:
        job = self.running.pop()
        job.decoding, job.ready_s = False, self.now
        return job

    def step(self, queue: list[Job]) -> None:
        decodes = [job for job in self.running if job.decoding]
        self.restarts += sum(bool(job.made) and not job.decoding for job in self.running)
        read = sum(job.context - 1 for job in decodes)
        self.now += self.cost.step(len(self.running), len(decodes), read)
        for job in self.running:
            job.token_made(self.now)
        queue += [job for job in self.running if not job.made and not job.done]
        self.running = [job for job in self.running if job.made]


def simulated(
    samples: list[SampleRecord], fleet: FleetModel, interrupt_every: int, cost: Cost = COST
) -> tuple[float, int]:
    """(time of the last token, restarts) of greedy engines on one queue, earliest engine first."""
    queue = [Job(sample, sample.prompt_tokens) for sample in samples]
    engines = [Engine(fleet, cost) for _ in range(fleet.instances)]
    last_token_s = 0.0
    turn = 0
    while queue or any(engine.running for engine in engines):
        engine = min(engines, key=lambda e: (e.now, not e.running))
        turn += 1
        if interrupt_every and engine.running and turn % interrupt_every == 0:
            queue.append(engine.interrupted())
        engine.admit(queue)
        if engine.running:
            engine.step(queue)
            last_token_s = max(last_token_s, engine.now)
        else:
            later = [job.ready_s for job in queue] + [e.now for e in engines]
            engine.now = min((at for at in later if at > engine.now), default=math.inf)
        assert engine.now < math.inf, "a job that fits no engine"
    return last_token_s, sum(engine.restarts for engine in engines)


turns = st.builds(Turn, st.integers(1, 12), st.integers(0, 6), st.floats(0, 0.05, allow_nan=False))


@st.composite
def workloads(draw: st.DrawFn) -> list[SampleRecord]:
    """Groups of trajectories with one prompt length per group."""
    samples = []
    for group in range(draw(st.integers(1, 4))):
        prompt = draw(st.integers(1, 60))
        for index in range(draw(st.integers(1, 5))):
            listed = (*draw(st.lists(turns, max_size=2)), Turn(draw(st.integers(1, 40))))
            samples.append(SampleRecord(str(group), index, prompt, listed))
    return samples


@settings(max_examples=300, deadline=None)
@given(
    samples=workloads(),
    instances=st.integers(1, 3),
    slots=st.integers(1, 8),
    spare_kv=st.integers(0, 300),
    interrupt_every=st.sampled_from([0, 0, 2, 3, 7]),
    cost=st.sampled_from([COST, MIXTURE]),
)
def test_no_simulated_schedule_beats_the_bound(
    samples: list[SampleRecord],
    instances: int,
    slots: int,
    spare_kv: int,
    interrupt_every: int,
    cost: Cost,
) -> None:
    kv_tokens = max(s.given_tokens + s.response_tokens for s in samples) + spare_kv
    fleet = FleetModel(instances, kv_tokens, max_num_seqs=slots)
    makespan, restarts = simulated(samples, fleet, interrupt_every, cost)
    bound = lower_bound(samples, fleet, cost, restarts)
    assert bound.total_s <= makespan


@pytest.mark.parametrize("slots", [4, 64])
def test_the_bound_is_near_for_an_easy_workload(slots: int) -> None:
    samples = single(*[200] * 64)
    fleet = FleetModel(instances=1, max_num_seqs=slots, kv_tokens=10**6)
    makespan, restarts = simulated(samples, fleet, 0)
    assert restarts == 0
    assert makespan <= lower_bound(samples, fleet, COST).total_s * 1.001


def test_the_bound_of_a_large_workload_is_finite_and_positive() -> None:
    bound = lower_bound(synthetic(5000, 8).samples(), WIDE, COST)
    assert np.isfinite(bound.total_s)
    assert bound.total_s > 0


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
        sample = SampleRecordRunBounds("a", 0, 4, (TurnRunBounds(3, 1, 100.0), TurnRunBounds(2)))
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

    def test_training_takes_its_time_however_early_parts_come(self) -> None:
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

    def test_nothing_to_train_takes_no_time(self) -> None:
        assert on_policy_bound(Demand.of_samples([]), 2, 0, self.scenario()) == OnPolicyBound(
            0.0, 0.0
        )
