"""`make bench-prediction`: compare replays with what real vLLM servers do.

Servers on the CPU (a tiny random model) are calibrated. Then a trainer that sleeps and loads
weights requests batches of several workloads under several policies. The generated samples and
their lengths are the trace of a replay with the calibrated constants. The calibration does not use
the workloads.

Each repetition calibrates for a while and then runs every workload under every policy, in another
order each time. The speed of the first engine's core is sampled all the time (`core_pace.py`).
Constants are fitted to all calibrations together, as for a core at full speed, and scaled for each
run by how slow the core was during it. How much of that slowness the engine feels also follows from
the calibrations. A cell is a workload under a policy; its error is the median over the repetitions
of predicted / measured, minus 1.

The rule: over all cells and both figures (makespan, from the first dispatch to the last delivery,
and t90, for 90 % of a step's samples), errors are at most 5 % in the median and 10 % at the worst.
Preemptions are shown too and not judged. Exit code 1 for a miss.

The variants of the last table are fits with fewer terms, and without the pace of the core, to show
the effect of each. `--keep` saves all measurements in a folder, and `--again` predicts from them
without servers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks import core_pace, prediction_record
from benchmarks.core_pace import scaled
from benchmarks.prediction_record import Arm, Record, TimedMeasurements
from benchmarks.prediction_table import Cell, Figures, Pair, table
from rollout_sched import Prompt, Reload, RolloutScheduler
from rollout_sched.calibration.calibration import Calibration, Calibrator, Measurements
from rollout_sched.config import load_policy
from rollout_sched.core.model.actions import Deliver, Dispatch
from rollout_sched.inspection import recorded_trace
from rollout_sched.inspection.recording import Recording
from rollout_sched.integrations.vllm import HttpInstance
from rollout_sched.integrations.vllm.weight_updates import Apply
from rollout_sched.live.ports import InstanceClient
from rollout_sched.metrics import Metrics
from rollout_sched.metrics.fold import Folded
from rollout_sched.simulators.instance import CostModel
from rollout_sched.simulators.replay import Scenario
from rollout_sched.simulators.replay.links import Links, TransferCost
from rollout_sched.simulators.replay.runs import run_policy
from rollout_sched.simulators.replay.scenario import FleetModel, Job, TrainerModel
from rollout_sched.simulators.traces.model import Trace

POLICIES = ("round_robin_sync", "one_step_off", "areal")
PROMPTS_PER_STEP = 6
SAMPLES = 4
STEPS = 3
TRAIN_S = 0.3

SLOTS = 16
KV_TOKENS = 6144  # "tight" needs more
CORES_OF_AN_INSTANCE = 2  # one for its engine, one for its front end and the rest

#: The first of the token ids that end a response.
FIRST_STOP = 300


class Work(NamedTuple):
    """Prompts of a length, and responses that end at one of several token ids, or at a limit."""

    prompt: int
    most: int
    stops: int


WORKLOADS = {
    "short": Work(prompt=32, most=160, stops=40),
    "long": Work(prompt=64, most=400, stops=12),
    "prompts": Work(prompt=500, most=100, stops=40),
    "tight": Work(prompt=160, most=700, stops=4),
}


class Lived(NamedTuple):
    """One run on real servers: its figures, its trace, and how many times as long steps took as on
    a core at full speed."""

    workload: str
    policy: str
    measured: Figures
    trace: Trace
    slowness: float = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--repetitions", type=int, default=12)
    add("--calibrate-s", type=float, default=25.0, help="seconds per repetition")
    add("--policy", action="append", dest="policies", choices=POLICIES)
    add("--workload", action="append", dest="workloads", choices=WORKLOADS)
    add("--keep", type=Path, metavar="FOLDER", help="save all measurements there")
    add("--again", type=Path, metavar="FOLDER", help="predict from saved measurements")
    add("--out", type=Path, help="the figures, as JSON")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = options.again or options.keep
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.again is None:
            folder.mkdir(parents=True, exist_ok=True)
            _record(options, folder).write(folder)
        record = prediction_record.read(folder)
        lived = [_lived(arm, record, folder) for arm in record.arms]
    found = fitted(record.calibration, record.measurements)
    cells = predicted(lived, world(found, found.fit.cost))
    variants = {
        name: predicted(lived, world(found, cost)) for name, cost in _variants(record).items()
    }
    as_timed = record.calibration
    at_one_pace = [one._replace(slowness=1.0) for one in lived]
    variants["at one pace"] = predicted(at_one_pace, world(as_timed, as_timed.fit.cost))
    judged = table(cells, variants)
    if options.out is not None:
        told = {"calibration": found, "cells": cells, "variants": variants}
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1))
    print(_about(found, record))
    print(judged.text)
    return 0 if judged.kept else 1


def _record(options: argparse.Namespace, folder: Path) -> Record:
    paces = folder / "paces"
    with ExitStack() as stack:
        model, urls = _servers(stack, folder)
        stack.enter_context(core_pace.sampled(0, paces))
        record = asyncio.run(_measure(options, folder, model, urls))
    return msgspec.structs.replace(record, samples=core_pace.read(paces))


def _servers(stack: ExitStack, folder: Path) -> tuple[Path, list[str]]:
    from tests.vllm import tiny_model  # requires torch
    from tests.vllm.servers import serving

    model = folder / "tiny"
    tiny_model.main([str(model)])
    count = max(1, (os.cpu_count() or 1) // CORES_OF_AN_INSTANCE)
    flags = ["--enable-scale-out", "--max-num-seqs", str(SLOTS)]
    flags += ["--kv-cache-memory-bytes", str(KV_TOKENS * 1024)]
    started = [
        stack.enter_context(serving(model, folder, *flags, dev_mode=True, core=number))
        for number in range(count)
    ]
    urls = [server.wait() for server in started]
    _set_apart([server.process.pid for server in started])
    return model, urls


def _set_apart(front_ends: Sequence[int]) -> None:
    """Give each engine a core that no other process uses, as with a GPU."""
    others = os.sched_getaffinity(0) - set(range(len(front_ends)))
    if others:
        for process in (0, *front_ends):
            os.sched_setaffinity(process, others)


async def _measure(
    options: argparse.Namespace, folder: Path, model: Path, urls: list[str]
) -> Record:
    instances = [HttpInstance(url) for url in urls]
    try:
        for instance in instances:
            await instance.describe()
        return await _repeat(options, folder, model, urls, instances)
    finally:
        for instance in instances:
            await instance.close()


async def _repeat(
    options: argparse.Namespace,
    folder: Path,
    model: Path,
    urls: list[str],
    instances: Sequence[HttpInstance],
) -> Record:
    rng, measurements, arms = random.Random(0), TimedMeasurements(), list[Arm]()
    wanted = [
        (workload, policy)
        for workload in options.workloads or WORKLOADS
        for policy in options.policies or POLICIES
    ]
    limits = await instances[0].limits()
    calibration = None
    for repetition in range(options.repetitions):
        calibrator = Calibrator(
            instances, limits, seed=repetition, report=lambda *_: None, measurements=measurements
        )
        calibration = await calibrator.run(options.calibrate_s, str(model))
        for workload, policy in rng.sample(wanted, len(wanted)):
            asked = prompts(WORKLOADS[workload], repetition)
            journal = folder / prediction_record.journal_of(workload, policy, repetition)
            preempted, began = await _preempted(instances), time.monotonic()
            await run(urls, policy, asked, Reload(str(model)), journal)
            ended, preempted = time.monotonic(), await _preempted(instances) - preempted
            arms.append(Arm(journal.name, workload, policy, preempted, began, ended))
            print(f"{journal.stem}: {figures(Recording(journal))}", file=sys.stderr)
    assert calibration is not None, "at least one repetition"
    bursts = [
        (burst, times, measurements.over[burst]) for burst, times in measurements.whole.items()
    ]
    return Record(calibration, bursts, [], arms)


async def _preempted(instances: Sequence[HttpInstance]) -> int:
    """The number of preemptions since the servers were started."""
    return sum([(await instance.gauges()).preemptions for instance in instances])


def prompts(work: Work, seed: int) -> list[Prompt]:
    """Prompts of random tokens, so that no cache has them from another run."""
    rng = random.Random(f"{work}/{seed}")
    stops = list(range(FIRST_STOP, FIRST_STOP + work.stops))
    return [
        Prompt(
            uid=f"prompt-{number:03d}",
            prompt_ids=rng.choices(range(1000, 2000), k=work.prompt),
            samples=SAMPLES,
            max_tokens=work.most,
            sampling={"temperature": 1.0, "logprobs": 0, "stop_token_ids": stops},
        )
        for number in range(STEPS * PROMPTS_PER_STEP)
    ]


async def run(
    instances: Sequence[str | InstanceClient],
    policy: str,
    asked: Sequence[Prompt],
    weights: Apply,
    record: Path,
) -> None:
    """A trainer that sleeps while it trains, and then publishes weights."""
    async with RolloutScheduler.from_toml(
        policy, instances, prompts_per_step=PROMPTS_PER_STEP, version="auto", journal=record
    ) as rollouts:
        await rollouts.submit(asked)
        await rollouts.close_submissions()
        left = STEPS
        async for batch in rollouts.batches():
            await asyncio.sleep(TRAIN_S)
            left -= 1
            if left:
                await rollouts.publish_weights(batch.version + 1, weights)


class _Ends:
    """The time of the first dispatch, and of the last delivery."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0

    def handlers(self) -> dict[type[Any], Any]:
        return {Dispatch: self._dispatched, Deliver: self._delivered}

    def _dispatched(self, now: float, action: Dispatch) -> None:
        self.first = now if self.first is None else self.first

    def _delivered(self, now: float, action: Deliver) -> None:
        self.last = now


def figures(recording: Recording) -> Figures:
    """The figures of a live run or a replay, from its journal."""
    ends, metrics = _Ends(), Metrics(SLOTS)
    total_s = recording.tell([metrics.observe, Folded(ends).observe])
    summary = metrics.summary(total_s)
    return Figures(ends.last - (ends.first or 0.0), summary.t90_s, summary.preemptions)


def _lived(arm: Arm, record: Record, folder: Path) -> Lived:
    """Preemptions are read from the servers, because polls may have missed the last ones."""
    recording = Recording(folder / arm.journal)
    measured = figures(recording)._replace(preemptions=arm.preempted)
    trace, slowness = trace_of(recording), record.slowness(arm)
    return Lived(arm.workload, arm.policy, measured, trace, slowness)


def trace_of(recording: Recording) -> Trace:
    """The workload of a recorded run."""
    trace, _ = recorded_trace(recording.path.stem, [recording])
    return trace


def fitted(found: Calibration, measurements: Measurements) -> Calibration:
    """The calibration with the constants that explain these measurements."""
    fit = measurements.fit(found.room.slots, found.max_num_batched_tokens)
    spread, writing_s = measurements.spread, measurements.writing_s
    return msgspec.structs.replace(found, fit=fit, spread=spread, writing_s=writing_s)


def world(found: Calibration, cost: CostModel) -> Scenario:
    """The calibrated servers, with their costs outside of the engine, and this benchmark's
    trainer."""
    room, limits, fit = found.room, found.limits, found.fit
    return Scenario(
        FleetModel(
            instances=found.instances,
            kv_tokens=room.kv_tokens,
            block_size=limits.block_size or 16,
            max_num_seqs=room.slots,
            max_num_batched_tokens=found.max_num_batched_tokens,
            max_model_len=room.max_model_len,
            prefix_caching=bool(found.prefix_caching),
        ),
        cost,
        trainer=TrainerModel("disaggregated", TRAIN_S, 0.0),
        weights=TransferCost(found.reload_s or 0.0),
        links=Links(found.instances, fit.call_s / 2, 0.0, found.writing_s or 0.0),
        job=Job(prompts_per_step=PROMPTS_PER_STEP, samples_per_prompt=SAMPLES),
    )


def predicted(runs: Sequence[Lived], scenario: Scenario) -> list[Cell]:
    """Each run's trace replayed under its policy."""
    pairs: dict[tuple[str, str], list[Pair]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for lived in runs:
            record = Path(folder) / "replayed.jsonl"
            policy = load_policy(lived.policy)
            cost = scaled(scenario.cost, lived.slowness)
            now = msgspec.structs.replace(scenario, cost=cost)
            run_policy(policy, lived.trace, now, steps=STEPS, journal_path=record)
            pair = Pair(lived.measured, figures(Recording(record)))
            pairs.setdefault((lived.workload, lived.policy), []).append(pair)
    return [Cell(workload, policy, found) for (workload, policy), found in sorted(pairs.items())]


def _variants(record: Record) -> dict[str, CostModel]:
    found, measurements = record.calibration, record.measurements
    room, tokens = found.room, found.max_num_batched_tokens
    terms = ("request_s", "prefill_s", "sequence_s", "context_s", "attention_s")
    return {
        f"without {term}": measurements.fit(room.slots, tokens, leave_out=(term,)).cost
        for term in terms
    }


def _about(found: Calibration, record: Record) -> str:
    fit, spread = found.fit, "unknown" if found.spread is None else f"{found.spread:.1%}"
    constants = ", ".join(f"{n} {v:.4g}" for n, v in msgspec.structs.asdict(fit.cost).items())
    return (
        f"{found.instances} server(s), vLLM {found.limits.version}; {found.bursts} bursts measured "
        f"{found.measured} times, spread {spread}, fit error {fit.mean_error:.1%} mean and "
        f"{fit.max_error:.1%} at most. The engine feels {record.share:.0%} of a core's slowness; "
        f"runs were slowed by {_slowed(record)}.\n{constants}; call_s {fit.call_s:.4g}, writing_s "
        f"{found.writing_s or 0.0:.4g}, reload_s {found.reload_s or 0.0:.4g}\n"
    )


def _slowed(record: Record) -> str:
    times = sorted(record.slowness(arm) - 1 for arm in record.arms)
    return f"{times[0]:.0%} to {times[-1]:.0%}"


if __name__ == "__main__":
    sys.exit(main())
