"""Simulated instances of a scenario, each a server in its own process."""

from __future__ import annotations

from urllib.request import Request

from benchmarks.live.processes import Processes, free_port, script, url
from rollout_sched.simulators.replay import Scenario

MODEL = "fake"


def start_fleet(scenario: Scenario, file: str, speed: float, processes: Processes) -> list[int]:
    """Start the scenario's instances, `speed` times faster than real time; returns their ports.

    `file`: what `scenario` was read from. Raises StartError.
    """
    return [_start(number, file, speed, processes) for number in range(scenario.fleet.instances)]


def _start(number: int, file: str, speed: float, processes: Processes) -> int:
    port = free_port()
    command = [
        *(script("rollout-sched"), "fake-instance", "--scenario", file),
        *("--speed", str(speed), "--port", str(port), "--model", MODEL),
    ]
    ready = Request(url(port, "/health"))
    processes.start_server(f"instance-{number}", command, None, ready, patience_s=30)
    return port
