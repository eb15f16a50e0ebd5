"""Runs a scene with gateways, servers and clients in one process in virtual time, its sockets in
memory: the same steps in the same order on every machine, however busy it is.

A test that is about a real socket, a process, or a thread that blocks takes `asyncio.run`.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import events
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollout_sched.store.disk import Disk
from tests.simulation.kernel import Kernel, Process
from tests.simulation.network import Network
from tests.simulation.seams import simulated

T = TypeVar("T")

log = logging.getLogger("asyncio")

#: Seconds of a packet on the way.
LATENCY_S = 0.00001

#: Virtual seconds that a scene may take.
LIMIT_S = 3600.0


def run(scene: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`. Raises TimeoutError after LIMIT_S, and Stuck where nothing is left that could
    wake the scene."""
    kernel = Kernel()  # type: ignore[abstract]  # no I/O, on purpose
    network = Network(kernel, 0, LATENCY_S)
    process = _Process(kernel, "scene", "127.0.0.1")  # type: ignore[abstract]
    process.network = network
    try:
        with simulated(kernel, 0, lambda folder: Disk()):
            try:
                return _finish(process, _limited(scene))
            finally:
                _finish(process, _cancel_the_rest(process))
    finally:
        process.forget()
        network.close()
        kernel.close()


class _Process(Process):
    """What a callback raises is logged, as by asyncio, and ends nothing."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        log.error("%s", context["message"], exc_info=context.get("exception"))


def _finish(process: Process, main: Coroutine[Any, Any, T]) -> T:
    over = process.kernel.create_future()
    running = events._get_running_loop()
    events._set_running_loop(process)
    try:
        task = process.create_task(main)
    finally:
        events._set_running_loop(running)
    task.add_done_callback(over.set_result)
    process.kernel.run_until_complete(over)
    return task.result()  # type: ignore[no-any-return]


async def _limited(scene: Coroutine[Any, Any, T]) -> T:
    async with asyncio.timeout(LIMIT_S):
        return await scene


async def _cancel_the_rest(process: Process) -> None:
    rest = [task for task in process.tasks if task is not asyncio.current_task()]
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
