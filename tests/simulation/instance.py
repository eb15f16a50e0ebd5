"""A simulated vLLM server; each start is a separate process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.soak.innocents import MODEL
from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from rollout_sched.simulators.instance.model import CostModel, InstanceSpec
from tests.simulation import models
from tests.simulation.kernel import Process
from tests.simulation.plan import STEP_S

if TYPE_CHECKING:
    from tests.simulation.world import World

PORT = 8000

#: Seconds of a weight load.
LOAD_S = 0.3

#: Median length of responses without a requested length.
MEDIAN_TOKENS = 60


class Instance:
    """`server`: the current server; None while it is away."""

    def __init__(self, world: World, number: int) -> None:
        self.number = number
        self.host = f"127.0.1.{number + 1}"
        self.url = f"http://{self.host}:{PORT}"
        self.server: FakeServer | None = None
        self._world = world
        self.process: Process | None = None

    def start(self, label: str = "default", model: str = "") -> None:
        plan = self._world.plan
        self._world.network.back(self.host)
        spec = InstanceSpec(
            cost=CostModel(step_s=STEP_S, weights_s=0.0, token_s=0.0),
            kv_blocks=plan.kv_blocks,
            block_size=16,
            max_num_seqs=plan.slots,
            max_num_batched_tokens=512,
            max_model_len=1600,
        )
        settings = EngineSettings(
            spec,
            model=model or MODEL,
            seed=plan.seed,
            update_s=LOAD_S,
            median_tokens=MEDIAN_TOKENS,
            stream_interval=4,
            versioned_text=plan.versioned,
            weight_version=label,
            vocabulary=models.WORDS[model or MODEL],
        )
        process = self.process = self._world.spawn(f"instance {self.number}", self.host)
        process.start(self._main(settings))

    async def _main(self, settings: EngineSettings) -> None:
        self.server = FakeServer(settings)
        await self.server.start(self.host, PORT)

    def die(self, *, silently: bool) -> None:
        process, self.process, self.server = self.process, None, None
        if process is not None:
            process.kill()
            self._world.network.gone(process, silently=silently)

    @property
    def busy(self) -> int:
        """Requests in flight."""
        return 0 if self.server is None else self.server.engine.unanswered
