"""Replay: run the same workload under several policies, each several times, and compute bounds."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollout_sched import journal
from rollout_sched.config import PolicyFile
from rollout_sched.core.model.actions import Action
from rollout_sched.core.model.events import Event
from rollout_sched.core.model.roles import Freshness
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.metrics import Metrics, Step, Summary
from rollout_sched.metrics.fold import Folded, share
from rollout_sched.metrics.live import WeightTimes
from rollout_sched.metrics.outages import DirectFigures, DirectFold, OutageFigures, OutageFold
from rollout_sched.page.run_page import RunFold, RunRecord
from rollout_sched.simulators.replay.bounds import (
    Demand,
    lower_bound,
    offered_bound,
    on_policy_bound,
    run_bound,
)
from rollout_sched.simulators.replay.closed_loop import ClosedLoop, Observer, Progress, RunNotes
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.lengths import LengthModel
from rollout_sched.simulators.traces.model import Trace, resampled
from rollout_sched.workers import WorkerPool


class WeightFigures(msgspec.Struct, frozen=True):
    """How new weights reached the instances.

    sync_s      from a publication until every instance has the weights, on average
    exposed_s   seconds a step for which an instance is stopped for them, on average
    sent_bytes  by the trainer, for each link of the network
    """

    sync_s: float
    exposed_s: float
    sent_bytes: dict[str, float]


class Run(msgspec.Struct):
    """One policy, one seed.

    `max_staleness` is what the policy allows, None if it has no limit. `bound_s` is a lower bound
    on `summary.total_s` for the samples that this run delivered, `offered_bound_s` for those that
    the trainer requested; both are 0 without training. `on_policy_bound_s` is the bound of this
    run's samples at staleness 0, None for a policy that allows more. `step_gaps`: how
    far each batch's span (first dispatch to delivery) is above the bound of its own samples.
    `weights` is set if updates take time, `direct` if the scenario has traffic, `outages` if it has
    faults, `record` if requested.
    """

    policy: str
    seed: int
    max_staleness: int | None
    summary: Summary
    steps: list[Step]
    bound_s: float
    offered_bound_s: float
    on_policy_bound_s: float | None
    step_gaps: list[float]
    samples_lost: int
    samples_drawn: int
    events: int
    anomalies: dict[str, int]
    weights: WeightFigures | None = None
    direct: DirectFigures | None = None
    outages: OutageFigures | None = None
    record: RunRecord | None = None

    @property
    def gap_to_bound(self) -> float | None:
        return self.summary.total_s / self.bound_s - 1 if self.bound_s else None

    @property
    def gap_to_offered_bound(self) -> float | None:
        return self.summary.total_s / self.offered_bound_s - 1 if self.offered_bound_s else None

    @property
    def gap_to_on_policy_bound(self) -> float | None:
        bound_s = self.on_policy_bound_s
        return self.summary.total_s / bound_s - 1 if bound_s else None

    @property
    def steps_needed(self) -> int:
        """With fewer steps, the figures measure mostly the first step and the drain."""
        staleness = self.max_staleness
        return 4 * (1 + (self.summary.staleness_max if staleness is None else staleness))


class Interrupted(Exception):
    """Ctrl-C came before all runs were finished.

    runs  those of the first policies that are complete, by policy and then by seed
    """

    def __init__(self, runs: list[list[Run]]) -> None:
        super().__init__("interrupted")
        self.runs = runs


@contextmanager
def _without_garbage_collector() -> Iterator[None]:
    """A run leaves no reference cycles, and looking for them takes a fifth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_garbage_collector()
def run_policy(
    policy: PolicyFile,
    trace: Trace,
    scenario: Scenario,
    *,
    steps: int = 0,
    seed: int = 0,
    lengths: LengthModel | None = None,
    progress: Progress | None = None,
    journal_path: Path | None = None,
    give_up_s: float = math.inf,
    records: bool = False,
) -> Run:
    """Replay `trace` under `policy` until every group is trained and every client has its answer or
    has disconnected.

    `steps` 0 takes the whole trace. `lengths`: see Workload. `records` keeps the data for the
    charts of a page. Raises CallerError before any work if something can never fit, PolicyError if
    the run is not finished after `give_up_s`.
    """
    workload = Workload(
        trace, scenario.job, steps=steps, seed=seed, lengths=lengths, traffic=scenario.traffic
    )

    def make_scheduler() -> Scheduler:
        return policy.scheduler(workload.prompts_per_step, seed=seed, lengths=workload.length)

    notes = RunNotes(policy.name, workload, progress, give_up_s)
    watch = _Watch(workload, scenario, notes, records=records)
    observers = watch.observers()
    with ExitStack() as stack:
        if journal_path is not None:
            header = journal.JournalHeader(
                journal.SCHEMA,
                policy.name,
                workload.prompts_per_step,
                seed=seed,
                tables=policy.tables,
            )
            writer = stack.enter_context(closing(journal.JournalWriter(journal_path, header)))
            observers.append(lambda now, event, actions: writer.record(now, event))
        watch.loop = ClosedLoop(
            make_scheduler(), workload, scenario, observers, successor=make_scheduler
        )
        total_s = watch.loop.run()
    return watch.run(policy.name, seed, total_s)


class _Watch:
    """All observers of one run. Set `loop` before the run begins."""

    loop: ClosedLoop

    def __init__(
        self, workload: Workload, scenario: Scenario, notes: RunNotes, *, records: bool
    ) -> None:
        self._workload = workload
        self._scenario = scenario
        self._notes = notes
        self._loads = WeightTimes()
        self._updates = scenario.least_update_s > 0 and len(workload.groups) > 0
        self._metrics = Metrics(
            reference_batch(workload, scenario),
            workload.offered,
            colocated=scenario.trainer.colocated,
            train_s_per_token=scenario.trainer.seconds_per_token,
            beside=[self._loads] if self._updates else [],
        )
        self._direct, self._outages = DirectFold(), OutageFold()
        self._drawn = RunFold(lambda: self.loop.scheduler.view.waiting) if records else None

    def observers(self) -> list[Observer]:
        scenario = self._scenario
        outlasted = scenario.traffic is not None and len(self._workload.groups) > 0
        measure = self._measure_training if outlasted else self._metrics.observe
        observers: list[Observer] = [measure, self._notes.observe]
        if scenario.traffic is not None or scenario.faults:
            observers.append(Folded(self._direct, self._outages).observe)
        if self._drawn is not None:
            observers.append(self._drawn.observe)
        return observers

    def run(self, policy: str, seed: int, total_s: float) -> Run:
        """The result, once the run is over."""
        workload, scenario, notes = self._workload, self._scenario, self._notes
        summary, steps = self._metrics.summary(total_s), self._metrics.steps
        restarts = summary.preemptions + summary.resumed_attempts
        demands = [Demand.of_samples(batch) for batch in notes.delivered]
        demand = Demand.joined(demands)
        outage, drawn = self._outages.figures(total_s), self._drawn
        fleet, cost = scenario.fleet, scenario.least_cost
        asked = len(workload.groups) - outage.failed_prompts - summary.filtered_groups
        return Run(
            policy=policy,
            seed=seed,
            max_staleness=staleness_bound(self.loop.scheduler.roles.freshness),
            summary=summary,
            steps=steps,
            bound_s=run_bound(demand, len(demands), scenario, restarts, in_parts=notes.in_parts),
            offered_bound_s=offered_bound(workload, scenario),
            on_policy_bound_s=self._on_policy_bound_s(demand, restarts),
            step_gaps=[
                step.span_s / lower_bound(demand, fleet, cost, restarts).total_s - 1
                for step, demand in zip(steps, demands, strict=True)
            ],
            samples_lost=asked * workload.samples_per_prompt - sum(map(len, notes.delivered)),
            samples_drawn=workload.drawn,
            events=notes.events,
            anomalies=self.loop.anomalies,
            weights=self._weights(len(steps)) if self._updates else None,
            direct=self._direct.figures() if scenario.traffic is not None else None,
            outages=outage if scenario.faults else None,
            record=None if drawn is None else drawn.record(total_s, self._metrics.curves),
        )

    def _weights(self, steps: int) -> WeightFigures:
        load, sync = self._loads.load, self._loads.sync
        return WeightFigures(
            sync_s=share(sync.sum, sum(sync.counts)),
            exposed_s=share(load.sum, steps * self._scenario.fleet.instances),
            sent_bytes=self.loop.sent_bytes,
        )

    def _on_policy_bound_s(self, demand: Demand, restarts: int) -> float | None:
        roles, notes = self.loop.scheduler.roles, self._notes
        if staleness_bound(roles.freshness) != 0:
            return None
        step, batches = self._workload.prompts_per_step, len(notes.delivered)
        bound = on_policy_bound(demand, step, batches, self._scenario, restarts)
        return bound.seconds(in_parts=notes.in_parts)

    def _measure_training(self, now: float, event: Event, actions: list[Action]) -> None:
        """Measure only until training ends: later work for clients is not part of its steps."""
        if self.loop.training:
            self._metrics.observe(now, event, actions)


def staleness_bound(freshness: Freshness) -> int | None:
    """How many versions old a delivered sample may be; None if there is no limit."""
    version = 10**9
    oldest = freshness.oldest_allowed(version)
    return version - oldest if oldest > 0 else None


def reference_batch(workload: Workload, scenario: Scenario) -> float:
    """Places of an instance for the occupancy bubble: an even share of a batch's samples.

    At most `max_num_seqs`, because more cannot run at once; without training exactly that.
    """
    if not workload.groups:
        return scenario.fleet.max_num_seqs
    batch = min(workload.prompts_per_step, len(workload.groups)) * workload.samples_per_prompt
    return min(scenario.fleet.max_num_seqs, max(1.0, batch / scenario.fleet.instances))


def replay(
    trace: Trace,
    policies: Sequence[PolicyFile],
    scenario: Scenario,
    *,
    steps: int = 0,
    seeds: int = 1,
    jobs: int = 1,
    progress: Callable[[str, int], Progress] | None = None,
    journal_path: Path | None = None,
    records: bool = False,
) -> list[list[Run]]:
    """Every policy on every seed (0, 1, ...): runs by policy, then by seed.

    With a journal path and more than one run, each run writes its own file next to that path, named
    after policy and seed. With several `jobs`, that many runs are made in parallel, each in its own
    process. `records` keeps the data for charts of the first run of each policy. Raises Interrupted
    on Ctrl-C.
    """
    several = len(policies) * seeds > 1

    def path(policy: str, seed: int) -> Path | None:
        if journal_path is None or not several:
            return journal_path
        return journal_path.with_stem(f"{journal_path.stem}.{policy}.{seed}")

    asked = [
        _Asked(policy, seed, journal=path(policy.name, seed), records=records and seed == 0)
        for policy in policies
        for seed in range(seeds)
    ]
    return _run_each(trace, scenario, steps, asked, jobs, progress, seeds)


def replay_resampled(
    trace: Trace,
    policies: Sequence[PolicyFile],
    scenario: Scenario,
    *,
    steps: int = 0,
    resamples: int,
    jobs: int = 1,
    progress: Callable[[str, int], Progress] | None = None,
) -> list[list[Run]]:
    """Every policy on `resamples` resamples of the trace's prompts, each in its own order: runs by
    policy, then by resample. `jobs` as in `replay`.

    The size of the job is that of the original trace.
    """
    load = Workload(trace, scenario.job, steps=steps)
    job = msgspec.structs.replace(
        scenario.job,
        prompts_per_step=load.prompts_per_step,
        samples_per_prompt=load.samples_per_prompt,
        max_tokens=load.max_tokens,
    )
    fixed = msgspec.structs.replace(scenario, job=job)
    asked = [
        _Asked(policy, number, resampled=True) for policy in policies for number in range(resamples)
    ]
    return _run_each(trace, fixed, steps, asked, jobs, progress, resamples)


class _Asked(NamedTuple):
    """A run to make. resampled: its prompts are resampled by the seed; records: keep chart data."""

    policy: PolicyFile
    seed: int
    resampled: bool = False
    journal: Path | None = None
    records: bool = False


def _run_each(
    trace: Trace,
    scenario: Scenario,
    steps: int,
    asked: Sequence[_Asked],
    jobs: int,
    progress: Callable[[str, int], Progress] | None,
    each: int,
) -> list[list[Run]]:
    """Runs by policy, `each` runs for every policy. Raises Interrupted on Ctrl-C."""
    found: dict[int, Run] = {}
    make = partial(_run, trace, LengthModel(trace), scenario, steps)

    def follow(number: int) -> Progress | None:
        one = asked[number]
        return progress(one.policy.name, one.seed) if progress else None

    try:
        if jobs == 1 or len(asked) < 2:
            for number, one in enumerate(asked):
                found[number] = make(one, follow(number))
        else:
            groups = len(Workload(trace, scenario.job, steps=steps).groups)
            with WorkerPool(make, jobs) as workers:
                for number, run in workers.finished(asked):
                    found[number] = run
                    report = follow(number)
                    if report is not None:
                        report(groups)
    except KeyboardInterrupt as interrupt:
        whole = next((n for n in range(len(asked)) if n not in found), len(asked)) // max(1, each)
        raise Interrupted(_by_policy([found[n] for n in range(whole * each)], each)) from interrupt
    return _by_policy([found[n] for n in range(len(asked))], each)


def _run(
    trace: Trace,
    lengths: LengthModel,
    scenario: Scenario,
    steps: int,
    asked: _Asked,
    progress: Progress | None = None,
) -> Run:
    drawn = resampled(trace, asked.seed) if asked.resampled else trace
    return run_policy(
        asked.policy,
        drawn,
        scenario,
        steps=steps,
        seed=asked.seed,
        lengths=lengths,
        progress=progress,
        journal_path=asked.journal,
        records=asked.records,
    )


def _by_policy(runs: Sequence[Run], each: int) -> list[list[Run]]:
    return [list(runs[at : at + each]) for at in range(0, len(runs), each)] if each else []


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """The figures of one policy's runs: every number as {mean, min, max} over the seeds."""
    measured: dict[str, Any] = spread([_numbers(run) for run in runs])
    return measured


def _numbers(run: Run) -> dict[str, Any]:
    summary = msgspec.to_builtins(run.summary, str_keys=True)
    staleness = {key: summary.pop(f"staleness_{key}") for key in ("mean", "max", "histogram")}
    return {
        **summary,
        "staleness": staleness,
        "bound_s": run.bound_s,
        "gap_to_bound": run.gap_to_bound,
        "gap_to_offered_bound": run.gap_to_offered_bound,
        "on_policy_bound_s": run.on_policy_bound_s,
        "gap_to_on_policy_bound": run.gap_to_on_policy_bound,
        "step_gap_to_bound": sum(run.step_gaps) / len(run.step_gaps) if run.step_gaps else None,
        "samples_lost": run.samples_lost,
        "samples_drawn": run.samples_drawn,
        "events": run.events,
        "anomalies": sum(run.anomalies.values()),
        **{
            name: msgspec.to_builtins(figures)
            for name in ("weights", "direct", "outages")
            if (figures := getattr(run, name)) is not None
        },
    }


def spread(values: Sequence[Any]) -> Any:
    """Every number in `values` as {mean, min, max}; None if all are None."""
    if isinstance(values[0], dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: spread([value.get(key, 0) for value in values]) for key in keys}
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    return {"mean": sum(numbers) / len(numbers), "min": min(numbers), "max": max(numbers)}
