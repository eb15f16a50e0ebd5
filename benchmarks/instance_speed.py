"""The speed of the simulated instance: `python benchmarks/instance_speed.py [trace.csv]`.

1. A recorded rollout on a few instances, with everything submitted at once.
2. Many small requests on many instances: cost per request of submit, admission and finish.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterable
from heapq import heapify, heapreplace
from pathlib import Path

from rollout_sched.simulators.instance import (
    CostModel,
    Ended,
    InstanceSpec,
    SimInstance,
    SimRequest,
)

QWEN2_5_7B_H100 = CostModel(
    step_s=0.6e-3,
    weights_s=5.95e-3,
    token_s=23.1e-6,
    sequence_s=4.4e-6,
    context_s=26.3e-9,
    attention_s=1.0e-10,
)


def recorded(path: Path) -> list[SimRequest]:
    with path.open(newline="") as file:
        return [
            request(
                number,
                group=int(row["group_id"]),
                prompt=int(row["prompt_tokens"]),
                response=int(row["response_tokens"]),
            )
            for number, row in enumerate(csv.DictReader(file))
        ]


def request(number: int, group: int, prompt: int, response: int) -> SimRequest:
    return SimRequest(
        attempt=number,
        context_tokens=prompt,
        new_tokens=response,
        max_new_tokens=32768,
        prompt_stream=group,
        shared_tokens=prompt,
        stream=number,
    )


def run(
    spec: InstanceSpec, requests: Iterable[SimRequest], count: int
) -> tuple[float, list[SimInstance]]:
    """Submit all at t=0 round-robin; advance the instance that is due. Returns the seconds."""
    start = time.perf_counter()
    instances = [SimInstance(spec) for _ in range(count)]
    ended = submitted = 0
    for submitted, one in enumerate(requests, 1):
        instances[(submitted - 1) % count].submit(one, 0.0)
    due = [(instance.next_at(), number) for number, instance in enumerate(instances)]
    heapify(due)
    while ended < submitted:
        at, number = due[0]
        instance = instances[number]
        ended += sum(isinstance(said, Ended) for said in instance.advance(at))
        heapreplace(due, (instance.next_at(), number))
    return time.perf_counter() - start, instances


def report(name: str, seconds: float, instances: list[SimInstance], requests: int) -> None:
    tokens = sum(instance.gauges().generated_tokens for instance in instances)
    preemptions = sum(instance.gauges().preemptions for instance in instances)
    hits = sum(instance.gauges().cached_tokens for instance in instances)
    print(
        f"{name}: {requests:,} requests, {tokens / 1e6:.1f} M tokens, {preemptions:,} preemptions, "
        f"{hits / 1e6:.2f} M cached, makespan {max(i.gauges().busy_s for i in instances):,.0f} s: "
        f"{seconds:.2f} s = {seconds / requests * 1e6:.1f} us per request"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", type=Path, help="CSV with group_id, prompt_tokens, ...")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--instances", type=int, default=1024)
    arguments = parser.parse_args()
    if arguments.trace:
        requests = recorded(arguments.trace)
        for caching in (True, False):
            for blocks in (64_000, 200_000):
                spec = InstanceSpec(QWEN2_5_7B_H100, kv_blocks=blocks, prefix_caching=caching)
                name = f"8 instances x {blocks:,} blocks, prefix cache {'on' if caching else 'off'}"
                report(name, *run(spec, requests, 8), len(requests))
    spec = InstanceSpec(QWEN2_5_7B_H100, kv_blocks=200_000)
    count = arguments.requests
    many = (
        request(n, n // 8 % (count // 8), 100 + n % 97, 1000 + n * 7919 % 8000)
        for n in range(count)
    )
    report(f"{arguments.instances} instances", *run(spec, many, arguments.instances), count)


if __name__ == "__main__":
    main()
