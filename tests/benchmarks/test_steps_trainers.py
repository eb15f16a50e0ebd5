"""Both trainers in front of one simulated instance."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from benchmarks.live.rollout_steps import fold
from benchmarks.live.simulated_fleet import MODEL
from benchmarks.live.steps_job import job_of
from benchmarks.live.steps_trainers import load_weights, train_in_lock_step, train_on_batches
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from rollout_sched.simulators.replay.scenario import load_scenario
from rollout_sched.simulators.traces.model import SampleRecord, Trace, Turn

SPEED = 200.0
LENGTHS = (5, 80, 7, 9)


def job():
    scenario = load_scenario("benchmarks/live/few_slots.toml")
    groups = {
        f"g{number}": [
            SampleRecord(f"g{number}", index, 10, (Turn(LENGTHS[number] + index),))
            for index in range(2)
        ]
        for number in range(4)
    }
    trace = Trace("small", groups, max_response_tokens=128)
    return job_of(trace, scenario, 0, steps=2, prompts_per_step=2, samples=2, speed=SPEED)


@asynccontextmanager
async def instance():
    server = FakeServer(EngineSettings(job().scenario.instance, model=MODEL, speed=SPEED))
    port = await server.start("127.0.0.1", 0)
    try:
        yield port
    finally:
        await server.close()


def check_times(trained):
    """Two steps, each followed by a training of five seconds and more."""
    fixed_s = job().scenario.trainer.fixed_s
    assert len(trained.steps_s) == 2
    assert trained.steps_s[1] >= fixed_s
    assert trained.total_s >= sum(trained.steps_s) + fixed_s


def test_in_lock_step():
    async def scene():
        async with instance() as port:
            return await train_in_lock_step(job(), [port], [port], "a")

    trained = asyncio.run(scene())
    assert trained.failures == []
    assert trained.ages == [0] * 8
    check_times(trained)


def test_weights_that_cannot_be_loaded_are_a_failure(monkeypatch):
    async def scene():
        monkeypatch.setattr("benchmarks.live.steps_trainers.WEIGHTS", "/not/there")
        async with instance() as port:
            return await load_weights([port])

    (failure,) = asyncio.run(scene())
    assert failure.startswith("weights: 500")


@pytest.mark.parametrize("policy", ["round_robin_sync", "tail_batching", "areal", "streamed_sync"])
def test_on_batches(policy, tmp_path):
    file = tmp_path / "journal"

    async def scene():
        async with instance() as port:
            options = Options(
                policy=policy,
                instances=[f"http://127.0.0.1:{port}"],
                port=0,
                prompts_per_step=2,
                journal=file,
                start_version=3,
            )
            service = Service(options, lambda line: None)
            await service.open()
            try:
                gateway = int(service.url.rpartition(":")[2])
                return await train_on_batches(job(), gateway, 1, "a")
            finally:
                await service.close()

    trained = asyncio.run(scene())
    assert trained.failures == []
    assert trained.samples == 8
    assert trained.version == 4  # one update, between the two batches
    check_times(trained)
    books = fold(file, policy, job())
    assert 0 <= books.discarded < 1
    assert 0 < books.idle < 1
    assert books.anomalies == {}
