"""Programs under test: started on a core, in their own sessions, and always stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from urllib.error import URLError
from urllib.request import Request, urlopen

from benchmarks.live.machine import CORES

LOOPBACK = "127.0.0.1"


class StartError(RuntimeError):
    """A program did not start; the text has the end of its output."""


class Processes:
    """All started programs, in a temporary folder with their logs and built programs."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="bench_live_")
        self.folder = Path(self._temporary.name)
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Processes:
        # Without this a terminated benchmark would leave its programs running.
        self._before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._running:
            stop(process)
        self._temporary.cleanup()
        signal.signal(signal.SIGTERM, self._before)

    @property
    def sessions(self) -> list[int]:
        """The sessions of all programs started so far, for `machine.usage`."""
        return [process.pid for process in self._running]

    def start(self, name: str, command: Sequence[str], core: int | None) -> subprocess.Popen[bytes]:
        """Start a program; its output goes to NAME.log in the folder."""
        with open(self.folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: pin(core),
            )
        self._running.append(process)
        return process

    def start_server(
        self, name: str, command: Sequence[str], core: int | None, ready: Request, patience_s: float
    ) -> subprocess.Popen[bytes]:
        """Start a program and wait until it answers `ready` with 200.

        Raises StartError if it exits or takes longer; it is stopped in that case.
        """
        process = self.start(name, command, core)
        give_up = time.monotonic() + patience_s
        while time.monotonic() < give_up and process.poll() is None:
            try:
                with urlopen(ready, timeout=5) as answer:
                    if answer.status == 200:
                        return process
            except (URLError, OSError):
                time.sleep(0.2)
        exit_code = process.poll()
        stop(process)
        wrote = (self.folder / f"{name}.log").read_text("utf-8", "replace")[-1500:]
        said = f"did not answer within {patience_s:.0f} s" if exit_code is None else "exited"
        raise StartError(f"{name} {said}; it wrote:\n{wrote}")

    def build(self, source: Path) -> Path:
        """Compile a C program of one file."""
        program = self.folder / source.stem
        subprocess.run(["cc", "-O2", "-o", str(program), str(source)], check=True)
        return program


def pin(core: int | None) -> None:
    """Pin the calling process to a core, if there are several; None does not pin it."""
    if core is not None and core < CORES:
        os.sched_setaffinity(0, {core})


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a program and all processes of its group: ask first, kill after five seconds."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        try:
            os.killpg(process.pid, signal_number)
            process.wait(5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def url(port: int, path: str = "") -> str:
    """The address of a path on a port of this machine."""
    return f"http://{LOOPBACK}:{port}{path}"


def script(name: str) -> str:
    """The path of a command installed next to the running Python."""
    return str(Path(sys.executable).parent / name)
