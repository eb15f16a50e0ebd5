"""The interfaces of the program to the machine, and their replacements in a simulation.

They are the clock, random numbers, threads and the disk; the network and executors belong to the
event loop, which is simulated anyway. All are in one list, which shows everything that is not real.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from rollout_sched.store.store import Store
from tests.simulation import threads
from tests.simulation.kernel import Kernel

#: Unix time at which every simulation starts.
BEGAN = 1_700_000_000.0


@contextmanager
def simulated(kernel: Kernel, seed: int, disk_of: Callable[[Path], Any]) -> Iterator[None]:
    """Within the context the program gets virtual time, seeded random numbers, threads that run one
    at a time, and the disks that `disk_of` returns for the folders of stores."""
    rng = random.Random(f"secrets/{seed}")

    def open_store(folder: Path, **other: Any) -> Store:
        return Store(folder, disk=disk_of(folder), **other)

    replaced: dict[str, Any] = {
        "time.time": lambda: BEGAN + kernel.time(),
        "time.monotonic": kernel.time,
        "aiohttp.connector.monotonic": kernel.time,
        "secrets.token_hex": lambda size=16: rng.randbytes(size).hex(),
        "os.getpid": lambda: 1,
        "socket.gethostname": lambda: "simulated",
        "rollout_sched.process.Thread": threads.SimulatedThread,
        "rollout_sched.store.writer.Thread": threads.SimulatedThread,
        "rollout_sched.store.writer.Condition": threads.SimulatedCondition,
        "rollout_sched.client.remote.client.LoopThread": threads.SimulatedLoopThread,
        "rollout_sched.live.durable.run.Store": open_store,
    }
    assert {time, secrets, os, socket}  # the names above refer to them
    with ExitStack() as stack:
        for name, stand_in in replaced.items():
            stack.enter_context(mock.patch(name, stand_in))
        yield
