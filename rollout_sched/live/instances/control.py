"""Carries out the scheduler's control orders to one instance, one after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from rollout_sched.core.model.events import Event, InstancePaused, InstanceReturned, WeightsUpdated
from rollout_sched.live.instances.membership import Membership, MembershipState
from rollout_sched.live.instances.pause import (
    HOLD,
    PAUSE,
    RELEASE,
    RELEASE_LATER,
    RESUME,
    InstancePause,
)
from rollout_sched.live.ports import InFlight, InstanceClient, InstanceError, WeightLoader
from rollout_sched.live.settings import Settings
from rollout_sched.live.timeouts import error_line, is_cancelled, with_timeout

log = logging.getLogger(__name__)


class Attempts(Protocol):
    """The running attempts on instances (`live.requests.attempts`)."""

    def on(self, instance: str) -> Sequence[InFlight]: ...
    async def answered(self, instance: str) -> None: ...
    def stop(self, attempt: int, reason: str) -> None: ...
    def reject_streamed(self, attempt: int) -> None: ...


class OrderCallbacks(Protocol):
    """The part of the driver that control orders use."""

    @property
    def settings(self) -> Settings: ...
    @property
    def attempts(self) -> Attempts: ...
    def tell(self, event: Event) -> None: ...
    async def pausing(self, instance: str) -> None:
        """Returns when it is stored that we pause the instance, so that a process that continues
        this run resumes it; at once without a store."""


class ControlOrder(NamedTuple):
    """`version`: of the weights that the order loads; None if it loads none."""

    what: str
    timeout_s: float
    carry_out: Callable[[], Coroutine[Any, Any, None]]
    version: int | None = None


class ControlOrders:
    """Pauses, updates and resumes; each starts when the one before is done, and is then reported.

    A pause is written to the store before it is ordered: otherwise a process that continues from
    the store would take it for somebody else's pause and never resume the instance.

    lock        held while an order is carried out, and by anything else that controls the instance
    on_failed   called with an order that has failed, and the reason
    on_resumed  called when the instance is resumed after an update
    """

    def __init__(
        self,
        client: InstanceClient,
        owner: OrderCallbacks,
        pause: InstancePause,
        lock: asyncio.Lock,
        *,
        on_failed: Callable[[ControlOrder, str], None],
        on_resumed: Callable[[], None],
    ) -> None:
        self._client = client
        self._owner = owner
        self._pause = pause
        self._lock = lock
        self._on_failed = on_failed
        self._on_resumed = on_resumed
        self._orders: asyncio.Queue[ControlOrder] = asyncio.Queue()
        self._under_way: asyncio.Future[None] | None = None

    def pause(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None:
        async def carry_out() -> None:
            await self._owner.pausing(self._client.name)
            self._pause.move(PAUSE)
            await self._client.pause(mode, clear_cache)
            if mode == "abort":
                await self._owner.attempts.answered(self._client.name)
            self._owner.tell(InstancePaused(self._client.name))

        settings = self._owner.settings
        timeout_s = settings.control_timeout_s + 2 * settings.abort_timeout_s
        self._orders.put_nowait(ControlOrder("pause", timeout_s, carry_out))

    def resume(self) -> None:
        timeout_s = self._owner.settings.control_timeout_s
        self._orders.put_nowait(ControlOrder("resume", timeout_s, self._resume))

    def update(self, version: int, loader: WeightLoader | None) -> None:
        async def carry_out() -> None:
            if loader is None:
                raise InstanceError(f"nobody said how to load version {version}")
            await loader(self._client, version)
            await self._client.set_version(version)
            self._owner.tell(WeightsUpdated(self._client.name, version))

        timeout_s = self._owner.settings.update_timeout_s
        what = f"update to {version}"
        self._orders.put_nowait(ControlOrder(what, timeout_s, carry_out, version))

    def lend(self, on_lent: Callable[[str], None]) -> None:
        """Pause it for the trainer; `on_lent` is called with its name when it is paused."""

        async def carry_out() -> None:
            await self._owner.pausing(self._client.name)
            self._pause.move(PAUSE)
            await self._client.pause("keep", True)
            on_lent(self._client.name)

        timeout_s = self._owner.settings.control_timeout_s
        self._orders.put_nowait(ControlOrder("pause for the trainer", timeout_s, carry_out))

    def take_back(self) -> None:
        """The trainer no longer uses it: resume it."""

        async def carry_out() -> None:
            await self._resume()
            self._owner.tell(InstanceReturned(self._client.name))

        timeout_s = self._owner.settings.control_timeout_s
        self._orders.put_nowait(ControlOrder("resume after training", timeout_s, carry_out))

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

    async def _resume(self) -> None:
        if not self._pause.held:
            await self._client.resume()
        self._pause.move(RESUME)
        self._on_resumed()

    async def _carry_out(self, order: ControlOrder) -> None:
        async with self._lock:
            await with_timeout(order.carry_out(), order.timeout_s)


class PauseControl:
    """Holds and releases one instance, for administrators and for code that forwards their calls.

    A hold survives while the instance is away: a held instance is not resumed by a weight update,
    and is paused again before it joins after a restart.

    lock        held while the instance is paused or resumed
    on_resumed  called when the instance should make tokens again
    """

    def __init__(
        self,
        client: InstanceClient,
        settings: Settings,
        membership: Membership,
        pause: InstancePause,
        lock: asyncio.Lock,
        *,
        on_resumed: Callable[[], None],
    ) -> None:
        self._client = client
        self._settings = settings
        self._membership = membership
        self._pause = pause
        self._lock = lock
        self._on_resumed = on_resumed

    @property
    def held(self) -> bool:
        """Paused by an administrator, until released."""
        return self._pause.held

    async def hold(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None:
        """Pause it until `release`. Raises InstanceError."""
        async with self._lock:
            await with_timeout(
                self._client.pause(mode, clear_cache), self._settings.control_timeout_s
            )
            self.note_held()

    async def release(self) -> None:
        """Resume it, whoever has paused it. A held instance that is away is resumed when it joins.
        Raises InstanceError."""
        async with self._lock:
            if self.held and self._membership.state is not MembershipState.JOINED:
                self._pause.move(RELEASE_LATER)
                return
            await with_timeout(self._client.resume(), self._settings.control_timeout_s)
            self.note_released()

    def note_left_paused(self) -> None:
        """An earlier run of ours has paused it and did not resume it."""
        self._pause.move(PAUSE)

    def note_held(self) -> None:
        """An administrator has paused it."""
        self._pause.move(HOLD)

    def note_released(self) -> None:
        """An administrator has resumed it."""
        self._pause.move(RELEASE)
        self._on_resumed()
