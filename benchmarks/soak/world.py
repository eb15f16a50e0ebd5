"""The gateway under test and simulated instances, each in its own process, and their controls."""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.live.processes import Processes, free_port, url
from benchmarks.soak.flood import GROUPS
from benchmarks.soak.innocents import MODEL

INSTANCES = 3
#: Speed relative to real time; a token takes a fraction of a millisecond then.
SPEED = 50
KEY = "soak-key"
FLOOD_KEY = "flood-key"
ADMIN_KEY = "admin-key"  # for the trainer too

#: Faults of instances beside hostile clients, each in FAULT_SHARE of the calls.
FAULTS = ("garbage", "cut", "reset", "error_500")
FAULT_SHARE = 0.003

#: The gateway's maximum of memory, so that a bomb ends it and nothing else.
MAX_MEMORY = 6 * 2**30


class World:
    """The started processes; `processes` stops them."""

    def __init__(self, processes: Processes) -> None:
        self.instances = [free_port() for _ in range(INSTANCES)]
        self.port = free_port()
        program = (sys.executable, "-m", "rollout_sched")
        for number, port in enumerate(self.instances):
            command = [
                *(*program, "fake-instance", "--port", str(port), "--model", MODEL),
                *("--speed", str(SPEED), "--stream-interval", "4", "--seed", str(number)),
            ]
            processes.start_server(
                f"instance-{number}", command, None, Request(url(port, "/health")), patience_s=60
            )
        keys = processes.folder / "keys"
        keys.write_text(f"{KEY}\n{FLOOD_KEY}\n")
        admin_keys = processes.folder / "admin-keys"
        admin_keys.write_text(f"{ADMIN_KEY}\n")
        command = [
            *program,
            "serve",
            "--policy",
            "dplb",
            "--port",
            str(self.port),
            "--drain-s",
            "0",
        ]
        command += ["--api-key-file", str(keys), "--admin-key-file", str(admin_keys)]
        command += ["--prompts-per-step", str(GROUPS)]
        for port in self.instances:
            command += ["--instance", url(port)]
        self.gateway = processes.start_server(
            "gateway", command, None, Request(url(self.port, "/health")), patience_s=60
        )
        resource.prlimit(self.gateway.pid, resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
        self._log = processes.folder / "gateway.log"

    def faults(self, share: float) -> None:
        """Every instance makes each fault in this share of its calls; 0: none."""
        for port in self.instances:
            _call("DELETE", port, "/fake/fault")
            for kind in FAULTS if share else ():
                _call("POST", port, "/fake/fault", {"fault": kind, "probability": share})

    def left(self) -> str:
        """What the gateway still holds, in words; "" if it is as empty as at the start."""
        calls = _call("GET", self.port, "/admin/state")["calls"]
        told = [f"{name} {calls[name]}" for name in ("open", "open_bytes") if calls[name]]
        for instance in _call("GET", self.port, "/admin/instances"):
            if instance["in_flight"]:
                told.append(f"{instance['in_flight']} in flight on {instance['id']}")
        return ", ".join(told)

    @property
    def memory(self) -> int:
        """Bytes of the gateway in memory; 0 if it has ended."""
        try:
            with open(f"/proc/{self.gateway.pid}/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0

    def tracebacks(self) -> int:
        """How many tracebacks the gateway has logged."""
        return self._log.read_bytes().count(b"Traceback (most recent call last)")


def _call(method: str, port: int, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {ADMIN_KEY}"}
    request = Request(url(port, path), data, headers, method=method)
    with urlopen(request, timeout=10) as answer:
        text = answer.read()
    return json.loads(text) if text else None
