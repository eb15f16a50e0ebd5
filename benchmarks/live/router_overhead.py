"""The overhead of a router before the instances: `python -m benchmarks.live.router_overhead`.

A load generator in C keeps a number of requests in flight through each router to four bare
instances, also in C, that only answer. The router under test has a core of its own; everything else
shares the other. Each repetition measures every arm in turn, in another order than the one before.
A measurement is repeated if others used the machine during it.

Figures are medians (min-max) over repetitions, and ratios to vllm-router's. Compare the CPU per
request, because requests per second depend on other load of the machine. Latencies of held requests
and of streams vary much by chance, so these shapes are measured five times as often for the two
judged arms. Exit code 1 if a target is missed or could not be judged, or if one of our answers was
lost.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec

from benchmarks.live import arms, machine, overhead_verdict, request_shapes
from benchmarks.live.arms import Arm, Running
from benchmarks.live.machine import Patience
from benchmarks.live.overhead_verdict import Measurement
from benchmarks.live.processes import Processes, StartError, free_port, pin, url
from benchmarks.live.request_shapes import Shape

HERE = Path(__file__).parent
INSTANCES = 4
ROUTER_CORE, OTHER_CORE = 1, 0

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        arms.direct(),
        arms.nginx(),
        arms.vllm_router(),
        arms.vllm_router("vllm-router-cache-aware", "cache_aware"),
        arms.sglang_router(),
        arms.ours(),
        arms.interpreted(),
        *arms.workers(),
        *arms.before(),
    )
}
DEFAULT_ARMS = (
    "direct",
    "nginx",
    "vllm-router",
    "sglang-router",
    "rollout-sched",
    "rollout-sched-interpreted",
)


@dataclass(frozen=True)
class Bench:
    """What all measurements have in common.

    foreign_limit  share of the machine that others may use during a measurement
    patience       time to wait for other load; the rest of it limits repeated attempts
    attempts       maximum of measurements, of which the least disturbed counts
    scale          factor on the seconds of each
    """

    processes: Processes
    generator: Path
    instances: Sequence[int]
    foreign_limit: float
    patience: Patience
    attempts: int
    scale: float

    def measure(self, shape: Shape, running: Running, repetition: int) -> Measurement:
        """The least disturbed of a few attempts; an undisturbed one ends them."""
        taken: list[Measurement] = []
        while True:
            self.patience.wait_until_quiet(self.processes.sessions, self.foreign_limit, max_s=20)
            before = machine.instant()
            taken.append(self._attempt(shape, running, repetition))
            least = min(taken, key=lambda measurement: measurement.foreign)
            if least.foreign <= self.foreign_limit or len(taken) == self.attempts:
                return least
            self.patience.spend(before)
            if self.patience.left_s <= 0:
                return least

    def _attempt(self, shape: Shape, running: Running, repetition: int) -> Measurement:
        answered = self._answered()
        before = machine.instant(self.processes.sessions)
        router = machine.usage(running.sessions)
        load, rss = self._load(shape, running)
        cpu_s = machine.usage(running.sessions).cpu_s - router.cpu_s
        after = machine.instant(self.processes.sessions)
        shares = [now - then for now, then in zip(self._answered(), answered, strict=True)]
        wall_s = load["wall_s"]
        others_s = after.own_s - before.own_s - cpu_s + load["cpu_s"]
        count = load["events"] if shape.streams else load["completed"]
        return Measurement(
            shape=shape.name,
            arm=running.arm.name,
            repetition=repetition,
            answered=load["completed"] - load["not_200"],
            per_s=load["events"] / wall_s
            if shape.streams
            else load["in_window"] / load["window_s"],
            cpu_us=cpu_s * 1e6 / max(count, 1),
            added_p50=load["latency_us"]["p50"] - shape.hold_us,
            added_p99=load["latency_us"]["p99"] - shape.hold_us,
            transit_p50=load["transit_us"]["p50"],
            transit_p99=load["transit_us"]["p99"],
            rss_mb=rss / 2**20,
            core=cpu_s / wall_s,
            others_core=others_s / wall_s,
            balance=max(shares) * len(shares) / max(sum(shares), 1),
            errors=sum(load[kind] for kind in ("not_200", "refused", "cut", "unfinished")),
            foreign=before.foreign_share(after, also_ours_s=load["cpu_s"]),
        )

    def _load(self, shape: Shape, running: Running) -> tuple[dict[str, Any], int]:
        """Run the load generator; returns its output, and the router's peak memory in bytes."""
        body = self.processes.folder / f"{shape.name}.json"
        body.write_text(shape.body)
        options = {
            "-p": ",".join(map(str, running.ports)),
            "-P": request_shapes.PATH,
            "-b": str(body),
            "-c": str(shape.connections),
            "-d": str(shape.window_s * self.scale),
            "-w": str(shape.warm_up_s),
            "-g": "20",
        }
        command = [str(self.generator), *(word for option in options.items() for word in option)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, preexec_fn=lambda: pin(OTHER_CORE)
        ) as generator:
            most = 0
            while True:
                most = max(most, machine.usage(running.sessions).rss_bytes)
                try:
                    said, _ = generator.communicate(timeout=0.5)
                    return msgspec.json.decode(said), most
                except subprocess.TimeoutExpired:
                    continue

    def _answered(self) -> list[int]:
        """Requests that each instance has had so far."""
        counts = []
        for port in self.instances:
            with urlopen(url(port, "/stats"), timeout=5) as answer:
                counts.append(msgspec.json.decode(answer.read())["requests"])
        return counts


def run(options: argparse.Namespace) -> list[Measurement]:
    """Start everything, measure every arm under every shape, stop everything."""
    with Processes() as processes:
        generator = processes.build(HERE / "load_generator.c")
        program = processes.build(HERE / "bare_instance.c")
        instances = [free_port() for _ in range(INSTANCES)]
        for port in instances:
            processes.start(f"instance-{port}", [str(program), str(port)], OTHER_CORE)
        chosen = [ARMS[name] for name in options.arms]
        running = arms.start(chosen, instances, processes, ROUTER_CORE, request_shapes.MODEL)
        bench = Bench(
            processes,
            generator,
            instances,
            options.foreign,
            Patience(options.patience),
            attempts=3,
            scale=0.5 if options.quick else 1.0,
        )
        repetitions, once = options.repetitions, options.quick
        return measure_all(bench, options.shapes, running, repetitions, once=once)


def measure_all(
    bench: Bench,
    shapes: Sequence[str],
    running: Sequence[Running],
    repetitions: int,
    *,
    once: bool = False,
) -> list[Measurement]:
    """Measure all arms in turn; each repetition begins with the next arm.

    Rounds after the first are for the judged arms only; `once` omits them.
    """
    measurements = []
    judged = [one for one in running if one.arm.name in (arms.REFERENCE, arms.OURS)]
    for name in shapes:
        rounds = 1 if once else request_shapes.SHAPES[name].rounds
        for repetition in range(repetitions * rounds):
            taking_part = running if repetition < repetitions else judged
            first = repetition % len(taking_part)
            for one in [*taking_part[first:], *taking_part[:first]]:
                found = bench.measure(request_shapes.SHAPES[name], one, repetition)
                measurements.append(found)
                print(
                    f"{name} repetition {repetition + 1}: {one.arm.name}, "
                    f"{found.cpu_us:.1f} us CPU, others used {found.foreign:.0%}",
                    flush=True,
                )
    return measurements


def report(measurements: Sequence[Measurement], options: argparse.Namespace) -> bool:
    """Print tables and targets, write the JSON; returns whether all is well."""
    for name in options.shapes:
        shape = request_shapes.SHAPES[name]
        print(f"\n{name}: {shape.about}; median (least-most) ratio to {arms.REFERENCE}")
        shown = overhead_verdict.columns(shape.streams, shape.hold_us > 0)
        print("\n".join(overhead_verdict.table(measurements, name, shown)))
    noisy = sum(m.foreign > options.foreign for m in measurements)
    print(
        f"\n{options.repetitions} repetitions; in {noisy} of {len(measurements)} measurements "
        f"others used more than {options.foreign:.0%} of the machine"
    )
    verdicts = overhead_verdict.verdicts(measurements, options.shapes)
    print("\n".join(verdict.show() for verdict in verdicts))
    lost = overhead_verdict.errors(measurements, arms.OURS)
    if lost:
        print(f"MISSED      {lost} answers of {arms.OURS} were not 200 or not complete")
    write(options.json, measurements, verdicts)
    return not lost and all(verdict.met or verdict.level for verdict in verdicts)


def write(
    path: Path, measurements: Sequence[Measurement], verdicts: Sequence[overhead_verdict.Verdict]
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"cores": machine.CORES, "targets": verdicts, "measurements": measurements}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    print(f"written: {path}")


def names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An argument type: some of the known names, separated by commas."""
    known = list(known)

    def convert(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return chosen

    return convert


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", type=names(ARMS), default=list(DEFAULT_ARMS))
    parser.add_argument(
        "--shapes", type=names(request_shapes.SHAPES), default=list(request_shapes.DEFAULT)
    )
    parser.add_argument("--repetitions", type=int, help="default: 3, or 1 with --quick")
    parser.add_argument("--foreign", type=float, default=0.12, help="share others may use")
    parser.add_argument(
        "--patience", type=float, help="total wait for other load; default: 240, --quick: 0"
    )
    parser.add_argument("--quick", action="store_true", help="half the seconds, no patience")
    parser.add_argument("--json", type=Path, default=Path("out/router_overhead.json"))
    options = parser.parse_args(arguments)
    options.repetitions = options.repetitions or (1 if options.quick else 3)
    if options.patience is None:
        options.patience = 0.0 if options.quick else 240.0
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        measurements = run(options)
    except StartError as error:
        print(error, file=sys.stderr)
        return 1
    return int(not report(measurements, options))


if __name__ == "__main__":
    sys.exit(main())
