"""Workers: real processes that take clients' calls for the scheduler in the test's."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from tests.integrations.faults.fleet import SPEC
from tests.live.scripted import until

pytestmark = pytest.mark.real_time(240)

ATTEMPTS = "rollout_sched_attempts_total 16.0"
ROUTE = "/v1/completions"
CALL = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
#: Bounds of waits for processes, on a busy machine: no test waits so long for what comes.
LONG_S = 60.0


@asynccontextmanager
async def serving(**other: Any) -> AsyncIterator[tuple[Service, str]]:
    """A gateway with workers before one simulated server, and the URL for clients."""
    server = FakeServer(EngineSettings(SPEC, speed=20.0, seed=1))
    instance = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}"
    options = {"policy": "dplb", "port": 0, "workers": 2, "grace_s": LONG_S, "drain_s": 0.5}
    said: list[str] = []
    service = Service(Options(**options | {"instances": [instance]} | other), said.append)
    try:
        await service.open()
        found = re.fullmatch(r"listening on (\S+), with \d workers", said[-1])
        assert found is not None
        yield service, found[1]
    finally:
        await service.close()
        await server.close()


def pids(service: Service) -> list[int]:
    assert service._workers is not None
    return [process.pid for process in service._workers._running.values()]


async def complete(url: str, **other: Any) -> Any:
    """One call on a connection of its own."""
    async with aiohttp.ClientSession(url) as client, client.post(ROUTE, json=CALL | other) as got:
        return got.status, await got.json()


async def test_workers_take_calls_and_the_scheduler_everything_else() -> None:
    async with serving() as (service, url):
        assert url != service.url
        answers = await asyncio.gather(*(complete(url) for _ in range(16)))
        assert {status for status, _ in answers} == {200}
        assert {answer["usage"]["completion_tokens"] for _, answer in answers} == {4}
        async with aiohttp.ClientSession() as client:
            async with client.get(f"{url}/metrics") as response:
                assert str(response.url) == f"{service.url}/metrics"
                assert ATTEMPTS in await response.text()
            async with client.get(f"{url}/health") as response:
                assert (response.status, response.history) == (200, ())


async def test_a_worker_that_dies_is_started_again() -> None:
    async with serving() as (service, url):
        before = pids(service)
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: pids(service)[0] != before[0], LONG_S)
        assert service._workers is not None
        await until(lambda: len(service._workers._listener.fronts) == 2, LONG_S)
        answers = await asyncio.gather(*(complete(url) for _ in range(16)))
        assert {status for status, _ in answers} == {200}
        assert pids(service)[1] == before[1]


async def test_workers_that_leave_say_so_and_finish_their_calls() -> None:
    async with serving() as (service, url):
        running = asyncio.create_task(complete(url, max_tokens=400))
        await until(lambda: service.live.driver.view.in_flight == 1, LONG_S)
        processes = pids(service)
        async with aiohttp.ClientSession() as client:  # connected before they leave
            async with client.get(f"{url}/health") as response:
                assert response.status == 200
            service.leave()
            for _ in range(1000):
                async with client.get(f"{url}/health") as response:
                    if response.status == 503:
                        break
            else:
                pytest.fail("/health does not say that it leaves")
        await service.close()
        status, answer = await running
        assert (status, answer["usage"]["completion_tokens"]) == (200, 400)
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_two_gateways_do_not_share_a_port() -> None:
    async with serving(workers=1) as (_, url):
        with pytest.raises(OSError, match="in use"):
            async with serving(workers=1, port=int(url.rpartition(":")[2])):
                pass


async def test_a_worker_that_does_not_start_ends_the_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CallerError, match="a worker did not start"):
        async with serving(workers=1):
            pass


def test_workers_stop_with_their_scheduler() -> None:
    command = [sys.executable, "-m", "rollout_sched", "serve", "--policy", "dplb", "--workers", "1"]
    instance = ["--instance", "http://127.0.0.1:9", "--drain-s", "0", "--port", "0"]
    with subprocess.Popen([*command, *instance], stderr=subprocess.PIPE, text=True) as gateway:
        assert gateway.stderr is not None
        assert any("worker-0 listens" in line for line in gateway.stderr)
        gateway.kill()
        # The worker has the same stderr, which ends with it.
        gateway.communicate(timeout=LONG_S)
