"""`rollout-sched demo`: a live rollout, from the trainer's first prompt to its last batch.

It runs a gateway in front of two instances, and a trainer that takes batches and publishes weights,
and prints what the journal says about the run. The instances are simulated servers that replay a
recorded maths rollout in scaled time, and the table shows the replay's prediction beside the live
figures; or they are the vLLM servers you name.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rollout_sched import journal, terminal
from rollout_sched.client import Prompt, Reload, RolloutScheduler
from rollout_sched.config import load_policy
from rollout_sched.core.errors import CallerError
from rollout_sched.flags import Flag, add_flags, given_flags
from rollout_sched.metrics import Metrics, Summary
from rollout_sched.simulators.replay import Scenario, Workload, load_scenario
from rollout_sched.simulators.replay.runs import run_policy
from rollout_sched.simulators.traces import read

TRACE = "lrm_math_open"
SCENARIO = "qwen7b-8xh100-disaggregated"
POLICIES = ("round_robin_sync", "tail_batching", "areal")
INSTANCES = 2
STEPS = 4
PROMPTS_PER_STEP = 16
START_S = 60.0
#: A live run that is longer than its replay by this factor was slowed by the machine: both have the
#: same lengths and costs.
LATE = 1.03


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `demo`.

    policies   run one after the other (default: round_robin_sync, tail_batching, areal)
    instances  URL of a vLLM server; repeatable (default: two simulated servers)
    weights    for these: the checkpoint to load after each training step, with {version}
    speed      simulated seconds per second
    """

    policies: Annotated[list[str], Flag("--policy", "NAME_OR_TOML")] = msgspec.field(
        default_factory=lambda: list(POLICIES)
    )
    instances: Annotated[list[str], Flag("--instance", "URL")] = []
    weights: Annotated[str, Flag(metavar="PATH")] = ""
    speed: Annotated[float, msgspec.Meta(gt=0)] = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, DemoOptions)
    parser.set_defaults(run=lambda given: demo(DemoOptions(**given_flags(given, DemoOptions))))


class DemoResult(msgspec.Struct):
    """The run of one policy, in simulated seconds if the instances are simulated."""

    policy: str
    live: Summary
    predicted_s: float | None
    events: int


def demo(options: DemoOptions) -> None:
    """Run the demo and print the table. Raises CallerError if it cannot be run."""
    if options.instances and not options.weights:
        raise CallerError("--weights is missing: the checkpoint to load after each training step")
    console = terminal.console()
    if not console.is_terminal:
        console = terminal.console(width=max(console.width, 110))
    results = [_run(policy, options, console) for policy in options.policies]
    console.print(_table(results, simulated=not options.instances))
    for result in results:
        if result.predicted_s and result.live.total_s > LATE * result.predicted_s:
            console.print(
                f"{result.policy}: {result.live.total_s / result.predicted_s - 1:.0%} longer than "
                f"the replay said: this machine does not keep pace at --speed {options.speed:g}"
            )


def _run(policy: str, options: DemoOptions, console: Console) -> DemoResult:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.instances:
            urls, speed, world = list(options.instances), 1.0, None
            prompts = _made_up_prompts()
            weights = Reload(options.weights)
        else:
            world = _world()
            urls = [stack.enter_context(_fake(options.speed, seed)) for seed in range(INSTANCES)]
            speed = options.speed
            prompts = _recorded_prompts(Workload(read(TRACE), world.job, steps=STEPS))
            for version in range(1, STEPS + 1):
                (folder / str(version)).mkdir()
            weights = Reload(f"{folder}/{{version}}", visible_here=False)
        record = folder / "journal.jsonl"
        with _gateway(policy, urls, record) as url:
            asyncio.run(_train(url, policy, prompts, weights, world, speed, console))
        return _result(policy, record, world, speed, prompts[0].samples)


def _world() -> Scenario:
    change = msgspec.structs.replace
    base = load_scenario(SCENARIO)
    return change(
        base,
        fleet=change(base.fleet, instances=INSTANCES),
        job=change(base.job, prompts_per_step=PROMPTS_PER_STEP),
    )


async def _train(
    url: str,
    policy: str,
    prompts: list[Prompt],
    weights: Reload,
    world: Scenario | None,
    speed: float,
    console: Console,
) -> None:
    """The trainer: it takes batches, waits for the training time, and publishes weights."""
    with _progress(console) as bar:
        task = bar.add_task(policy, total=len(prompts))
        async with RolloutScheduler.connect(url) as rollouts:
            await rollouts.submit(prompts)
            await rollouts.close_submissions()
            async for batch in rollouts.batches():
                if batch.failed:
                    raise CallerError(f"groups failed: {batch.failed}")
                bar.advance(task, len(batch.groups()))
                if world is not None:
                    tokens = sum(len(s.prompt_ids) + len(s.response_ids) for s in batch.samples)
                    await asyncio.sleep(world.trainer.step_s(tokens) / speed)
                if not bar.finished:
                    await rollouts.publish_weights(batch.version + 1, weights)


def _recorded_prompts(load: Workload) -> list[Prompt]:
    """Prompts of the recorded lengths, each asking for responses of the lengths that the replay
    has, also for the samples that a policy adds: at most as many as were asked for."""
    asked = load.samples_per_prompt
    return [
        Prompt(
            uid=group,
            prompt_ids=[number] * load.prompt_tokens(group),
            samples=asked,
            max_tokens=load.max_tokens,
            # The simulated servers draw a length of 1. A response can be cut and go on with this
            # field, unlike with one that only they know.
            each=[{"min_tokens": load.length(group, index)} for index in range(2 * asked)],
        )
        for number, group in enumerate(load.groups, start=1)
    ]


def _made_up_prompts() -> list[Prompt]:
    """Prompts for any real model: a few ids end a response, so that lengths vary."""
    sampling = {"temperature": 1.0, "logprobs": 0, "stop_token_ids": list(range(300, 312))}
    return [
        Prompt(
            uid=f"prompt-{number}",
            prompt_ids=[300 + (number * 7 + place) % 200 for place in range(32)],
            samples=4,
            max_tokens=400,
            sampling=sampling,
        )
        for number in range(STEPS * PROMPTS_PER_STEP)
    ]


def _result(
    policy: str, record: Path, world: Scenario | None, speed: float, samples: int
) -> DemoResult:
    """The result of the journal, replayed with a scheduler of the same policy."""
    header, entries = journal.read(record)
    loaded = load_policy(policy)
    scheduler = loaded.scheduler(header.prompts_per_step, version=header.version, seed=header.seed)
    metrics = Metrics(reference_batch=PROMPTS_PER_STEP * samples / INSTANCES)
    last, events = 0.0, 0
    for entry, actions in journal.replay(scheduler, entries):
        metrics.observe(entry.now * speed, entry.event, actions)
        last = entry.now
        events += 1
    predicted = None
    if world is not None:
        predicted = run_policy(loaded, read(TRACE), world, steps=STEPS).summary.total_s
    return DemoResult(policy, metrics.summary(last * speed), predicted, events)


# -- processes ---------------------------------------------------------------------------------


def _fake(speed: float, seed: int) -> AbstractContextManager[str]:
    arguments = ["fake-instance", "--port", "0", "--scenario", SCENARIO, "--speed", str(speed)]
    arguments += ["--seed", str(seed), "--median-tokens", "1", "--sigma", "0"]
    return _serving(arguments, "ready on ")


def _gateway(policy: str, urls: list[str], record: Path) -> AbstractContextManager[str]:
    arguments = ["serve", "--policy", policy, "--port", "0", "--drain-s", "0"]
    arguments += ["--journal", str(record)]
    arguments += ["--prompts-per-step", str(PROMPTS_PER_STEP)]
    for url in urls:
        arguments += ["--instance", url]
    return _serving(arguments, "listening on ")


@contextmanager
def _serving(arguments: list[str], says: str) -> Iterator[str]:
    """Run one of our commands that serve; yields the URL that it prints."""
    command = [sys.executable, "-m", "rollout_sched", *arguments]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            yield _url(process, Path(said.name), says)
        finally:
            process.terminate()
            process.wait(START_S)
            for line in Path(said.name).read_text().splitlines():
                if "lost" in line or "WARNING" in line or "Error" in line:
                    print(line, file=sys.stderr)


def _url(process: subprocess.Popen[bytes], said: Path, says: str) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        for line in said.read_text().splitlines():
            if says in line:
                return line.partition(says)[2].split()[0]
        time.sleep(0.05)
    raise CallerError(f"{process.args!r} did not start:\n{said.read_text()[-2000:]}")


# -- what is shown -----------------------------------------------------------------------------


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:18}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} prompts trained"),
        TimeElapsedColumn(),
        console=console,
    )


def _table(results: list[DemoResult], *, simulated: bool) -> Table:
    unit = "simulated seconds" if simulated else "seconds"
    table = Table(title=f"Live, through the gateway ({unit})")
    table.add_column("policy")
    for column in ("total", "replay said", "t90", "idle", "vacant", "staleness", "samples"):
        table.add_column(column, justify="right")
    for result in results:
        live = result.live
        said = "" if result.predicted_s is None else f"{result.predicted_s:,.0f}"
        table.add_row(
            result.policy,
            f"{live.total_s:,.1f}",
            said,
            f"{live.t90_s:,.1f}",
            f"{live.idle_bubble:.0%}",
            f"{live.occupancy_bubble:.0%}",
            f"{live.staleness_mean:.2f} (max {live.staleness_max})",
            f"{live.samples_delivered}",
        )
    table.caption = (
        "total: from the first event to the last; t90: of a step's samples; idle and vacant: share "
        "of the fleet's time with nothing to do, and of a batch's places; staleness in versions"
    )
    return table
