"""Batch completion time through each router: `python -m benchmarks.live.rollout_time`.

The same long-tail batch, 64 prompts x 8 samples of a shipped maths trace, is sent whole through
each arm to eight simulated instances whose steps take longer the more work they have. Times are
scaled: an instance runs a number of times faster than its model. Each repetition takes the trace's
next batch and sends it through every arm, in another order than the one before, with new prompts,
so that no arm benefits from a prefix cache that another has filled.

The output has the time to the last answer and to 90 % of them, in the instances' seconds, their
ratios to vllm-router's within a repetition, and the results of a replay of the same batches under
the same decisions: live and simulated results should agree. Exit code 1 if an answer was lost or of
another length than in the trace, or if ours or vllm-router is missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from benchmarks.live import arms, machine
from benchmarks.live.arms import Arm, Running
from benchmarks.live.closed_client import send_all
from benchmarks.live.figures import names
from benchmarks.live.processes import Processes, StartError, url
from benchmarks.live.rollout_batch import asks, groups_of
from benchmarks.live.rollout_figures import BatchTime, Replayed, table
from benchmarks.live.simulated_fleet import MODEL, start_fleet
from rollout_sched.config import load_policy
from rollout_sched.simulators.replay import Scenario, load_scenario
from rollout_sched.simulators.replay.runs import run_policy
from rollout_sched.simulators.replay.scenario import Job
from rollout_sched.simulators.traces import read
from rollout_sched.simulators.traces.model import Trace

HERE = Path(__file__).parent

#: Routers that refuse token ids; they get prompts as text.
TEXT_ONLY = ("sglang-router",)

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        arms.direct(),
        arms.nginx(),
        arms.vllm_router(),
        arms.vllm_router("vllm-router-cache-aware", "cache_aware"),
        arms.sglang_router(),
        arms.relay(),
        arms.ours("ours-dplb-blind", str(HERE / "dplb_blind.toml")),
        arms.ours("ours-dplb", "dplb"),
    )
}
OURS = ("ours-dplb-blind", "ours-dplb")

#: The policy of a replay that makes the same decisions as the arm; the others have none.
TWINS = {
    "direct": "round_robin_sync",
    "vllm-router": "round_robin_sync",
    "ours-dplb-blind": str(HERE / "dplb_blind.toml"),
    "ours-dplb": "dplb",
}
DEFAULT_ARMS = (
    "direct",
    "vllm-router",
    "vllm-router-cache-aware",
    "sglang-router",
    "ours-dplb-blind",
    "ours-dplb",
)


@dataclass(frozen=True)
class Bench:
    """What all batches have in common."""

    processes: Processes
    trace: Trace
    scenario: Scenario
    prompts: int
    samples: int
    speed: float

    async def measure(self, running: Running, repetition: int) -> BatchTime:
        """Send one batch through one arm and observe the machine."""
        batch = asks(
            groups_of(self.trace, repetition, self.prompts, self.samples),
            MODEL,
            self.trace.cap,
            nonce=f"{running.arm.name}/{repetition}",
            as_text=running.arm.name in TEXT_ONLY,
        )
        router = machine.usage(running.sessions)
        async with machine.watched(self.processes.sessions) as load:
            finished = await send_all(batch, [url(port) for port in running.ports])
        return BatchTime(
            arm=running.arm.name,
            repetition=repetition,
            completion_s=finished.after(1.0) * self.speed,
            t90_s=finished.after(0.9) * self.speed,
            failures=list(finished.failures),
            busy=load.busy,
            busiest=load.busiest,
            foreign=load.foreign,
            router_cpu_s=machine.usage(running.sessions).cpu_s - router.cpu_s,
        )

    def replayed_s(self, policy: str, repetition: int) -> float:
        """Seconds of a batch in the simulation under a policy, without a network."""
        groups = groups_of(self.trace, repetition, self.prompts, self.samples)
        batch = msgspec.structs.replace(
            self.trace, groups={members[0].group: list(members) for members in groups}
        )
        job = Job(prompts_per_step=self.prompts, samples_per_prompt=self.samples)
        scenario = msgspec.structs.replace(self.scenario, job=job)
        return run_policy(load_policy(policy), batch, scenario).steps[0].rollout_s


def run(options: argparse.Namespace) -> tuple[list[BatchTime], Replayed]:
    """Start everything, send every batch through every arm, stop everything; then replay."""
    with Processes() as processes:
        bench = Bench(
            processes,
            read(options.trace),
            load_scenario(options.scenario),
            options.prompts,
            options.samples,
            options.speed,
        )
        instances = start_fleet(bench.scenario, options.scenario, options.speed, processes)
        chosen = [ARMS[name] for name in options.arms]
        running = arms.start(chosen, instances, processes, None, MODEL)
        told = uvloop.run(measure_all(bench, running, options.repetitions))
    return told, {
        one.arm.name: [
            bench.replayed_s(TWINS[one.arm.name], number) for number in range(options.repetitions)
        ]
        for one in running
        if one.arm.name in TWINS
    }


async def measure_all(
    bench: Bench, running: Sequence[Running], repetitions: int
) -> list[BatchTime]:
    """Measure all arms in turn; each repetition begins with the next arm."""
    told = []
    for repetition in range(repetitions):
        first = repetition % len(running)
        for one in [*running[first:], *running[:first]]:
            found = await bench.measure(one, repetition)
            told.append(found)
            print(
                f"batch {repetition + 1}: {found.arm}, {found.completion_s:.0f} s, 90 % after "
                f"{found.t90_s:.0f} s, machine {found.busy:.0%} busy, at most {found.busiest:.0%}",
                flush=True,
            )
    return told


def report(told: Sequence[BatchTime], replayed: Replayed, options: argparse.Namespace) -> bool:
    """Print table and remarks, write the JSON; returns whether nothing is lost or missing."""
    print(
        f"\n{options.prompts} prompts x {options.samples} samples of {options.trace}, scenario "
        f"{Path(options.scenario).stem}, {options.speed:g} times real time; "
        f"median (least-most) of {options.repetitions} batches, ratios to {arms.REFERENCE}"
    )
    print("\n".join(table(told, replayed)))
    print(machine.verdict([(one.busiest, one.foreign) for one in told]))
    remarks = [f"FAILED {failure}" for one in told for failure in one.failures]
    needed = {*OURS, arms.REFERENCE} - {one.arm for one in told}
    remarks += [f"NOT MEASURED {arm}" for arm in options.arms if arm in needed]
    print("\n".join(remarks[:10]))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    result = {"speed": options.speed, "batches": told, "replayed_s": replayed}
    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    print(f"written: {options.json}")
    return not remarks


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", type=names(ARMS), default=list(DEFAULT_ARMS))
    parser.add_argument("--trace", default="composite_math_512x8")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--scenario", default=str(HERE / "few_slots.toml"))
    parser.add_argument("--speed", type=float, help="default: 20, or 60 with --quick")
    parser.add_argument("--repetitions", type=int, help="default: 3, or 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="one batch, at three times the speed")
    parser.add_argument("--json", type=Path, default=Path("out/rollout_time.json"))
    options = parser.parse_args(arguments)
    options.repetitions = options.repetitions or (1 if options.quick else 3)
    options.speed = options.speed or (60.0 if options.quick else 20.0)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        told, replayed = run(options)
    except StartError as error:
        print(error, file=sys.stderr)
        return 1
    return int(not report(told, replayed, options))


if __name__ == "__main__":
    sys.exit(main())
