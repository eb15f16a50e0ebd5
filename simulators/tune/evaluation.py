"""Evaluate one candidate in one case by a replay; this runs in a worker process."""

from __future__ import annotations

import random
from collections.abc import Mapping
from math import ceil, inf
from typing import Any

import msgspec

from rollout_sched.config import PolicyFile, parse_policy
from rollout_sched.core.errors import CallerError, RolloutError
from rollout_sched.metrics.averages import share
from rollout_sched.simulators.replay.runs import Run, run_policy
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import SampleRecord, Trace
from rollout_sched.simulators.tune import space
from rollout_sched.simulators.tune.limits import CaseFigures
from rollout_sched.simulators.tune.space import Setting

#: The share of the prompts that is held out of the search.
HELD_OUT = 1 / 3


class Case(msgspec.Struct, frozen=True):
    """A number of training steps of one part of the prompts, in the order of a seed."""

    steps: int
    seed: int
    held_out: bool = False


class Task(msgspec.Struct, frozen=True):
    """One task for a worker process; a run of more than `give_up_s` is a failure."""

    table: Mapping[str, Mapping[str, Any]]
    case: Case
    give_up_s: float = inf


class Bench(msgspec.Struct, frozen=True):
    """What candidates are evaluated on: two parts of a trace, and a scenario whose job is explicit,
    so that a part is trained like the whole.

    `split`: the parts have different prompts; else the trace has too few, and both are the whole.
    """

    search: Trace
    held_out: Trace
    scenario: Scenario
    split: bool

    def __call__(self, task: Task) -> CaseFigures:
        part = self.held_out if task.case.held_out else self.search
        scenario = self.scenario if space.reads_polls(task.table) else _without_polls(self.scenario)
        try:
            policy = parse_policy("candidate", task.table)
            return _measure(policy, part, scenario, task)
        except RolloutError as error:
            return CaseFigures(failed=str(error))

    @property
    def prompts_per_step(self) -> int:
        return self.scenario.job.prompts_per_step

    def setting(self, max_staleness: int) -> Setting:
        job, fleet, cost = self.scenario.job, self.scenario.fleet, self.scenario.cost
        return Setting(
            prompts_per_step=job.prompts_per_step,
            samples_per_prompt=job.samples_per_prompt,
            max_tokens=job.max_tokens,
            instances=fleet.instances,
            slots=fleet.instances * fleet.max_num_seqs,
            disaggregated=not self.scenario.trainer.colocated,
            multi_turn=any(len(sample.turns) > 1 for sample in self.search.samples()),
            max_staleness=max_staleness,
            context_s=max(cost.context_s, 1e-12),
            weights_tokens=max(1, round(cost.weights_s / max(cost.context_s, 1e-12))),
            prefill_tokens_per_s=round(1 / max(cost.token_s, 1e-9)),
            remembers=job.epochs > 1 or job.known_samples > 0,
            drifts=self.scenario.policy_drift.rejection_per_token > 0,
        )


def bench_of(trace: Trace, scenario: Scenario, *, seed: int) -> Bench:
    """The bench for a trace, cut in two by `seed`.

    A trace is not cut if it has recorded arrivals, or fewer prompts than each part needs for a
    step. Raises CallerError if something can never fit, or if there is no training.
    """
    if not scenario.job.batches:
        raise CallerError(
            f"scenario {scenario.name}: job.batches is false, so there is no training and "
            f"nothing to tune; set job.batches to true"
        )
    whole = Workload(trace, scenario.job, traffic=scenario.traffic)
    whole.check_fits(scenario)
    job = msgspec.structs.replace(
        scenario.job,
        prompts_per_step=whole.prompts_per_step,
        samples_per_prompt=whole.samples_per_prompt,
        max_tokens=whole.max_tokens,
    )
    scenario = msgspec.structs.replace(scenario, job=job)
    kept = round(len(trace.groups) * (1 - HELD_OUT))
    arrivals = any(sample.arrival_s for sample in trace.samples())
    if arrivals or len(trace.groups) - kept < job.prompts_per_step:
        return Bench(trace, trace, scenario, split=False)
    prompts = list(trace.groups)
    random.Random(f"{seed}/prompts").shuffle(prompts)
    search, held_out = set(prompts[:kept]), set(prompts[kept:])
    return Bench(_part(trace, search), _part(trace, held_out), scenario, split=True)


def _part(trace: Trace, prompts: set[str]) -> Trace:
    """These prompts of the trace, in its order."""
    groups = {name: of for name, of in trace.groups.items() if name in prompts}
    return msgspec.structs.replace(trace, groups=groups)


def lasting(part: Trace, prompts: int, seed: int) -> Trace:
    """`prompts` prompts of the part, drawn by `seed`; all of them before any is repeated.

    A repeated prompt gets another name, so that a history of prompts does not contain what the
    user's job, with its number of epochs, would not have put there.
    """
    names = list(part.groups)
    random.Random(f"{seed}/order").shuffle(names)
    groups: dict[str, list[SampleRecord]] = {}
    for number in range(prompts):
        again, at = divmod(number, len(names))
        name = names[at]
        members = part.groups[name]
        if again:
            name = f"{name} again {again}"
            members = [msgspec.structs.replace(sample, group=name) for sample in members]
        groups[name] = members
    return msgspec.structs.replace(part, groups=groups)


def _without_polls(scenario: Scenario) -> Scenario:
    visibility = msgspec.structs.replace(scenario.visibility, poll_s=0.0)
    return msgspec.structs.replace(scenario, visibility=visibility)


def _measure(policy: PolicyFile, part: Trace, scenario: Scenario, task: Task) -> CaseFigures:
    job, case = scenario.job, task.case
    trace = part
    if not any(sample.arrival_s for sample in part.samples()):
        trace = lasting(part, ceil(case.steps * job.prompts_per_step / job.epochs), case.seed)
    run = run_policy(
        policy, trace, scenario, steps=case.steps, seed=case.seed, give_up_s=task.give_up_s
    )
    return figures(run)


def figures(run: Run) -> CaseFigures:
    """The figures that limits are checked on."""
    summary = run.summary
    bias = summary.length_bias
    trained = summary.accepted_tokens_per_s * summary.total_s
    return CaseFigures(
        tokens_per_s=summary.equal_length_tokens_per_s,
        total_s=summary.total_s,
        staleness_max=summary.staleness_max,
        staleness_mean=summary.staleness_mean,
        length_ratio=bias.mean_ratio,
        longest_kept=bias.longest_tenth_kept,
        step_bias=bias.step_ks_excess,
        discarded=share(summary.discarded_tokens, trained),
    )
