"""Leases are renewed while a trainer trains."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from rollout_sched.client.remote import client
from rollout_sched.client.remote.calls import GatewayError, Renewal
from rollout_sched.client.remote.client import Heartbeat

#: Seconds that nothing here comes near to.
LONG_S = 60


class Gateway:
    def __init__(self, *, fails: int = 0) -> None:
        self.beats = threading.Semaphore(0)
        self.asked: list[Any] = []
        self.open_in: str = ""
        self._fails = fails

    async def open(self) -> None:
        self.open_in = threading.current_thread().name

    async def close(self) -> None:
        self.open_in = ""

    async def post(self, path: str, body: Any) -> None:
        self.asked.append((path, body))
        self.beats.release()
        if self._fails:
            self._fails -= 1
            raise GatewayError("refused")


def test_it_beats_in_a_thread_of_its_own_and_outlives_failures() -> None:
    gateway = Gateway(fails=2)
    beating = Heartbeat(gateway, "t1")
    beating.every(0.003)
    for _ in range(5):
        assert gateway.beats.acquire(timeout=LONG_S)
    assert gateway.asked[0] == ("/rollout/v1/batches/renew", Renewal("t1"))
    assert gateway.open_in == "lease"
    beating.close()
    assert gateway.open_in == ""
    assert "lease" not in {thread.name for thread in threading.enumerate()}


def test_a_beat_that_nobody_answers_is_given_up() -> None:
    class Silent(Gateway):
        async def post(self, path: str, body: Any) -> None:
            await super().post(path, body)
            await asyncio.Event().wait()

    gateway = Silent()
    beating = Heartbeat(gateway, "t1")
    beating.every(0.003)
    for _ in range(3):
        assert gateway.beats.acquire(timeout=LONG_S)
    beating.close()


async def test_two_that_nobody_answers_leave_time_for_another_before_the_lease_ends() -> None:
    class Deaf(Gateway):
        async def post(self, path: str, body: Any) -> None:
            self.asked.append(asyncio.get_running_loop().time())
            await asyncio.Event().wait()

    gateway = Deaf()
    beating = asyncio.create_task(Heartbeat(gateway, "t1")._beat(12.0 / client.BEATS))
    await asyncio.sleep(11.9)
    beating.cancel()
    assert len(gateway.asked) == 3


def test_leases_without_end_need_no_thread() -> None:
    before = threading.active_count()
    beating = Heartbeat(Gateway(), "t1")
    beating.every(0.0)
    assert threading.active_count() == before
    beating.every(1000.0)
    assert threading.active_count() == before + 1
    beating.every(1000.0)
    beating.every(0.0)
    assert threading.active_count() == before
    beating.close()


def test_it_beats_so_often_within_a_lease() -> None:
    gateway = Gateway()
    beating = Heartbeat(gateway, "t1")
    begun = time.monotonic()
    beating.every(0.3)
    assert gateway.beats.acquire(timeout=LONG_S)
    assert time.monotonic() - begun >= 0.3 / client.BEATS
    beating.close()
