"""A gateway before two simulated servers, with a trainer at work, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_sched.client import Prompt, Reload, RolloutScheduler
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from rollout_sched.simulators.replay.scenario import load_scenario

KEY = "the-admin-key"
STEPS = 300
UP_S = 60.0


class LiveWorld:
    """`url` of the gateway; `service` is of the thread's loop: see `call`."""

    def __init__(self, folder: Path, port: int) -> None:
        self.url = ""
        self.service: Service
        self.failed: BaseException | None = None
        self._folder = folder
        self._port = port
        self._up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._up.wait(UP_S), self.failed
        assert self.url, self.failed

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(UP_S)
        assert not self._thread.is_alive()
        assert self.failed is None, self.failed

    def lose_one(self) -> None:
        """An instance is removed."""
        name = next(iter(self.service.gateway.driver.supervisors))
        future = asyncio.run_coroutine_threadsafe(self.service.gateway.remove(name), self._loop)
        future.result(UP_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._work())
        except BaseException as error:
            self.failed = error
        finally:
            self._up.set()

    async def _work(self) -> None:
        spec = load_scenario("qwen7b-8xh100").instance
        servers = [FakeServer(EngineSettings(spec, speed=4.0, seed=seed)) for seed in range(2)]
        ports = [await server.start("127.0.0.1", 0) for server in servers]
        key_file = self._folder / "keys"
        key_file.write_text(KEY + "\n")
        self.service = Service(
            Options(
                policy="areal",
                instances=[f"http://127.0.0.1:{port}" for port in ports],
                port=self._port,
                prompts_per_step=4,
                admin_key_file=key_file,
                grace_s=0.5,
            ),
            lambda said: None,
        )
        for version in range(1, STEPS + 1):
            (self._folder / str(version)).mkdir(exist_ok=True)
        await self.service.open()
        self.url = self.service.url
        self._up.set()
        training = asyncio.create_task(self._train())
        await self._stop.wait()
        training.cancel()
        await self.service.close()
        for server in servers:
            await server.close()

    async def _train(self) -> None:
        async with RolloutScheduler.connect(self.url, key=KEY) as rollouts:
            for step in range(STEPS):
                prompts = [
                    Prompt(f"p{step}-{n}", [1] * 50, samples=4, max_tokens=2000) for n in range(4)
                ]
                await rollouts.submit(prompts)
                if step:
                    batch = await anext(rollouts.batches())
                    weights = Reload(f"{self._folder}/{{version}}", visible_here=False)
                    await rollouts.publish_weights(batch.version + 1, weights)


@contextmanager
def live_world(folder: Path, port: int = 0) -> Iterator[LiveWorld]:
    world = LiveWorld(folder, port)
    world.start()
    try:
        yield world
    finally:
        world.end()
