"""Lower bounds on the time of a run: generation and training together, on a scenario's fleet.

`bounds.py` bounds the generation alone. This file adds the trainer, and the pauses for weight
transfers if every batch needs weights of its own.
"""

from __future__ import annotations

import msgspec

from rollout_sched.simulators.replay.bounds import (
    Bound,
    Demand,
    FleetLimits,
    joint,
    lower_bound,
    rounds,
)
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.workload import Workload


class OnPolicyBound(msgspec.Struct, frozen=True):
    """Seconds that no run at staleness 0 can beat.

    whole_batches_s  if the trainer begins a step when its batch is whole
    parts_s          if the trainer takes groups as they become whole, on its own GPUs or on some of
                     the fleet's
    """

    whole_batches_s: float
    parts_s: float

    def of(self, *, in_parts: bool) -> float:
        return self.parts_s if in_parts else self.whole_batches_s


def offered_bound(workload: Workload, scenario: Scenario) -> float:
    """The seconds below which no policy can train the workload."""
    demand = Demand.of_samples(workload.offered_samples())
    return run_bound(demand, _batches(workload), scenario, in_parts=True)


def offered_on_policy_bound(workload: Workload, scenario: Scenario) -> OnPolicyBound:
    """The seconds below which no policy can train the workload at staleness 0."""
    demand = Demand.of_samples(workload.offered_samples())
    return on_policy_bound(demand, workload.prompts_per_step, _batches(workload), scenario)


def run_bound(
    demand: Demand, batches: int, scenario: Scenario, restarts: int = 0, *, in_parts: bool = False
) -> float:
    """Seconds that no run can beat which generates these samples and trains them in `batches`.

    Colocated, generation and training take turns on the same GPUs, so their times add up; only
    tools run during training. On separate GPUs they overlap, but the last batch is trained after
    the last token is generated. `restarts` as in `bounds.lower_bound`. `in_parts`: the trainer may
    have some of the shared GPUs while others generate, so only the work adds up. 0 without batches.
    """
    if not batches:
        return 0.0
    rollout_s = rollout_bound(demand, scenario, restarts).total_s
    trainer = scenario.trainer
    training_s = _training_s(demand, batches, scenario)
    if trainer.colocated:
        generation = rollout_bound(demand.without_tools, scenario, restarts)
        training_s += generation.joint_s if in_parts else generation.total_s
    return max(rollout_s + trainer.fixed_s, training_s)


def on_policy_bound(
    demand: Demand,
    groups_per_batch: int,
    batches: int,
    scenario: Scenario,
    restarts: int = 0,
) -> OnPolicyBound:
    """Seconds that no run at staleness 0 can beat which trains these samples in `batches`.

    Tokens generated while a batch is trained, or before the new weights have arrived, are too old
    for the next batch. So neither period overlaps with a round (`bounds.rounds`). A trainer that
    takes parts overlaps with its own round, but it trains only whole groups, and its step ends with
    `fixed_s`. The joint work of the fleet has only the time of the rounds, and only the GPU time
    that the trainer leaves on shared GPUs. Verified tokens were generated earlier and are not too
    old, so a policy that verifies may beat this bound.
    """
    if not batches:
        return OnPolicyBound(0.0, 0.0)
    trainer = scenario.trainer
    work_s = joint(demand, _limits(scenario), scenario.cost, restarts)
    training_s = _training_s(demand, batches, scenario)
    updates_s = (batches - 1) * scenario.weights.seconds
    alone_s = rounds(demand, groups_per_batch, scenario.cost, restarts)
    trained_s = rounds(demand, groups_per_batch, scenario.cost, restarts, trainer.seconds_per_token)
    ends_s = batches * trainer.fixed_s
    busy_s = training_s + work_s if trainer.colocated else max(training_s, ends_s + work_s)
    return OnPolicyBound(
        whole_batches_s=updates_s + training_s + max(alone_s, work_s),
        parts_s=updates_s + max(ends_s + trained_s, busy_s),
    )


def rollout_bound(demand: Demand, scenario: Scenario, restarts: int) -> Bound:
    """Seconds that no fleet can beat which generates these samples, without the training."""
    return lower_bound(demand, _limits(scenario), scenario.cost, restarts)


def _limits(scenario: Scenario) -> FleetLimits:
    fleet = scenario.fleet
    return FleetLimits(
        fleet.instances, fleet.max_num_seqs, fleet.kv_tokens, fleet.max_num_batched_tokens
    )


def _batches(workload: Workload) -> int:
    return -(-len(workload.groups) // workload.prompts_per_step)


def _training_s(demand: Demand, batches: int, scenario: Scenario) -> float:
    trainer = scenario.trainer
    return batches * trainer.fixed_s + trainer.seconds_per_token * int(demand.tokens.sum())
