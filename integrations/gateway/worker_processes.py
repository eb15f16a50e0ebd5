"""`serve --workers N`: further processes take the calls of clients, each a front of the scheduler
in this one (`rollout_sched.link`), which keeps the control plane at a port of its own.

All workers listen at one port (SO_REUSEPORT), and the kernel spreads the connections over them. A
worker that dies loses the calls on its connections, and is started again. What a worker is to do
comes to its stdin, which stays open: a worker whose scheduler's process is gone sees its end, and
stops as at SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import msgspec

from rollout_sched import process as event_loop
from rollout_sched import process as log_lines
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.front_service import FrontService
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.link import Hub, LinkDialler, LinkListener, SchedulerPlace

log = logging.getLogger(__name__)

#: Seconds until a worker that has ended is started again.
AGAIN_S = 0.5

#: Seconds that a worker may take to end beyond those that its calls get.
END_S = 5.0

_READY = b"ready\n"

#: Stop at once, but for the grace period of running calls.
_STOP = signal.SIGUSR1

#: Ctrl-C in a terminal, which sends SIGINT to all, is for the scheduler's process.
_PROGRAM = f"""
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from {__name__} import main
main()
"""


class Orders(msgspec.Struct, frozen=True):
    """What a worker gets: its name, the gateway's options with the host and port of the workers,
    where its scheduler listens for it, and the URL of the control plane."""

    name: str
    options: Options
    place: SchedulerPlace
    control_url: str


class WorkerProcesses:
    """Keeps `options.workers` workers running. Create it before an instance joins."""

    def __init__(self, options: Options, hub: Hub) -> None:
        self._options = options
        self._key = secrets.token_urlsafe()
        self._listener = LinkListener(hub, self._key)
        self._held: socket.socket | None = None
        self._running: dict[str, Process] = {}
        self._kept: list[asyncio.Task[None]] = []

    async def open(self, control_url: str) -> int:
        """Returns the port of the workers when every one is connected. Raises CallerError if one
        does not start, OSError if the port is taken."""
        self._held = _held(self._options.host, self._options.port)
        port: int = self._held.getsockname()[1]
        options = msgspec.structs.replace(self._options, port=port)
        place = SchedulerPlace("127.0.0.1", await self._listener.open("127.0.0.1"), self._key)
        names = [f"worker-{number}" for number in range(options.workers)]
        orders = [Orders(name, options, place, control_url) for name in names]
        started = await asyncio.gather(*map(self._start, orders))
        if not all(started):
            raise CallerError("a worker did not start; the log says why")
        self._kept = [asyncio.create_task(self._keep(one)) for one in orders]
        return port

    def leave(self) -> None:
        """Say at /health that they stop, and stop after `drain_s` seconds and the grace period."""
        self._signal(signal.SIGTERM)

    async def close(self) -> None:
        """Stop all: running calls may finish within the grace period."""
        for kept in self._kept:
            kept.cancel()
        await asyncio.gather(*self._kept, return_exceptions=True)
        self._signal(_STOP)
        ends = [asyncio.create_task(process.wait()) for process in self._running.values()]
        if ends:
            await asyncio.wait(ends, timeout=self._options.grace_s + END_S)
        self._signal(signal.SIGKILL)
        await asyncio.gather(*ends)
        self._listener.close()
        if self._held is not None:
            self._held.close()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _start(self, orders: Orders) -> bool:
        """Whether it listens and is connected to the scheduler."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _PROGRAM, stdin=PIPE, stdout=PIPE
        )
        self._running[orders.name] = process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(orders, enc_hook=str) + b"\n")
        ready = await process.stdout.readline() == _READY
        if ready:
            log.info("%s listens (process %d)", orders.name, process.pid)
        return ready

    async def _keep(self, orders: Orders) -> None:
        """Start the worker again whenever it ends."""
        while True:
            code = await self._running[orders.name].wait()
            log.error("%s has ended (%d) and is started again", orders.name, code)
            await asyncio.sleep(AGAIN_S)
            await self._start(orders)


def _held(host: str, port: int) -> socket.socket:
    """A socket that keeps the port for the workers; port 0 picks a free one. Raises OSError, also
    if workers of another gateway have it: with SO_REUSEPORT alone, both would get calls."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
    held = socket.socket(family, kind, proto)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(address)
    except OSError:
        held.close()
        raise
    return held


# ------------------------------------------------------------------------------------------
# A worker.


async def _work(orders: Orders) -> None:
    loop = asyncio.get_running_loop()
    leaving, stopping = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        leaving.set()
        stopping.set()

    async def locate() -> SchedulerPlace:
        return orders.place

    def broken(error: Exception) -> None:
        dialler.hang_up()

    loop.add_signal_handler(signal.SIGTERM, leaving.set)
    loop.add_signal_handler(_STOP, stop)
    front = FrontService(orders.name, orders.options, shares_port=True, on_broken=broken)
    front.app.scheduler_url = orders.control_url
    dialler = LinkDialler(front.calls, orders.name, locate)
    await front.open()
    dialler.open()
    while not front.calls.connected:
        await asyncio.sleep(0.01)
    event_loop.spare_the_collector()
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    orphaned = asyncio.create_task(reader.read())
    orphaned.add_done_callback(lambda _: leaving.set())
    await leaving.wait()
    front.app.leaving = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(orders.options.drain_s):
            await stopping.wait()
    await front.close()
    await dialler.close()


def _path(kind: type, value: Any) -> Path:
    return Path(value)


def main() -> None:
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders, dec_hook=_path)
    log_lines.set_up(orders.options.log_level, orders.options.log_format)
    try:
        event_loop.run(_work(orders))
    except (CallerError, OSError) as error:
        sys.exit(f"{orders.name}: {error}")
