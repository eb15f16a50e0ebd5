"""The user's limits, and the measured figures of a candidate."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, inf
from statistics import stdev
from typing import Annotated, Any, TypeVar

import msgspec

from rollout_sched.config import PolicyFile, parse_policy
from rollout_sched.core.errors import CallerError, RolloutError
from rollout_sched.core.model.records import Count
from rollout_sched.flags import Flag
from rollout_sched.metrics.fold import mean, share, t95
from rollout_sched.simulators.replay import Scenario, Workload
from rollout_sched.simulators.replay.runs import Run, run_policy
from rollout_sched.simulators.traces.lengths import LengthModel
from rollout_sched.simulators.traces.model import SampleRecord, Trace, resampled
from rollout_sched.simulators.tune import space
from rollout_sched.simulators.tune.candidates import Candidate
from rollout_sched.simulators.tune.space import Setting


class CaseFigures(msgspec.Struct, frozen=True):
    """One candidate in one case.

    tokens_per_s   accepted tokens per second, of the whole run, at equal trained length
    total_s        seconds of the run
    staleness_max, staleness_mean  of the samples, versions
    length_ratio   mean length trained over offered
    longest_kept   share of the longest tenth of the offered samples that was trained
    step_bias      mean over the steps of the distance between a step's lengths and all offered,
                   beyond that of randomly drawn steps (Kolmogorov-Smirnov)
    discarded      tokens thrown away over tokens trained
    failed         why there are no figures, else empty
    """

    tokens_per_s: float = 0.0
    total_s: float = 0.0
    staleness_max: int = 0
    staleness_mean: float = 0.0
    length_ratio: float = 1.0
    longest_kept: float = 1.0
    step_bias: float = 0.0
    discarded: float = 0.0
    failed: str = ""

    @property
    def length_bias(self) -> float:
        """The larger of two: the mean's distance from 1, and half of the missing share of the
        longest tenth. Half, because a cut of the tail is a larger share of the tail than of the
        mean."""
        return max(abs(1 - self.length_ratio), (1 - self.longest_kept) / 2)


class HardLimits(msgspec.Struct, frozen=True):
    """Hard limits: a candidate that exceeds one never wins.

    max_staleness    of any sample, versions
    max_length_bias  over the run the mean length trained is within 1 - B and 1 + B of that offered,
                     and of the longest tenth of the samples at least 1 - 2 B are trained
    max_step_bias    how far, on average, a step's lengths may differ from those of all prompts,
                     beyond chance (Kolmogorov-Smirnov)
    """

    max_staleness: Annotated[Count, Flag(metavar="K")]
    max_length_bias: Annotated[float, msgspec.Meta(ge=0, le=1), Flag(metavar="B")] = 0.01
    max_step_bias: Annotated[float, msgspec.Meta(ge=0, le=1), Flag(metavar="C")] = 0.1

    def tightened(self, share: float) -> HardLimits:
        """The limits with bias reduced by `share`; staleness does not depend on chance."""
        return HardLimits(
            self.max_staleness,
            (1 - share) * self.max_length_bias,
            (1 - share) * self.max_step_bias,
        )

    def exceeded(self, figures: CaseFigures) -> list[str]:
        """Which limits the figures exceed, in words; empty if none."""
        if figures.failed:
            return [figures.failed]
        found = []
        if figures.staleness_max > self.max_staleness:
            found.append(f"staleness {figures.staleness_max} above {self.max_staleness}")
        for said, value, limit in (
            ("length bias", figures.length_bias, self.max_length_bias),
            ("step bias", figures.step_bias, self.max_step_bias),
        ):
            if value > limit + 1e-9:
                found.append(f"{said} {value:.3f} above {limit:g}")
        return found

    def excess(self, figures: CaseFigures) -> float:
        """By how much the figures exceed all limits together; 0 if none."""
        return (
            max(0, figures.staleness_max - self.max_staleness)
            + max(0.0, figures.length_bias - self.max_length_bias)
            + max(0.0, figures.step_bias - self.max_step_bias)
        )


def together(figures: Sequence[CaseFigures]) -> CaseFigures:
    """Means over cases, of staleness the maximum. Failed if it failed in any case."""
    for one in figures:
        if one.failed:
            return one
    means: dict[str, Any] = {
        name: mean([getattr(one, name) for one in figures])
        for name in CaseFigures.__struct_fields__
        if name not in ("staleness_max", "failed")
    }
    return CaseFigures(staleness_max=max(one.staleness_max for one in figures), **means)


# ------------------------------------------------------------------------------------------
# Paired comparison: two candidates on the same prompts in the same order, case by case.
#
# Seeds differ more than candidates do; on common seeds this cancels out (common random numbers).
# Held-out cases also differ in their prompts, which are drawn with replacement. The interval is one
# for the next run: it contains what another draw of prompts in another order would give.

#: The half width for a single case, as a share, because its spread is unknown.
_ONE_CASE = 0.05

#: The most speed that is given up for a simpler policy, however large the spread.
_SIMPLER = 0.02

Contender = TypeVar("Contender")


class SpeedUp(msgspec.Struct, frozen=True):
    """The geometric mean of ratios, and the 95 % interval of the next one."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def speed_up(some: Sequence[CaseFigures], others: Sequence[CaseFigures]) -> SpeedUp:
    """The ratio of accepted tokens per second, case by case; both need figures for every case."""
    logs = [
        math.log(one.tokens_per_s / other.tokens_per_s)
        for one, other in zip(some, others, strict=True)
    ]
    middle = mean(logs)
    half = _half_width(logs)
    return SpeedUp(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def _half_width(logs: Sequence[float]) -> float:
    count = len(logs)
    if count < 2:
        return math.log1p(_ONE_CASE)
    return t95(count) * stdev(logs) * math.sqrt(1 + 1 / count)


def simplest_of_the_best(
    contenders: Sequence[Contender],
    against: Callable[[Contender, Contender], SpeedUp],
    departures: Callable[[Contender], int],
) -> Contender:
    """The fastest, unless a simpler one is slower by no more than the spread, and by 2 % at most.

    The one-standard-error rule of Breiman et al. (Classification and Regression Trees, 1984), on
    paired differences. Among equally simple ones the faster wins. `contenders`: at least one.
    """
    first = contenders[0]
    speed = {id(one): against(one, first).mean for one in contenders}
    fastest = max(contenders, key=lambda one: speed[id(one)])
    level = []
    for one in contenders:
        ahead = against(fastest, one)
        if ahead.low <= 1.0 and ahead.mean <= 1 + _SIMPLER:
            level.append(one)
    return min(level, key=lambda one: (departures(one), -speed[id(one)]))


# ------------------------------------------------------------------------------------------
# Evaluate one candidate in one case by a replay; this runs in a worker process.

#: The share of the prompts that is held out of the search.
HELD_OUT = 1 / 3


class Case(msgspec.Struct, frozen=True):
    """A number of training steps of one part of the prompts, in the order of a seed; `held_out`: of
    the other part, of whose prompts the seed draws as many with replacement."""

    steps: int
    seed: int
    held_out: bool = False


class Task(msgspec.Struct, frozen=True):
    """One task for a worker process; a run of more than `give_up_s` is a failure."""

    table: Mapping[str, Mapping[str, Any]]
    case: Case
    give_up_s: float = inf


class Evaluator(msgspec.Struct, frozen=True):
    """What candidates are evaluated on: two parts of a trace, the lengths of all of it, and a
    scenario whose job is explicit, so that a part is trained like the whole.

    `split`: the parts have different prompts; else the trace has too few, and both are the whole.
    """

    search: Trace
    held_out: Trace
    lengths: LengthModel
    scenario: Scenario
    split: bool

    def __call__(self, task: Task) -> CaseFigures:
        part = self.held_out if task.case.held_out else self.search
        scenario = self.scenario if space.reads_polls(task.table) else _without_polls(self.scenario)
        try:
            policy = parse_policy("candidate", task.table)
            return _measure(policy, part, self.lengths, scenario, task)
        except RolloutError as error:
            return CaseFigures(failed=str(error))

    @property
    def prompts_per_step(self) -> int:
        return self.scenario.job.prompts_per_step

    def setting(self, max_staleness: int) -> Setting:
        job, fleet, cost = self.scenario.job, self.scenario.fleet, self.scenario.cost
        read_s = cost.read_s(fleet.max_num_seqs)
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
            weights_tokens=max(1, round(read_s / max(cost.context_s, 1e-12))),
            prefill_tokens_per_s=round(1 / max(cost.token_s, 1e-9)),
            remembers=job.epochs > 1 or job.known_samples > 0,
        )


def bench_of(trace: Trace, scenario: Scenario, *, seed: int) -> Evaluator:
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
    lengths = LengthModel(trace)
    kept = round(len(trace.groups) * (1 - HELD_OUT))
    arrivals = any(sample.arrival_s for sample in trace.samples())
    if arrivals or len(trace.groups) - kept < job.prompts_per_step:
        return Evaluator(trace, trace, lengths, scenario, split=False)
    prompts = list(trace.groups)
    random.Random(f"{seed}/prompts").shuffle(prompts)
    search, held_out = set(prompts[:kept]), set(prompts[kept:])
    parts = _part(trace, search), _part(trace, held_out)
    return Evaluator(*parts, lengths, scenario, split=True)


def _part(trace: Trace, prompts: set[str]) -> Trace:
    """The trace with these prompts only, in its order."""
    groups = {name: of for name, of in trace.groups.items() if name in prompts}
    return msgspec.structs.replace(trace, groups=groups)


def lasting(part: Trace, prompts: int, seed: int) -> Trace:
    """`prompts` prompts of the part, drawn by `seed`; all of them before any is repeated.

    A repeated prompt gets another name, so that a history of prompts does not contain what the
    user's job, with its number of epochs, would not have added.
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


def _measure(
    policy: PolicyFile, part: Trace, lengths: LengthModel, scenario: Scenario, task: Task
) -> CaseFigures:
    job, case = scenario.job, task.case
    trace = part
    if not any(sample.arrival_s for sample in part.samples()):
        drawn = resampled(part, case.seed) if case.held_out else part
        trace = lasting(drawn, ceil(case.steps * job.prompts_per_step / job.epochs), case.seed)
    run = run_policy(
        policy,
        trace,
        scenario,
        steps=case.steps,
        seed=case.seed,
        lengths=lengths,
        give_up_s=task.give_up_s,
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


# ------------------------------------------------------------------------------------------
# The book of measurements: every candidate in every case, measured once.

#: A run is given up when it takes this many times as long as the reference.
_TIMES = 2.0

#: Evaluates tasks in their order; ends early when the time is over.
Ask = Callable[[Sequence[Task]], Iterator[CaseFigures]]


class BudgetSpent(Exception):
    """The budget is used up; the book keeps what was measured before."""


class ResultCache:
    """Figures by candidate and case. `evaluations`: how many may be measured, None for no limit.

    Its content does not depend on how evaluations are spread over processes: answers come in the
    order of the tasks, and answers after the first missing one are dropped. The reference is
    measured first: a run that takes `_TIMES` as long can never win, and may never end.
    """

    def __init__(
        self, ask: Ask, reference: Candidate | None = None, evaluations: int | None = None
    ) -> None:
        self._ask = ask
        self.reference = reference
        self._left = evaluations
        self._figures: dict[tuple[str, Case], CaseFigures] = {}
        self.candidates: dict[str, Candidate] = {}

    def __len__(self) -> int:
        return len(self._figures)

    def __contains__(self, candidate: Candidate) -> bool:
        return candidate.key in self.candidates

    def measure(self, candidates: Sequence[Candidate], cases: Sequence[Case]) -> None:
        """Measure what is not measured yet, case by case. Raises BudgetSpent if the budget ends
        first."""
        if self.reference is not None:
            self._measure([(self.reference, case) for case in cases])
        self._measure([(candidate, case) for case in cases for candidate in candidates])

    def _measure(self, pairs: Sequence[tuple[Candidate, Case]]) -> None:
        wanted = {
            (candidate.key, case): candidate
            for candidate, case in pairs
            if (candidate.key, case) not in self._figures
        }
        granted = list(wanted.items())[: self._left]
        tasks = [Task(one.table, case, self._give_up_s(case)) for (_, case), one in granted]
        done = 0
        for figures in self._ask(tasks) if tasks else ():
            (key, case), candidate = granted[done]
            self._figures[key, case] = figures
            self.candidates.setdefault(key, candidate)
            done += 1
            if self._left is not None:
                self._left -= 1
        if done < len(wanted):
            raise BudgetSpent

    def _give_up_s(self, case: Case) -> float:
        if self.reference is None:
            return math.inf
        known = self._figures.get((self.reference.key, case))
        return math.inf if known is None or known.failed else _TIMES * known.total_s

    def knows(self, candidate: Candidate, cases: Sequence[Case]) -> bool:
        return all((candidate.key, case) in self._figures for case in cases)

    def figures_of(self, candidate: Candidate, cases: Sequence[Case]) -> list[CaseFigures]:
        return [self._figures[candidate.key, case] for case in cases]

    def speed_up(self, one: Candidate, other: Candidate, cases: Sequence[Case]) -> SpeedUp:
        """How much faster `one` is than `other` in these cases, pair by pair."""
        return speed_up(self.figures_of(one, cases), self.figures_of(other, cases))
