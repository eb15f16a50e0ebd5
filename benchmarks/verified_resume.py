"""The benefit of verified resume, by how fast the policy drifts:
`python benchmarks/verified_resume.py [--quick]`.

For maths traces on the shipped 7B scenario, at staleness 0: rounds that start more prompts than a
batch takes. Requests that are unfinished when the batch is full start over, or are verified in the
next round. Both run the same prompts; times are means over the seeds.

Two upper limits are shown too. Suppose that every sample had a draft of all its tokens at no cost.
A sample of L tokens, of which the test passes K, would still have to make L - K under the weights
that it is delivered with. "bound" is by how much that lowers the bound that no scheduler can beat
at staleness 0; "all free" is by how much it shortens the rounds that start over. With a rejection
per token of h the mean of K is below 1 / h, however long the sample is, so long samples gain
little.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import mean
from typing import Any

import msgspec

from rollout_sched.config import PolicyFile, parse_policy
from rollout_sched.core.model.actions import Dispatch
from rollout_sched.simulators.replay import Scenario, Workload, load_scenario
from rollout_sched.simulators.replay.bounds import offered_on_policy_bound
from rollout_sched.simulators.replay.runs import Run, run_policy
from rollout_sched.simulators.replay.scenario import PolicyDrift
from rollout_sched.simulators.traces import read
from rollout_sched.simulators.traces.model import SampleRecord, Trace, Turn

TRACES = ("lrm_token_economy", "composite_math_512x8")
SCENARIO = "qwen7b-8xh100"
OVER_PROMPTS = (1.25, 1.5)
HAZARDS = (0.0, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
STEPS = 8


def policy(over_prompts: float, interruption: dict[str, Any]) -> PolicyFile:
    return parse_policy(
        "rounds",
        {
            "batching": {"use": "sync", "over_prompts": over_prompts},
            "interruption": interruption,
            "weights": {"use": "all_at_once", "when": "between_batches"},
        },
    )


def runs(
    trace: Trace, scenario: Scenario, over_prompts: float, seeds: int, hazard: float | None
) -> list[Run]:
    """The runs of each seed; without a hazard unfinished requests start over."""
    interruption: dict[str, Any] = {"use": "none"}
    if hazard is not None:
        interruption = {"use": "partial", "kv": "verify"}
        scenario = msgspec.structs.replace(scenario, policy_drift=PolicyDrift(hazard))
    chosen = policy(over_prompts, interruption)
    return [run_policy(chosen, trace, scenario, steps=STEPS, seed=seed) for seed in range(seeds)]


def all_free(trace: Trace, scenario: Scenario, hazard: float) -> tuple[Trace, Scenario]:
    """What is left to make if every sample had a draft of everything: at least one token. Training
    takes as long as before."""
    drift = PolicyDrift(hazard)

    def rest(sample: SampleRecord) -> SampleRecord:
        draft = ((0, sample.response_tokens - 1),)
        dispatch = Dispatch(f"{sample.group}/{sample.sample}", 0, "", 1, 1, 1, draft=draft)
        tokens = sample.response_tokens - drift.kept(dispatch, 0, seed=0)
        return msgspec.structs.replace(sample, turns=(Turn(tokens),))

    left = {name: [rest(sample) for sample in group] for name, group in trace.groups.items()}
    shorter, trainer = Trace(trace.name, left), scenario.trainer
    per_token = trainer.seconds_per_token * trained_tokens(trace) / trained_tokens(shorter)
    trainer = msgspec.structs.replace(trainer, seconds_per_token=per_token)
    return shorter, msgspec.structs.replace(scenario, trainer=trainer)


def trained_tokens(trace: Trace) -> int:
    return sum(sample.prompt_tokens + sample.response_tokens for sample in trace.samples())


def bound_s(trace: Trace, scenario: Scenario) -> float:
    workload = Workload(trace, scenario.job, steps=STEPS)
    return offered_on_policy_bound(workload, scenario).whole_batches_s


def report(name: str, seeds: int) -> None:
    trace, scenario = read(name), load_scenario(SCENARIO)
    length = mean(sample.response_tokens for sample in trace.samples())
    print(f"\n{name}, {STEPS} steps; {length:,.0f} tokens a sample on average")
    heads = "".join(f"{f'over {over:g}':>13}{'all free':>10}" for over in OVER_PROMPTS)
    print(f"{'rejection':>10}{'bound':>9}{heads}")
    base = {over: total_s(runs(trace, scenario, over, seeds, None)) for over in OVER_PROMPTS}
    bound = bound_s(trace, scenario)
    for hazard in HAZARDS:
        shorter, same_training = all_free(trace, scenario, hazard)
        line = f"{hazard:>10.3%}{bound / bound_s(shorter, same_training):>8.2f}x"
        for over in OVER_PROMPTS:
            verified = total_s(runs(trace, scenario, over, seeds, hazard))
            free = total_s(runs(shorter, same_training, over, seeds, None))
            line += f"{base[over] / verified:>12.2f}x{base[over] / free:>9.2f}x"
        print(line, flush=True)


def total_s(found: Sequence[Run]) -> float:
    return mean(run.summary.total_s for run in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed instead of three")
    options = parser.parse_args()
    print("Time when starting over, divided by time with verified resume: more is better.")
    for name in TRACES:
        report(name, 1 if options.quick else 3)


if __name__ == "__main__":
    main()
