"""Lower bounds on the time that a fleet needs to generate given samples, under any scheduler.

The cost of one engine step that processes n tokens, decodes B sequences whose contexts add up
to C tokens and prefills chunks of attention work A is (`instance/model.py`)

    t = t0 + G(n) + c_b B + k C + a A,      G(n) = (w(n)^p + (s n)^p)^(1/p),  p >= 1.

w(n) = t_w for a dense model. It grows with n, and is concave, for a mixture of experts.

Facts that hold under every policy (routing, preemption, interruption, migration, prefix
sharing, over-sampling, early stopping) as long as each step makes at most one token per sequence:

 1. Every generated token is made in some step and counts at least 1 in that step's n, whether a
    decode or the last chunk of a prefill made it. So sum(n) >= O, the tokens to generate.
 2. The first token of a turn comes out of its prefill and pays neither c_b nor k. Every other
    token of the turn is a decode: i-th token (i >= 2) of a turn that starts at context P reads
    at least P + i - 2 tokens. (It reads one more when the incoming token is counted; leaving
    that out keeps the bound valid for either convention.) Over o tokens that is o - 1 decodes
    and (o - 1) P + (o - 1)(o - 2) / 2 tokens read.
 3. A *restart*, a prefill in the middle of a turn (preemption, migration, resumption without the
    KV), also makes a token without c_b and k. Each restart therefore takes back at most
    c_b + k (longest context). `restarts` counts them; KV kept across a pause is no restart.
 4. A sequence that makes a token holds its whole context in KV. Siblings of a group may share
    the prompt p: of n siblings running in one instance, the prompt is there at least once, which
    is at least p / n for each of them. The rest of the context is private.

`longest`: the tokens of one sample are made one after the other, each in a step of its own
    that costs at least t0 + G(1), plus decode costs (2) and the sample's tool time.

`joint`: let S be the number of steps of all instances together. A step makes at most
    Bmax tokens, Bmax = min(max_num_seqs, max_num_batched_tokens), so S >= O / Bmax. The contexts
    of a step fit into K tokens of KV, so S >= Omega / K with Omega the sum of (4) over generated
    tokens. One sample makes its tokens in different steps, so S >= o_max. A step that makes n
    tokens, 1 <= n <= Bmax, takes at least G(n), and w(n) is at least its chord u + v n from 1 to
    Bmax (v = 0 for a dense model). With the chord G is convex, hence by Jensen and (1) the sum of
    G(n) is at least ((u S + v O)^p + (s O)^p)^(1/p), which grows with S. All instances together
    work at most N T in a makespan T, so

        T >= [ S t0 + ((u S + v O)^p + (s O)^p)^(1/p) + c_b D + k Phi ] / N

    with the D decodes and Phi tokens read of (2), at the smallest allowed S.

`rounds`: at staleness 0 a batch consists of tokens of one version, and this version does not exist
    before the previous batch has been trained. So the rounds, from a version's arrival to the
    delivery of its batch's last group, do not overlap. A round takes at least what `longest` gives
    for any sample of its batch, whatever else is started, discarded or delivered early in between.
    Let m_1 >= m_2 >= ... be the time of each group's longest sample; at most B groups make a
    batch. Sort the batches by their longest group: the j - 1 first hold at most (j - 1) B groups,
    so one of the (j - 1) B + 1 longest groups is in the j-th or a later one, and the j-th takes at
    least m_((j - 1) B + 1). Hence

        sum of the rounds >= m_1 + m_(B + 1) + m_(2 B + 1) + ...

    which is the time of batches of similar lengths, longest first. Each of R restarts belongs to
    one sample of one round, so together they take back at most R (c_b + k (longest context)), and
    none takes a sample below its bare steps. The bound holds for tokens that are generated under
    the version they are trained with, not for a scheduler that lets new weights accept old tokens.

Left out, which loosens the bounds but keeps them valid: prefill work, the cost of accepting a
request, arrival times, pauses for weight updates (add one pause for every update that must stop the
fleet), padding of batches. Instances that draft tokens make steps of one token per sequence too, of
at least `Scenario.least_cost`. Both bounds assume identical instances; for a mixed fleet give the
best of each number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from rollout_sched.simulators.instance import CostModel
from rollout_sched.simulators.replay.scenario import FleetModel, Scenario
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import SampleRecord

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Floating-point sums of a replay and of these formulas differ in the last digits; a bound that
# is met exactly must not be "beaten" by them.
_ROUNDING = 1e-9


class Bound(msgspec.Struct, frozen=True):
    """Seconds that no schedule can beat: total_s is the larger of the other two."""

    longest_s: float
    joint_s: float
    total_s: float


@dataclass(frozen=True)
class Demand:
    """The tokens to generate, one row per turn (or part of one).

    sample: which sample the row belongs to, 0..samples-1 [rows]
    context: tokens before the row's first generated token [rows]
    output: tokens to generate, at least 1 [rows]
    private: tokens of that context certainly in KV for this sample alone, prompts amortised [rows]
    tool_s: seconds between turns [samples]
    group: which group it belongs to, from 0 in order of appearance [samples]
    """

    sample: Ints
    context: Floats
    output: Floats
    private: Floats
    tool_s: Floats
    group: Ints

    @classmethod
    def of_samples(cls, samples: Iterable[SampleRecord]) -> Demand:
        """The whole of the given samples; equal group names may share their prompts."""
        listed = list(samples)
        if not listed:
            return cls.of_parts([], [])
        counts = np.array([len(s.turns) for s in listed], dtype=np.int64)
        turns = list(chain.from_iterable([s.turns for s in listed]))
        owner = np.repeat(np.arange(len(listed)), counts)
        last = np.cumsum(counts) - 1
        output = np.array([t.output_tokens for t in turns], dtype=np.float64)
        heard = np.array([t.observation_tokens for t in turns], dtype=np.float64)
        waited = np.array([t.tool_s for t in turns], dtype=np.float64)
        heard[last] = waited[last] = 0.0
        prompt = np.array([s.prompt_tokens for s in listed], dtype=np.float64)
        grown = np.cumsum(output + heard) - output - heard
        # Tokens of the sample's own earlier turns: the tokens before this turn, minus those before
        # the sample.
        own = grown - np.repeat(grown[last - counts + 1], counts)
        group = _numbers([s.group for s in listed])
        siblings = np.bincount(group).astype(np.float64)[group]
        private = own + (prompt / siblings)[owner]
        return cls(owner, prompt[owner] + own, output, private, _per_sample(owner, waited), group)

    @classmethod
    def joined(cls, parts: Sequence[Demand]) -> Demand:
        """All parts together; no group may be in more than one."""
        if not parts:
            return cls.of_parts([], [])
        samples = np.cumsum([0, *(len(part.tool_s) for part in parts)])[:-1]
        groups = np.cumsum([0, *(part.group.max(initial=-1) + 1 for part in parts)])[:-1]
        return cls(
            sample=np.concatenate([p.sample + n for p, n in zip(parts, samples, strict=True)]),
            group=np.concatenate([p.group + n for p, n in zip(parts, groups, strict=True)]),
            **{
                name: np.concatenate([getattr(part, name) for part in parts])
                for name in ("context", "output", "private", "tool_s")
            },
        )

    @property
    def tokens(self) -> Floats:
        """Prompt and response tokens of each sample."""
        starts = np.flatnonzero(np.diff(self.sample, prepend=-1))
        return self.context[starts] + _per_sample(self.sample, self.output)

    @property
    def without_tools(self) -> Demand:
        return replace(self, tool_s=np.zeros_like(self.tool_s))

    @classmethod
    def of_parts(
        cls, context: npt.ArrayLike, output: npt.ArrayLike, private: npt.ArrayLike = 0.0
    ) -> Demand:
        """One uninterrupted part per sample, for example what was generated within a step.

        context: tokens before the part; output: tokens generated in it, at least 1;
        private: tokens of the context that no other sample shares, 0 if unknown. Shapes [samples].
        Raises ValueError for an impossible length.
        """
        before = np.asarray(context, dtype=np.float64)
        made = np.asarray(output, dtype=np.float64)
        alone = np.broadcast_to(np.asarray(private, dtype=np.float64), made.shape)
        if before.ndim != 1 or before.shape != made.shape:
            raise ValueError(f"context and output have shapes {before.shape} and {made.shape}")
        if not (np.all(before >= 0) and np.all(made >= 1)):
            raise ValueError("expected contexts of at least 0 and outputs of at least 1 token")
        if not np.all((alone >= 0) & (alone <= before)):
            raise ValueError("private tokens are part of the context: expected 0 to context")
        each = np.arange(len(made))
        return cls(each, before, made, alone, np.zeros(len(made)), each)


def lower_bound(
    samples: Demand | Iterable[SampleRecord], fleet: FleetModel, cost: CostModel, restarts: int = 0
) -> Bound:
    """The minimum seconds that any policy needs to generate the samples on the fleet.

    restarts: the prefills in the middle of a turn that the policy may have, over all samples. 0
    bounds every policy that never recomputes; the number that a run had bounds that run.
    """
    demand = samples if isinstance(samples, Demand) else Demand.of_samples(samples)
    longest_s = longest(demand, cost, restarts)
    joint_s = joint(demand, fleet, cost, restarts)
    return Bound(longest_s, joint_s, max(longest_s, joint_s))


def longest(demand: Demand, cost: CostModel, restarts: int = 0) -> float:
    """Seconds the most demanding sample takes alone on an instance; 0 without samples."""
    if not len(demand.sample):
        return 0.0
    return float(_alone(demand, cost, restarts).max()) * (1 - _ROUNDING)


def rounds(
    demand: Demand,
    groups_per_round: int,
    cost: CostModel,
    restarts: int = 0,
    trained_s_per_token: float = 0.0,
) -> float:
    """Seconds of all rounds together at staleness 0; 0 without samples.

    A round has at most `groups_per_round` groups. trained_s_per_token: a round also includes the
    time to train a group after the group's last token; prompt tokens count too.
    """
    if not len(demand.sample):
        return 0.0
    trained = trained_s_per_token * np.bincount(demand.group, demand.tokens)

    def best_rounds(alone: Floats) -> float:
        taken = np.zeros(len(trained))
        np.maximum.at(taken, demand.group, alone)
        return float(np.sort(taken + trained)[::-1][::groups_per_round].sum())

    spared = restarts * _saved_by_restart(demand, cost)
    together = best_rounds(_alone(demand, cost)) - spared
    each = best_rounds(_alone(demand, cost, restarts)) if restarts else 0.0
    return max(together, each) * (1 - _ROUNDING)


def joint(demand: Demand, fleet: FleetModel, cost: CostModel, restarts: int = 0) -> float:
    """Seconds that the work takes when slots and KV are filled as well as possible."""
    if not len(demand.sample):
        return 0.0
    tokens = float(demand.output.sum())
    steps = _fewest_steps(demand, fleet)
    decoding = float((cost.sequence_s * _decodes(demand) + cost.context_s * _reads(demand)).sum())
    beyond = max(0.0, decoding - restarts * _saved_by_restart(demand, cost))
    busy_s = steps * cost.step_s + _all_tokens_s(steps, tokens, _most(fleet), cost) + beyond
    return busy_s / fleet.instances * (1 - _ROUNDING)


def _fewest_steps(demand: Demand, fleet: FleetModel) -> float:
    """S: the engine steps of all instances together, by slots, KV and the longest sample."""
    o = demand.output
    private = float((o * demand.private + (o - 1) * np.maximum(o - 2, 0) / 2).sum())
    most = float(_per_sample(demand.sample, o).max())
    return max(float(o.sum()) / _most(fleet), private / fleet.kv_tokens, most)


def _most(fleet: FleetModel) -> int:
    """Bmax: the most tokens that one step makes."""
    return min(fleet.max_num_seqs, fleet.max_num_batched_tokens)


def _all_tokens_s(steps: float, tokens: float, most: int, cost: CostModel) -> float:
    """The minimum cost of `tokens` in `steps` steps of 1 to `most` of them, without the context
    cost."""
    p, one_s = cost.exponent, cost.read_s(1)
    slope = (cost.read_s(most) - one_s) / (most - 1) if most > 1 else 0.0
    weights, work = (one_s - slope) * steps + slope * tokens, tokens * cost.token_s
    return float((weights**p + work**p) ** (1 / p))


def _alone(demand: Demand, cost: CostModel, restarts: int = 0) -> Floats:
    """Seconds that each sample takes alone on an instance, if all restarts are its own."""
    made = _per_sample(demand.sample, demand.output)
    decoding = cost.sequence_s * _decodes(demand) + cost.context_s * _reads(demand)
    spared = restarts * _saved_by_restart(demand, cost)
    beyond = np.maximum(_per_sample(demand.sample, decoding) - spared, 0.0)
    return made * (cost.step_s + _all_tokens_s(1.0, 1.0, 1, cost)) + beyond + demand.tool_s


def _decodes(demand: Demand) -> Floats:
    return demand.output - 1


def _reads(demand: Demand) -> Floats:
    """Phi per row: context tokens read by its decodes."""
    o = demand.output
    return (o - 1) * (demand.context + np.maximum(o - 2, 0) / 2)


def _saved_by_restart(demand: Demand, cost: CostModel) -> float:
    """The most that one restart can save: the decode cost of one token at the longest context."""
    return cost.sequence_s + cost.context_s * float((demand.context + demand.output).max())


def _per_sample(owner: Ints, values: Floats) -> Floats:
    return np.bincount(owner, values).astype(np.float64)


def _numbers(groups: list[str]) -> Ints:
    """For every sample, the number of its group, from 0 in order of appearance."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return np.array([numbers[group] for group in groups], dtype=np.int64)


# ------------------------------------------------------------------------------------------
# Lower bounds on the time of a run: generation and training together, on a scenario's fleet.
#
# `bounds.py` bounds the generation alone. This file adds the trainer, and the pauses for weight
# transfers if every batch needs weights of its own.


class OnPolicyBound(msgspec.Struct, frozen=True):
    """Seconds that no run at staleness 0 can beat.

    whole_batches_s  if the trainer begins a step when its batch is whole
    parts_s          if the trainer takes groups as they become whole, on its own GPUs or on some of
                     the fleet's
    """

    whole_batches_s: float
    parts_s: float

    def seconds(self, *, in_parts: bool) -> float:
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
    fleet, cost, trainer = scenario.fleet, scenario.least_cost, scenario.trainer
    rollout_s = lower_bound(demand, fleet, cost, restarts).total_s
    training_s = _training_s(demand, batches, scenario)
    if trainer.colocated:
        generation = lower_bound(demand.without_tools, fleet, cost, restarts)
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
    that the trainer leaves on shared GPUs.
    """
    if not batches:
        return OnPolicyBound(0.0, 0.0)
    trainer = scenario.trainer
    work_s = joint(demand, scenario.fleet, scenario.least_cost, restarts)
    training_s = _training_s(demand, batches, scenario)
    updates_s = (batches - 1) * scenario.least_update_s
    alone_s = rounds(demand, groups_per_batch, scenario.least_cost, restarts)
    trained_s = rounds(
        demand, groups_per_batch, scenario.least_cost, restarts, trainer.seconds_per_token
    )
    ends_s = batches * trainer.fixed_s
    busy_s = training_s + work_s if trainer.colocated else max(training_s, ends_s + work_s)
    return OnPolicyBound(
        whole_batches_s=updates_s + training_s + max(alone_s, work_s),
        parts_s=updates_s + max(ends_s + trained_s, busy_s),
    )


def _batches(workload: Workload) -> int:
    return -(-len(workload.groups) // workload.prompts_per_step)


def _training_s(demand: Demand, batches: int, scenario: Scenario) -> float:
    trainer = scenario.trainer
    return batches * trainer.fixed_s + trainer.seconds_per_token * int(demand.tokens.sum())
