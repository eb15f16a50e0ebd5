"""Controls one instance: the scheduler's orders one after the other, administrators' pauses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Literal, NamedTuple

from rollout_sched.core.model.events import InstancePaused, InstanceReturned, WeightsUpdated
from rollout_sched.live.instances.instance import FleetInstance
from rollout_sched.live.instances.pause import HOLD, PAUSE, RELEASE, RELEASE_LATER, RESUME
from rollout_sched.live.ports import (
    InstanceError,
    WeightLoader,
    error_line,
    is_cancelled,
    with_timeout,
)

log = logging.getLogger(__name__)


class ControlOrder(NamedTuple):
    """`version`: of the weights that the order loads; None if it loads none."""

    what: str
    timeout_s: float
    carry_out: Callable[[], Coroutine[Any, Any, None]]
    version: int | None = None


class InstanceControl:
    """Carries out the scheduler's orders: pauses, updates and resumes. Each starts when the one
    before is done, and is then reported. Also holds and releases the instance, for administrators
    and for code that forwards their calls.

    A pause is written to the store before it is ordered: otherwise a process that continues from
    the store would take it for somebody else's pause and never resume the instance.

    A hold survives while the instance is away: a held instance is not resumed by a weight update,
    and is paused again before it joins after a restart.

    on_failed  called with an order that has failed, and the reason
    """

    def __init__(
        self, instance: FleetInstance, on_failed: Callable[[ControlOrder, str], None]
    ) -> None:
        self._instance = instance
        self._client = instance.client
        self._fleet = instance.fleet
        self._pause = instance.pause
        self._settings = instance.settings
        self._on_failed = on_failed
        self._orders: asyncio.Queue[ControlOrder] = asyncio.Queue()
        self._under_way: asyncio.Future[None] | None = None

    # -- the scheduler's orders ------------------------------------------------------------

    def pause(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None:
        async def carry_out() -> None:
            await self._pause_ours(mode, clear_cache)
            if mode == "abort":
                await self._fleet.attempts.answered(self._client.name)
            self._fleet.tell(InstancePaused(self._client.name))

        timeout_s = self._settings.control_timeout_s + 2 * self._settings.abort_timeout_s
        self._order("pause", carry_out, timeout_s)

    def resume(self) -> None:
        self._order("resume", self._resume)

    def update(self, version: int, loader: WeightLoader | None) -> None:
        async def carry_out() -> None:
            if loader is None:
                raise InstanceError(f"nobody said how to load version {version}")
            await loader(self._client, version)
            await self._client.set_version(version)
            self._fleet.tell(WeightsUpdated(self._client.name, version))

        timeout_s = self._settings.update_timeout_s
        self._order(f"update to {version}", carry_out, timeout_s, version)

    def lend(self, on_lent: Callable[[str], None]) -> None:
        """Pause it for the trainer; `on_lent` is called with its name when it is paused."""

        async def carry_out() -> None:
            await self._pause_ours("keep", True)
            on_lent(self._client.name)

        self._order("pause for the trainer", carry_out)

    def take_back(self) -> None:
        """The trainer no longer uses it: resume it."""

        async def carry_out() -> None:
            await self._resume()
            self._fleet.tell(InstanceReturned(self._client.name))

        self._order("resume after training", carry_out)

    def call_off(self) -> None:
        """Cancel the running order and those that wait: the instance is lost."""
        while not self._orders.empty():
            self._orders.get_nowait()
        if self._under_way is not None and not self._under_way.done():
            self._under_way.cancel()

    async def carry_out(self) -> None:
        """Carry out all orders until this is cancelled."""
        while not is_cancelled():
            order = await self._orders.get()
            try:
                self._under_way = asyncio.ensure_future(self._carry_out(order))
                await self._under_way
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                log.info("instance %s was lost; order cancelled: %s", self._client.name, order.what)
            except Exception as error:
                if not is_cancelled():
                    self._on_failed(order, error_line(error))

    def _order(
        self,
        what: str,
        carry_out: Callable[[], Coroutine[Any, Any, None]],
        timeout_s: float | None = None,
        version: int | None = None,
    ) -> None:
        """`timeout_s` None: as for any call that controls an instance."""
        limit_s = self._settings.control_timeout_s if timeout_s is None else timeout_s
        self._orders.put_nowait(ControlOrder(what, limit_s, carry_out, version))

    async def _carry_out(self, order: ControlOrder) -> None:
        async with self._instance.control_lock:
            await with_timeout(order.carry_out(), order.timeout_s)

    async def _pause_ours(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None:
        await self._fleet.pausing(self._client.name)
        self._pause.move(PAUSE)
        await self._client.pause(mode, clear_cache)

    async def _resume(self) -> None:
        if not self._pause.held:
            await self._client.resume()
        self._pause.move(RESUME)
        self._instance.health.forget_progress()

    # -- administrators' pauses ------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Paused by an administrator, until released."""
        return self._pause.held

    async def hold(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None:
        """Pause it until `release`. Raises InstanceError."""
        async with self._instance.control_lock:
            limit_s = self._settings.control_timeout_s
            await with_timeout(self._client.pause(mode, clear_cache), limit_s)
            self.note_held()

    async def release(self) -> None:
        """Resume it, whoever has paused it. A held instance that is away is resumed when it joins.
        Raises InstanceError."""
        async with self._instance.control_lock:
            if self.held and not self._instance.joined:
                self._pause.move(RELEASE_LATER)
                return
            await with_timeout(self._client.resume(), self._settings.control_timeout_s)
            self.note_released()

    def note_held(self) -> None:
        """An administrator has paused it."""
        self._pause.move(HOLD)

    def note_released(self) -> None:
        """An administrator has resumed it."""
        self._pause.move(RELEASE)
        self._instance.health.forget_progress()
