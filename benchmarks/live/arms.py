"""The arms of a comparison: the command lines of every router, including ours.

An arm's command starts one process that listens on a port and distributes requests over the
instances. All are configured to balance by count and to log errors only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request

from benchmarks.live.processes import LOOPBACK, Processes, free_port, script, url

HERE = Path(__file__).parent

#: Virtual environments of the other routers and of our compiled build, made by `make bench-live`.
PEERS = Path(os.environ.get("PEERS", HERE.parents[1] / ".venv-peers"))
COMPILED = Path(os.environ.get("COMPILED", HERE.parents[1] / ".venv-compiled"))
COMPILED_PROGRAM = str(COMPILED / "bin/rollout-sched")

#: The virtual environment of another version of ours to compare with; "" for none.
BEFORE = os.environ.get("BEFORE", "")

#: The router that all figures are relative to.
REFERENCE = "vllm-router"
OURS = "rollout-sched"


@dataclass(frozen=True)
class Place:
    """Where an arm runs: its port, the instances' ports, a folder for its files."""

    port: int
    instances: Sequence[int]
    folder: Path

    @property
    def urls(self) -> list[str]:
        return [url(port) for port in self.instances]


Command = Callable[[Place], list[str]]


@dataclass(frozen=True)
class Arm:
    """A way to the instances. `command` None: the client connects directly, in turn."""

    name: str
    command: Command | None

    @property
    def missing(self) -> str:
        """The reason why it cannot run here, with the remedy; "" if it can."""
        if self.command is None:
            return ""
        program = self.command(Place(0, [], HERE))[0]
        if shutil.which(program):
            return ""
        remedy = "`make bench-live` installs it" if "/" in program else "install it"
        return f"{self.name} is left out: {program} is not installed; {remedy}"


@dataclass(frozen=True)
class Running:
    """An arm that is ready: its address, and the process that does the work, if there is one."""

    arm: Arm
    ports: Sequence[int]
    process: subprocess.Popen[bytes] | None

    @property
    def sessions(self) -> list[int]:
        return [self.process.pid] if self.process else []


def start(
    arms: Sequence[Arm],
    instances: Sequence[int],
    processes: Processes,
    core: int | None,
    model: str,
) -> list[Running]:
    """Start every arm that can run, once; the others are idle while one is measured.

    Prints the arms that cannot run, with the reason. Raises StartError if one does not answer.
    """
    running = []
    for arm in arms:
        if arm.missing:
            print(arm.missing, flush=True)
        elif arm.command is None:
            running.append(Running(arm, instances, None))
        else:
            running.append(_start_one(arm, arm.command, instances, processes, core, model))
    return running


def _start_one(
    arm: Arm,
    command: Command,
    instances: Sequence[int],
    processes: Processes,
    core: int | None,
    model: str,
) -> Running:
    port = free_port()
    body = b'{"model":"%s","prompt":"Are you there?","max_tokens":1}' % model.encode()
    ready = Request(url(port, "/v1/completions"), body, {"Content-Type": "application/json"})
    place = Place(port, instances, processes.folder)
    process = processes.start_server(arm.name, command(place), core, ready, patience_s=60)
    return Running(arm, [port], process)


def interpreted() -> Arm:
    """Ours, interpreted, from the checkout."""
    return ours(f"{OURS}-interpreted", script("rollout-sched"))


def ours(name: str = OURS, program: str = COMPILED_PROGRAM, *more: str) -> Arm:
    """The gateway with its scheduler, under `dplb`; compiled. `more`: further flags."""

    def command(place: Place) -> list[str]:
        instances = [word for address in place.urls for word in ("--instance", address)]
        port = str(place.port)
        flags = [*instances, "--port", port, "--drain-s", "0", *more]
        return [program, "serve", "--policy", "dplb", *flags]

    return Arm(name, command)


def workers() -> list[Arm]:
    """Ours with further processes for clients' calls, on the core of one."""
    return [
        ours(f"{OURS}-workers-{count}", COMPILED_PROGRAM, "--workers", str(count))
        for count in (1, 2, 4)
    ]


def before() -> list[Arm]:
    """The version of ours in BEFORE, if set."""
    if not BEFORE:
        return []
    return [ours(f"{OURS}-before", str(Path(BEFORE).absolute() / "bin/rollout-sched"))]


def vllm_router(name: str = REFERENCE, policy: str = "round_robin") -> Arm:
    """The router of the vLLM project."""
    return _rust_router(name, [str(PEERS / "bin/vllm-router")], policy)


def sglang_router(name: str = "sglang-router", policy: str = "round_robin") -> Arm:
    """The router of the SGLang project; it takes no token-id prompts on /v1/completions."""
    return _rust_router(name, [str(PEERS / "bin/sglang-router"), "launch"], policy)


def _rust_router(name: str, program: list[str], policy: str) -> Arm:
    def command(place: Place) -> list[str]:
        options = {
            "--host": LOOPBACK,
            "--port": str(place.port),
            "--prometheus-port": str(free_port()),
            "--policy": policy,
            "--log-level": "error",
        }
        words = [word for option in options.items() for word in option]
        return [*program, *words, "--worker-urls", *place.urls]

    return Arm(name, command)


def nginx() -> Arm:
    """The nginx on the PATH."""
    program = shutil.which("nginx") or "nginx"

    def command(place: Place) -> list[str]:
        folder = place.folder
        file = folder / f"nginx-{place.port}.conf"
        if place.instances:
            file.write_text(_nginx_conf(place))
        return [program, "-p", str(folder), "-c", str(file), "-e", str(folder / "nginx.err")]

    return Arm("nginx", command)


def _nginx_conf(place: Place) -> str:
    servers = "\n".join(f"    server {LOOPBACK}:{port};" for port in place.instances)
    text = (HERE / "nginx.conf").read_text()
    for mark, value in (
        ("FOLDER", str(place.folder)),
        ("LISTEN", f"{LOOPBACK}:{place.port}"),
        ("SERVERS", servers.strip()),
    ):
        text = text.replace(f"@{mark}@", value)
    return text


def direct() -> Arm:
    """No router: the client itself uses the instances in turn."""
    return Arm("direct", None)
