"""The attendant of one instance: carries out its control orders in order, and watches over it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, Protocol, TypeVar

from rollout_sched.core.errors import CallerError
from rollout_sched.core.events import Event, InstancePaused, InstanceReported, WeightsUpdated
from rollout_sched.live.ports import (
    Applier,
    Description,
    Gauges,
    InstanceClient,
    InstanceError,
    InstanceGone,
)
from rollout_sched.live.settings import Settings

log = logging.getLogger(__name__)

T = TypeVar("T")


class Owner(Protocol):
    """What an attendant needs of the driver."""

    @property
    def settings(self) -> Settings: ...
    @property
    def first_version(self) -> int: ...
    def tell(self, event: Event) -> None: ...
    def join(self, name: str, description: Description) -> None: ...
    def lose(self, name: str, reason: str) -> None: ...
    def holds(self, name: str) -> Sequence[Any]: ...
    async def answered(self, name: str) -> None: ...
    def forget(self, running: Any, reason: str) -> None: ...


class Attendant:
    """Between the driver and one instance.

    Control orders (pause, update, resume) go one after the other. When one fails, or the instance
    no longer answers, it is lost to the scheduler; when it answers again, it joins again. One whose
    weights could not be loaded is *unfit*: what it would generate is anybody's guess, so it joins
    again only after a restart.

    away  why it has not joined; "" while it has
    held  paused by hand: its gauges stand still, and a weight update does not let it go on
    turn  held by whoever calls it for control, so that nobody comes between pause and resume
    sound  no attempt has failed there since it last answered a poll: it may have been restarted,
           and then has other weights, so nothing is sent to it before
    """

    def __init__(self, client: InstanceClient, owner: Owner) -> None:
        self.client = client
        self.joined = False
        self.unfit = ""
        self.away = ""
        self.held = False
        self.turn = asyncio.Lock()
        self.description: Description | None = None
        self.gauges: Gauges | None = None
        self.released = asyncio.Event()
        self.sound = asyncio.Event()
        self._owner = owner
        self._settings = owner.settings
        self._frozen = False  # paused by us: its gauges stand still
        self._orders: asyncio.Queue[tuple[str, float, Callable[[], Awaitable[None]]]]
        self._orders = asyncio.Queue()
        self._doing: asyncio.Future[None] | None = None
        self._look = asyncio.Event()
        self._misses = 0
        self._idle_since: float | None = None
        self._progress: tuple[int, float] = (0, 0.0)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        return self.client.name

    async def start(self, *, patient: bool = False) -> Description | None:
        """Ask who it is, let it join, and begin to watch it.

        Raises InstanceError if it does not answer; with `patient` it joins once it does.
        """
        description = None
        try:
            description = await self._admit()
        except (InstanceError, OSError) as error:
            if not patient:
                raise
            self.away = str(error) or type(error).__name__
        self._tasks = [asyncio.create_task(self._work()), asyncio.create_task(self._watch())]
        return description

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self.client.close()

    def look_now(self) -> None:
        """Something went wrong there: do not wait for the next poll."""
        self.sound.clear()
        self._look.set()

    # -- control orders --------------------------------------------------------------------

    def pause(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None:
        self._frozen = True

        async def deed() -> None:
            await self.client.pause(mode, clear_cache)
            if mode == "abort":
                await self._owner.answered(self.name)
            self._owner.tell(InstancePaused(self.name))

        patience_s = self._settings.control_timeout_s + 2 * self._settings.abort_timeout_s
        self._order("pause", patience_s, deed)

    def resume(self) -> None:
        async def deed() -> None:
            if not self.held:
                await self.client.resume()
            self._frozen = False
            self._progress = (-1, 0.0)

        self._order("resume", self._settings.control_timeout_s, deed)

    def update(self, version: int, applier: Applier | None) -> None:
        async def deed() -> None:
            try:
                if applier is None:
                    raise InstanceError(f"nobody said how to load version {version}")
                await applier(self.client, version)
                await self.client.set_version(version)
            except Exception as error:
                self.unfit = f"loading version {version} failed: {error}"
                raise
            self._owner.tell(WeightsUpdated(self.name, version))

        self._order(f"update to {version}", self._settings.update_timeout_s, deed)

    async def hold(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None:
        """Pause it by hand, until `let_go`. Raises InstanceError."""
        async with self.turn:
            await self._ask(self.client.pause(mode, clear_cache))
            self.held = True

    async def let_go(self) -> None:
        """Let it go on after `hold`. Raises InstanceError."""
        async with self.turn:
            await self._ask(self.client.resume())
            self.released_by_hand()

    def released_by_hand(self) -> None:
        """It goes on: from now on new tokens are expected."""
        self.held = False
        self._progress = (-1, 0.0)

    def _order(self, what: str, timeout_s: float, deed: Callable[[], Awaitable[None]]) -> None:
        self._orders.put_nowait((what, timeout_s, deed))

    async def _work(self) -> None:
        while True:
            what, timeout_s, deed = await self._orders.get()
            try:
                async with self.turn, asyncio.timeout(timeout_s):
                    self._doing = asyncio.ensure_future(deed())
                    await self._doing
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                log.info("instance %s is gone; so is the order to %s it", self.name, what)
            except Exception as error:
                reason = str(error) or type(error).__name__
                if what.startswith("update") and not self.unfit:
                    self.unfit = f"{what}: {reason}"
                self._lose(f"{what}: {reason}")

    def _lose(self, reason: str) -> None:
        while not self._orders.empty():
            self._orders.get_nowait()
        if self._doing is not None and not self._doing.done():
            self._doing.cancel()
        self.joined = self._frozen = self.held = False
        self.away = reason
        self.released.set()
        self._owner.lose(self.name, reason)

    # -- watching --------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.poll_s):
                    await self._look.wait()
            self._look.clear()
            try:
                await (self._poll() if self.joined else self._rejoin())
            except Exception:
                log.exception("watching instance %s", self.name)

    async def _poll(self) -> None:
        try:
            gauges = await self._ask(self.client.gauges())
        except (InstanceError, OSError) as error:
            self._misses += 1
            gone = isinstance(error, InstanceGone)
            if self.joined and (gone or self._misses >= self._settings.misses):
                self._lose(str(error) or type(error).__name__)
            elif self._misses == 1:
                self._look.set()
            return
        self._misses = 0
        before, self.gauges = self.gauges, gauges
        if not self.joined or self._frozen or self.held:
            return
        if self._was_restarted(gauges, before):
            self._lose("it was restarted")
            return
        self.sound.set()
        self._owner.tell(_reported(self.name, gauges))
        self._look_for_forgotten(gauges)
        self._look_for_stall(gauges)

    def _was_restarted(self, gauges: Gauges, before: Gauges | None) -> bool:
        """Its weights are those of its start again, and what it held is gone."""
        began = self.description.started_at if self.description else 0.0
        if began and gauges.started_at:
            return gauges.started_at != began
        return before is not None and gauges.generated_tokens < before.generated_tokens

    def _look_for_forgotten(self, gauges: Gauges) -> None:
        """It says that it has nothing to do: what we wait for will never come."""
        now = asyncio.get_running_loop().time()
        if gauges.running or gauges.waiting:
            self._idle_since = None
            return
        if self._idle_since is None:
            self._idle_since = now
        for attempt in self._owner.holds(self.name):
            # It may have come to an instance that was idle long before.
            if now - max(attempt.begun, self._idle_since) >= self._settings.forgotten_s:
                self._owner.forget(attempt, "the instance has nothing to do but never answered")

    def _look_for_stall(self, gauges: Gauges) -> None:
        """Requests run, but no token comes."""
        now = asyncio.get_running_loop().time()
        tokens, since = self._progress
        if gauges.generated_tokens != tokens or not gauges.running:
            self._progress = (gauges.generated_tokens, now)
        elif now - since >= self._settings.stall_s:
            self._lose(f"no new token for {now - since:.0f} s although {gauges.running} run")

    async def _rejoin(self) -> None:
        try:
            await self._admit()
        except (InstanceError, CallerError, OSError) as error:
            self.away = str(error) or type(error).__name__
            log.debug("instance %s is still away: %s", self.name, self.away)

    async def _admit(self) -> Description:
        before = self.description
        description = await self._ask(self.client.describe())
        if self.unfit and before is not None and description.started_at == before.started_at:
            raise InstanceError(f"{self.name} must be restarted: {self.unfit}")
        if "pause" in description.capabilities:
            # Whoever paused it before us may be gone, and a scheduler that broke off with it.
            await self._ask(self.client.resume())
        if description.version is None:
            # What it makes now is then told apart from what it makes after its first update.
            await self._ask(self.client.set_version(self._owner.first_version))
        self.description = description
        self.unfit = self.away = ""
        self._misses = 0
        self.gauges = self._idle_since = None
        self._progress = (-1, 0.0)
        self.sound.set()
        self._owner.join(self.name, description)
        self.joined = True
        return description

    async def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        async with asyncio.timeout(self._settings.control_timeout_s):
            return await question


def _reported(name: str, gauges: Gauges) -> InstanceReported:
    return InstanceReported(
        name,
        gauges.running,
        gauges.waiting,
        gauges.kv_usage,
        gauges.preemptions,
        gauges.prefill_tokens,
        gauges.cached_tokens,
        gauges.reprefilled_tokens,
        gauges.generated_tokens,
    )
