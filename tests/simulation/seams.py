"""Where the program meets the machine, and what stands there in a simulation.

The clock, what is drawn by chance, threads and the disk; the network and executors are asked of the
event loop, which is ours anyway. All of it in one list, so that it can be seen what is not real.
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

#: Unix time at which every simulation begins.
BEGAN = 1_700_000_000.0

#: Bytes of a file of tokens, so that a run fills some.
CAPACITY = 2**16


@contextmanager
def simulated(kernel: Kernel, seed: int, disk_of: Callable[[Path], Any]) -> Iterator[None]:
    """Within it the program sees virtual time, seeded dice, threads that take turns, and the disks
    that `disk_of` gives for the folders of stores."""
    dice = random.Random(f"secrets/{seed}")

    def open_store(folder: Path, **other: Any) -> Store:
        return Store(folder, disk=disk_of(folder), capacity=CAPACITY, **other)

    replaced: dict[str, Any] = {
        "time.time": lambda: BEGAN + kernel.time(),
        "time.monotonic": kernel.time,
        "aiohttp.connector.monotonic": kernel.time,
        "secrets.token_hex": lambda size=16: dice.randbytes(size).hex(),
        "os.getpid": lambda: 1,
        "socket.gethostname": lambda: "simulated",
        "rollout_sched.store.writer.Thread": threads.SimulatedThread,
        "rollout_sched.store.writer.Condition": threads.SimulatedCondition,
        "rollout_sched.client.heartbeat.LoopThread": threads.SimulatedLoopThread,
        "rollout_sched.live.stored_run.Store": open_store,
    }
    assert {time, secrets, os, socket}  # whose names stand above
    with ExitStack() as stack:
        for name, stand_in in replaced.items():
            stack.enter_context(mock.patch(name, stand_in))
        yield
