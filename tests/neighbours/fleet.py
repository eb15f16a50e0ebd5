"""A gateway before simulated servers, each a process of its own: what neighbours are pointed at.

    with fleet(2, fake=["--vocab-size", "512"]) as ours:
        client = OpenAI(base_url=f"{ours.url}/v1", api_key="none")

Ports are the system's; a program counts as started when it says so, and stops by its own process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Seconds until a program is ready, on a machine that does much else besides.
PATIENCE_S = 120.0

#: Seconds between two looks at what a program has written.
_LOOK_S = 0.05

#: Seconds for which a gateway answers /metrics with the same document.
_KEPT_S = 1.0


class StartError(RuntimeError):
    """A program did not come up; the text holds what it wrote."""


@dataclass(frozen=True)
class Program:
    """A server that runs. `log` is the file of what it writes; `pid` its process, for who kills
    it."""

    url: str
    log: Path
    pid: int

    def get(self, path: str) -> Any:
        """The JSON answer to a GET. Raises urllib.error.URLError."""
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def post(self, path: str, body: object) -> Any:
        """The JSON answer to a POST of JSON. Raises urllib.error.URLError."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def metric(self, name: str) -> float:
        """The sum over its labels of a metric of its /metrics; KeyError if it has none. A gateway
        gives the same document for a second, so an older one is waited out."""
        time.sleep(_KEPT_S)
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        values = [
            line.rsplit(" ", 1) for line in lines if line.startswith((f"{name} ", name + "{"))
        ]
        if not values:
            raise KeyError(name)
        return sum(float(value) for _, value in values)


@dataclass(frozen=True)
class Fleet:
    """A gateway and the servers it was given."""

    gateway: Program
    instances: list[Program]

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def model(self) -> str:
        """The name that its servers know theirs by."""
        return str(self.gateway.get("/v1/models")["data"][0]["id"])


@contextmanager
def fleet(
    instances: int = 2,
    *,
    policy: str = "dplb",
    fake: Sequence[str] = (),
    serve: Sequence[str] = (),
) -> Iterator[Fleet]:
    """So many simulated servers with the options `fake`, behind a gateway with the options `serve`.

    All have joined when it begins. Raises StartError.
    """
    with ExitStack() as stack:
        servers = [stack.enter_context(fake_instance(*fake)) for _ in range(instances)]
        urls = [server.url for server in servers]
        yield Fleet(stack.enter_context(gateway(urls, *serve, policy=policy)), servers)


@contextmanager
def fake_instance(*options: str) -> Iterator[Program]:
    """`rollout-sched fake-instance`. Raises StartError."""
    with program(["fake-instance", "--port", "0", *options], " ready on ") as running:
        yield running


@contextmanager
def gateway(urls: Sequence[str], *options: str, policy: str = "dplb") -> Iterator[Program]:
    """`rollout-sched serve` before the servers at these URLs. Raises StartError."""
    instances = [word for url in urls for word in ("--instance", url)]
    command = ["serve", "--policy", policy, "--port", "0", "--drain-s", "0", *instances, *options]
    with program(command, "listening on ") as running:
        yield running


@contextmanager
def program(arguments: Sequence[str], ready: str) -> Iterator[Program]:
    """`rollout-sched` with these arguments, from when it writes a line of `ready` and its URL.

    Raises StartError.
    """
    with tempfile.TemporaryDirectory(prefix="rollout_sched_") as folder:
        log = Path(folder, "log")
        with log.open("wb") as into:
            command = [sys.executable, "-m", "rollout_sched", *arguments]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=into, stderr=subprocess.STDOUT
            )
        try:
            yield Program(_url(process, log, ready), log, process.pid)
        finally:
            _stop(process)


def _url(process: subprocess.Popen[bytes], log: Path, ready: str) -> str:
    give_up = time.monotonic() + PATIENCE_S
    while True:
        ended = process.poll() is not None
        wrote = log.read_text("utf-8", "replace")
        for line in wrote.splitlines(keepends=True):
            if ready in line and line.endswith("\n"):
                return line.split(ready)[1].strip()
        if ended or time.monotonic() > give_up:
            said = "ended" if ended else f"was not ready within {PATIENCE_S:.0f} s"
            raise StartError(f"{' '.join(map(str, process.args))} {said}; it wrote:\n{wrote}")
        time.sleep(_LOOK_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask first; who still serves after the gateway's grace is killed."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
