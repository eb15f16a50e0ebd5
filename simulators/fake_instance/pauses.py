"""The pauses of a realtime instance: who waits for one, and the gauges, which stand still in it."""

from __future__ import annotations

import asyncio
from collections import deque

from rollout_sched.live.ports import Gauges
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.instance.sim_request import PauseMode


class Pauses:
    """Of one instance. As in vLLM, a paused one shows the gauges of before."""

    def __init__(self, engine: SimInstance) -> None:
        self._engine = engine
        self._asked: deque[tuple[PauseMode, asyncio.Future[None]]] = deque()
        self._frozen = False
        self._gauges = _look(engine)

    def ask(self, mode: PauseMode) -> asyncio.Future[None]:
        """Done when the instance is paused. Its gauges stand still from now on, but where running
        requests are finished first."""
        if mode != "wait":
            self._frozen = True
        paused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.append((mode, paused))
        return paused

    def confirm(self, mode: PauseMode) -> None:
        """The instance is paused."""
        asked = next(pause for pause in self._asked if pause[0] == mode)
        self._asked.remove(asked)
        if mode == "wait":
            self._gauges = _look(self._engine)
            self._frozen = self._engine.paused  # it may have been resumed meanwhile
        if not asked[1].done():
            asked[1].set_result(None)

    def end(self) -> None:
        """It goes on."""
        self._frozen = False

    def gauges(self) -> Gauges:
        if not self._frozen:
            self._gauges = _look(self._engine)
        return self._gauges

    def fail(self, error: Exception) -> None:
        """Whoever waits gets an error."""
        for _, paused in self._asked:
            if not paused.done():
                paused.set_exception(error)
        self._asked.clear()


def _look(engine: SimInstance) -> Gauges:
    gauges = engine.gauges()
    return Gauges(
        gauges.running,
        gauges.waiting,
        gauges.kv_usage,
        gauges.preemptions,
        gauges.prefill_tokens,
        gauges.cached_tokens,
        gauges.reprefilled_tokens,
        gauges.generated_tokens,
    )
