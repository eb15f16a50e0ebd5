"""The pauses of a realtime instance: who waits for one, and gauges that freeze during it."""

from __future__ import annotations

import asyncio
from collections import deque

from rollout_sched.live.ports import Gauges
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.instance.sim_request import PauseMode


class Pauses:
    """The pauses of one instance. As in vLLM, a paused instance shows its earlier gauges."""

    def __init__(self, engine: SimInstance) -> None:
        self._engine = engine
        self._asked: deque[tuple[PauseMode, asyncio.Future[None]]] = deque()
        self._frozen = False
        self._gauges = _look(engine)

    def ask(self, mode: PauseMode) -> asyncio.Future[None]:
        """Done when the instance is paused. Its gauges freeze now, unless the mode finishes running
        requests first."""
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
        """The instance resumes."""
        self._frozen = False

    def gauges(self) -> Gauges:
        if not self._frozen:
            self._gauges = _look(self._engine)
        return self._gauges

    def fail(self, error: Exception) -> None:
        """All waiters get an error."""
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
