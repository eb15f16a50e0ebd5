"""Several steps with a trainer: `python -m benchmarks.live.rollout_steps`.

The reference is a trainer in lock step: it sends a step's prompts x samples through vllm-router,
waits for all, trains, loads the new weights into the instances, and repeats. It is compared with a
trainer that uses our Python API and gets its batches from `rollout-sched serve`, under one policy
after the other. Prompts, lengths, training times and weight transfers are the same.

Each repetition trains other prompts of the trace under every arm, in another order than the one
before; each arm starts its own gateway. The output has the time until everything was trained, the
steps, staleness and discarded tokens, and the results of a replay of the same prompts under the
same policy. Exit code 1 if a sample was lost, delivered twice or of another length than in the
trace, or if ours or vllm-router is missing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request

import msgspec
import uvloop

from benchmarks.live import arms, machine
from benchmarks.live.arms import REFERENCE, Running
from benchmarks.live.figures import names
from benchmarks.live.machine import Load, Patience
from benchmarks.live.processes import Processes, StartError, free_port, stop, url
from benchmarks.live.simulated_fleet import MODEL, start_fleet
from benchmarks.live.steps_figures import (
    LiveRun,
    ReplayedRun,
    idle_share,
    replayed,
    steps,
    totals,
)
from benchmarks.live.steps_job import StepsJob, job_of
from benchmarks.live.steps_trainers import Trained, train_in_lock_step, train_on_batches
from rollout_sched import journal
from rollout_sched.config import load_policy
from rollout_sched.metrics import Metrics
from rollout_sched.simulators.replay import load_scenario
from rollout_sched.simulators.replay.runs import reference_batch
from rollout_sched.simulators.traces import read

HERE = Path(__file__).parent

#: A measurement begins when others use less of the machine than this, or when patience ends.
QUIET = 0.12

POLICIES = (
    "round_robin_sync",
    "dplb",
    "tail_batching",
    "partial_rollout",
    "areal",
    "best_on_policy",
    "best_async",
)

#: The policy of a replay that makes the same decisions as the arm.
TWINS = {REFERENCE: "round_robin_sync", **{policy: policy for policy in POLICIES}}


@dataclass
class Bench:
    """The fleet, the reference's router, and the fleet's version, because versions only grow."""

    processes: Processes
    instances: Sequence[int]
    router: Running | None
    version: int = 0

    def measure(self, arm: str, job: StepsJob, repetition: int) -> LiveRun:
        """Train the job through one arm. Raises StartError if its gateway does not answer."""
        nonce = f"{arm}/{repetition}"
        if arm == REFERENCE:
            assert self.router is not None  # otherwise it is not among the arms
            work = train_in_lock_step(job, self.router.ports, self.instances, nonce)
            measured = uvloop.run(self._watched(work, self.router.sessions))
            return live_run(arm, repetition, measured, None)
        with self._gateway(arm, job, nonce) as (port, session, journal_file):
            work = train_on_batches(job, port, len(self.instances), nonce)
            measured = uvloop.run(self._watched(work, [session]))
        books = fold(journal_file, arm, job)
        self.version = max(self.version, measured.trained.version)
        return live_run(arm, repetition, measured, books)

    @contextmanager
    def _gateway(self, policy: str, job: StepsJob, name: str) -> Iterator[tuple[int, int, Path]]:
        """Its port, session and journal; the journal is complete after the block."""
        port = free_port()
        name = f"serve-{name.replace('/', '-')}"
        journal_file = self.processes.folder / f"{name}.journal"
        options = {
            "--policy": policy,
            "--port": str(port),
            "--prompts-per-step": str(job.prompts_per_step),
            "--start-version": str(self.version),
            "--journal": str(journal_file),
        }
        command = [arms.COMPILED_PROGRAM, "serve", *(w for pair in options.items() for w in pair)]
        command += [word for one in self.instances for word in ("--instance", url(one))]
        ready = Request(url(port, "/health"))
        process = self.processes.start_server(name, command, None, ready, patience_s=30)
        try:
            yield port, process.pid, journal_file
        finally:
            stop(process)

    async def _watched(self, work: Awaitable[Trained], router: Sequence[int]) -> Measured:
        before = machine.usage(router).cpu_s
        async with machine.watched(self.processes.sessions) as load:
            trained = await work
        return Measured(trained, load, machine.usage(router).cpu_s - before)


@dataclass(frozen=True)
class Measured:
    """What a trainer observed, how busy the machine was, and the router's CPU."""

    trained: Trained
    load: Load
    router_cpu_s: float


@dataclass(frozen=True)
class Books:
    """The figures from a gateway's journal."""

    discarded: float
    idle: float
    anomalies: dict[str, int]


def fold(journal_file: Path, policy: str, job: StepsJob) -> Books:
    """Replay a live journal through the scheduler into the same metrics as the replay's."""
    header, entries = journal.read(journal_file)
    scheduler = load_policy(policy).scheduler(
        header.prompts_per_step, version=header.version, seed=header.seed
    )
    metrics = Metrics(reference_batch(job.workload, job.scenario))
    for entry, actions in journal.replay(scheduler, entries):
        metrics.observe(entry.now, entry.event, actions)
    steps = metrics.steps
    made = sum(step.generated_tokens for step in steps)
    discarded = sum(step.discarded_tokens for step in steps)
    return Books(discarded / max(1, made), idle_share(steps), dict(scheduler.view.anomalies))


def live_run(arm: str, repetition: int, measured: Measured, books: Books | None) -> LiveRun:
    trained, load = measured.trained, measured.load
    return LiveRun(
        arm=arm,
        repetition=repetition,
        total_s=trained.total_s,
        steps_s=trained.steps_s,
        staleness_mean=statistics.fmean(trained.ages or [0]),
        staleness_max=max(trained.ages, default=0),
        samples=trained.samples,
        discarded=books.discarded if books else None,
        idle=books.idle if books else None,
        anomalies=books.anomalies if books else {},
        failures=trained.failures,
        busy=load.busy,
        busiest=load.busiest,
        foreign=load.foreign,
        router_cpu_s=measured.router_cpu_s,
    )


def run(options: argparse.Namespace) -> tuple[list[LiveRun], list[ReplayedRun]]:
    """Start the fleet, train every job through every arm, stop everything; then replay.

    Raises StartError, or ValueError if the trace is too short.
    """
    trace, scenario = read(options.trace), load_scenario(options.scenario)
    jobs = [
        job_of(
            trace,
            scenario,
            number,
            steps=options.steps,
            prompts_per_step=options.prompts,
            samples=options.samples,
            speed=options.speed,
        )
        for number in range(options.repetitions)
    ]
    live: list[LiveRun] = []
    with Processes() as processes:
        instances = start_fleet(scenario, options.scenario, options.speed, processes)
        wanted = [arms.vllm_router()] if REFERENCE in options.arms else []
        routers = arms.start(wanted, instances, processes, None, MODEL)
        bench = Bench(processes, instances, routers[0] if routers else None)
        patience = Patience(options.patience)
        chosen = [arm for arm in options.arms if arm != REFERENCE or routers]
        for number, job in enumerate(jobs):
            first = number % len(chosen)
            for arm in [*chosen[first:], *chosen[:first]]:
                patience.wait_until_quiet(processes.sessions, QUIET, most_s=20)
                found = bench.measure(arm, job, number)
                live.append(found)
                print(progress(found), flush=True)
    virtual = [
        replayed(arm, number, job.replayed(TWINS[arm]))
        for number, job in enumerate(jobs)
        for arm in chosen
    ]
    return live, virtual


def progress(found: LiveRun) -> str:
    return (
        f"job {found.repetition + 1}: {found.arm}, {found.total_s:.0f} s in {len(found.steps_s)} "
        f"steps, machine {found.busy:.0%} busy, at most {found.busiest:.0%}, "
        f"others {found.foreign:.0%}"
    )


def report(
    live: Sequence[LiveRun], virtual: Sequence[ReplayedRun], options: argparse.Namespace
) -> bool:
    """Print tables and remarks, write the JSON; returns whether nothing is lost or missing."""
    print(
        f"\n{options.steps} steps of {options.prompts} prompts x {options.samples} samples of "
        f"{options.trace}, scenario {Path(options.scenario).stem}, {options.speed:g} times real "
        f"time; median (least-most) of {options.repetitions} jobs, ratios to {REFERENCE}"
    )
    print("\n".join(totals(live, virtual)) + "\n")
    print("\n".join(steps(live, virtual)))
    print(machine.verdict([(one.busiest, one.foreign) for one in live]))
    remarks = [f"FAILED {one.arm}: {failure}" for one in live for failure in one.failures]
    remarks += [f"NOT MEASURED {arm}" for arm in options.arms if arm not in {o.arm for o in live}]
    print("\n".join(remarks[:10]))
    odd = [f"{one.arm}: anomalies {one.anomalies}" for one in live if one.anomalies]
    print("\n".join(odd))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    result = {"speed": options.speed, "live": live, "replayed": virtual}
    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    print(f"written: {options.json}")
    return not remarks


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", type=names(TWINS), default=list(TWINS))
    parser.add_argument("--trace", default="composite_math_512x8")
    parser.add_argument("--steps", type=int, help="default: 5, or 3 with --quick")
    parser.add_argument("--prompts", type=int, help="per step; default: 32, or 16 with --quick")
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--scenario", default=str(HERE / "few_slots.toml"))
    parser.add_argument("--speed", type=float, help="default: 64, or 80 with --quick")
    parser.add_argument("--repetitions", type=int, help="default: 3, or 1 with --quick")
    parser.add_argument(
        "--patience", type=float, help="total wait for other load; default: 60, --quick: 0"
    )
    parser.add_argument("--quick", action="store_true", help="one job, short steps, no patience")
    parser.add_argument("--json", type=Path, default=Path("out/rollout_steps.json"))
    options = parser.parse_args(arguments)
    options.steps = options.steps or (3 if options.quick else 5)
    options.prompts = options.prompts or (16 if options.quick else 32)
    options.speed = options.speed or (80.0 if options.quick else 64.0)
    if options.patience is None:
        options.patience = 0.0 if options.quick else 60.0
    options.repetitions = options.repetitions or (1 if options.quick else 3)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        live, virtual = run(options)
    except (StartError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return int(not report(live, virtual, options))


if __name__ == "__main__":
    sys.exit(main())
