"""Our presets on workloads and fleets that nobody tuned to: `make lab`.

Each case is drawn from its seed: the shape of the lengths, prompts and samples of a step, the
fleet, and whether the trainer has GPUs of its own. At each bound on staleness S our preset is
compared with the plain balancers and with every other preset that keeps the bound, on the same
prompts, in trained tokens per second at most as long as was offered. A policy is unbiased if its
run trains 0.99 of the offered length and 0.98 of the longest tenth, samples that start over being
drawn again.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import geometric_mean, stdev
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rollout_sched.config import PolicyFile, load_policy, shipped
from rollout_sched.core.errors import RolloutError
from rollout_sched.metrics.fold import t95
from rollout_sched.simulators.replay import Scenario, load_scenario
from rollout_sched.simulators.replay.comparison import LEAST_MEAN_RATIO, LEAST_TENTH_KEPT
from rollout_sched.simulators.replay.faults import Slow
from rollout_sched.simulators.replay.runs import run_policy
from rollout_sched.simulators.traces.model import SampleRecord, Trace, Turn

STEPS = 24
#: Samples of a step, at most, so that a case takes minutes at most.
MOST_SAMPLES = 1024
CAP = 32_768
OURS = {0: "best_on_policy", 1: "best_async", 4: "best_async"}
PLAIN = ("round_robin_sync", "dplb")

Lengths = Callable[[np.random.Generator, int, int], npt.NDArray[np.float64]]


def _two_levels(median: float, between: float, within: float) -> Lengths:
    """Log-normal: samples of one prompt are alike where `between` is above `within`."""

    def lengths(rng: np.random.Generator, groups: int, samples: int) -> npt.NDArray[np.float64]:
        effects = rng.normal(0.0, between, (groups, 1))
        return median * np.exp(effects + rng.normal(0.0, within, (groups, samples)))

    return lengths


def _pareto(rng: np.random.Generator, groups: int, samples: int) -> npt.NDArray[np.float64]:
    return 700.0 * (1.0 + rng.pareto(1.4, (groups, samples)))


def _runaways(rng: np.random.Generator, groups: int, samples: int) -> npt.NDArray[np.float64]:
    lengths = _two_levels(1500.0, 0.4, 0.3)(rng, groups, samples)
    return np.where(rng.random((groups, samples)) < 0.01, float(CAP), lengths)


def _drift(rng: np.random.Generator, groups: int, samples: int) -> npt.NDArray[np.float64]:
    """Lengths triple over the run, as they do while a model learns to reason."""
    return _two_levels(1500.0, 0.6, 0.5)(rng, groups, samples) * np.linspace(1, 3, groups)[:, None]


SHAPES: dict[str, Lengths] = {
    "light": _two_levels(1500.0, 0.4, 0.3),
    "heavy": _two_levels(3000.0, 0.8, 0.6),
    "independent": _two_levels(2500.0, 0.0, 0.9),
    "pareto": _pareto,
    "runaways": _runaways,
    "drift": _drift,
    "equal": _two_levels(2000.0, 0.0, 0.02),
    "agents": _two_levels(2000.0, 0.5, 0.6),
}


class Case(NamedTuple):
    """A workload of so many steps, and a fleet."""

    name: str
    trace: Trace
    scenario: Scenario


def case(seed: int, steps: int = STEPS) -> Case:
    """The case of this seed; seeds that follow each other take the shapes in turn."""
    rng = np.random.default_rng([32, seed])
    shape = list(SHAPES)[seed % len(SHAPES)]
    prompts = int(rng.choice([16, 32, 64, 128, 256]))
    most = MOST_SAMPLES // 4 if shape == "agents" else MOST_SAMPLES  # each has many requests
    samples = max(2, int(min(rng.choice([4, 8, 16, 32]), most // prompts)))
    model = rng.choice(["qwen7b-8xh100", "qwen32b-16xh100"])
    base = load_scenario(str(model) + str(rng.choice(["", "-disaggregated"])))
    instances = int(rng.choice([4, 8, 16, 32, 64]))
    fleet = msgspec.structs.replace(
        base.fleet,
        instances=instances,
        max_num_seqs=int(rng.choice([32, 64, 128, 256])),
        kv_tokens=round(float(np.exp(rng.uniform(math.log(51_000), math.log(1_030_000))))),
    )
    slow = range(instances // 4) if np.random.default_rng([33, seed]).random() < 0.25 else ()
    faults = tuple(Slow(at_s=0.0, instance=instance, factor=2.0) for instance in slow)
    # A larger fleet has a larger trainer, and a larger step takes longer.
    token_s = base.trainer.seconds_per_token * 8 / instances * float(rng.choice([0.3, 1.0]))
    trainer = msgspec.structs.replace(base.trainer, seconds_per_token=token_s)
    scenario = msgspec.structs.replace(base, fleet=fleet, trainer=trainer, faults=faults).with_job(
        {"prompts_per_step": prompts, "samples_per_prompt": samples}
    )
    trace = lab_trace(rng, shape, steps * prompts, samples)
    unlike = ", a quarter of it half as fast" if faults else ""
    name = (
        f"#{seed} {shape}, {prompts} x {samples}, {instances} x {fleet.max_num_seqs} slots of "
        f"{fleet.kv_tokens // 1000}k, {model}, {base.trainer.placement}{unlike}"
    )
    return Case(name, trace, scenario)


def lab_trace(rng: np.random.Generator, shape: str, groups: int, samples: int) -> Trace:
    lengths = np.clip(SHAPES[shape](rng, groups, samples), 1, CAP).astype(int).tolist()
    prompts = rng.integers(80, 500, groups).tolist()
    made: dict[str, list[SampleRecord]] = {}
    for number, row in enumerate(lengths):
        turns = [_calls(rng, n) if shape == "agents" else (Turn(n),) for n in row]
        made[str(number)] = [
            SampleRecord(
                str(number), i, prompts[number], each, finish="length" if n == CAP else "stop"
            )
            for i, (n, each) in enumerate(zip(row, turns, strict=True))
        ]
    return Trace(f"lab_{shape}", made, max_response_tokens=CAP)


def _calls(rng: np.random.Generator, tokens: int) -> tuple[Turn, ...]:
    """The response as turns of about 200 tokens, with tools between them."""
    count = int(min(max(1, tokens // 200), 30))
    seconds = rng.lognormal(0.0, 1.0, count).round(2).tolist()
    read = rng.integers(50, 400, count).tolist()
    turns = [Turn(tokens // count, o, s) for o, s in zip(read, seconds, strict=True)]
    return (*turns[:-1], Turn(tokens - tokens // count * (count - 1)))


# ------------------------------------------------------------------------------------------
# What our preset and others reach in a case.


class Reached(NamedTuple):
    """Trained tokens per second; 0 if the run failed. `unbiased`: it trained what was offered."""

    policy: str
    tokens_per_s: float
    unbiased: bool


def others(staleness: int) -> Iterator[PolicyFile]:
    """The presets but ours that bound the staleness of every sample, at `staleness` if they allow
    any; those that carry nothing over at 0 only, where they are alike at every bound."""
    for name in shipped("policies/presets"):
        policy = bounded(load_policy(name), staleness)
        if policy is not None and name not in (*OURS.values(), *PLAIN):
            yield policy


def bounded(policy: PolicyFile, staleness: int) -> PolicyFile | None:
    """The policy with this bound on staleness; None if it has none, or another."""
    freshness, parameters = policy.roles["freshness"]
    if freshness.__name__ != "Bounded":
        return None
    if bool(staleness) != bool(parameters.get("max_staleness", 0)):
        return None
    if not staleness:
        return policy
    roles = {**policy.roles, "freshness": (freshness, {**parameters, "max_staleness": staleness})}
    return msgspec.structs.replace(policy, roles=roles)


def reached(policy: PolicyFile, of: Case, steps: int) -> Reached:
    try:
        run = run_policy(policy, of.trace, of.scenario, steps=steps)
    except RolloutError:
        return Reached(policy.name, 0.0, False)
    bias = run.summary.length_bias
    unbiased = bias.mean_ratio >= LEAST_MEAN_RATIO and bias.longest_tenth_kept >= LEAST_TENTH_KEPT
    return Reached(policy.name, run.summary.equal_length_tokens_per_s, unbiased)


class Verdict(NamedTuple):
    """Ours over the best plain balancer, and over the best other unbiased policy."""

    case: str
    ours: Reached
    over_plain: float
    other: Reached
    over_other: float


def verdict(seed: int, staleness: int, steps: int) -> Verdict:
    of = case(seed, steps)
    policy = bounded(load_policy(OURS[staleness]), staleness)
    assert policy is not None
    ours = reached(policy, of, steps)
    plain = [reached(load_policy(name), of, steps) for name in PLAIN]
    found = [reached(other, of, steps) for other in others(staleness)]
    best = max([one for one in [*found, *plain] if one.unbiased], key=lambda one: one.tokens_per_s)
    most = max(one.tokens_per_s for one in plain)
    return Verdict(
        of.name, ours, ours.tokens_per_s / most, best, ours.tokens_per_s / best.tokens_per_s
    )


# ------------------------------------------------------------------------------------------
# The table.


def interval(ratios: Sequence[float]) -> str:
    """The geometric mean over cases, with its 95 % interval."""
    middle = geometric_mean(ratios)
    if len(ratios) < 2:
        return f"{middle:.2f}"
    half = t95(len(ratios)) * stdev([math.log(r) for r in ratios]) / math.sqrt(len(ratios))
    return f"{middle:.2f} ({middle / math.exp(half):.2f}-{middle * math.exp(half):.2f})"


def shown(staleness: int, verdicts: Sequence[Verdict], below: float = 0.98) -> Iterator[str]:
    plain, other = [v.over_plain for v in verdicts], [v.over_other for v in verdicts]
    biased = sum(not v.ours.unbiased for v in verdicts)
    yield (
        f"S = {staleness}, {OURS[staleness]}, {len(verdicts)} cases: over the best of "
        f"{' and '.join(PLAIN)} {interval(plain)}, least {min(plain):.2f}; over the best other "
        f"unbiased preset {interval(other)}, least {min(other):.2f}; biased in {biased}"
    )
    for v in verdicts:
        mark = "" if v.ours.unbiased else ", biased"
        if min(v.over_plain, v.over_other) < below or mark:
            yield f"  {v.over_plain:.2f} {v.over_other:.2f} ({v.other.policy}){mark}: {v.case}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first case")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--staleness", type=int, choices=OURS, action="append", help="only this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.cases)
    with ProcessPoolExecutor(options.jobs) as pool:
        for staleness in options.staleness or OURS:
            asked = [pool.submit(verdict, seed, staleness, options.steps) for seed in seeds]
            for line in shown(staleness, [each.result() for each in asked]):
                print(line, flush=True)


if __name__ == "__main__":
    main()
