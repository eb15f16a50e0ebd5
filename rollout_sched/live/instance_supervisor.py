"""The supervisor of one instance: carries out its control orders in order, and watches over it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, cast

import msgspec

from rollout_sched.core.events import Event, InstancePaused, InstanceReported, WeightsUpdated
from rollout_sched.live.attempts import Running
from rollout_sched.live.liveness import Liveness
from rollout_sched.live.ports import (
    Description,
    Gauges,
    InstanceClient,
    InstanceError,
    InstanceGone,
    WeightLoader,
    printable,
)
from rollout_sched.live.settings import Settings

log = logging.getLogger(__name__)

T = TypeVar("T")


class Attempts(Protocol):
    """The attempts under way, as a supervisor needs them (`live.attempt_table`)."""

    def on(self, instance: str) -> Sequence[Running]: ...
    async def answered(self, instance: str) -> None: ...
    def stop(self, running: Running, reason: str) -> None: ...
    def disbelieve(self, running: Running) -> None: ...


class Owner(Protocol):
    """What a supervisor needs of the driver."""

    @property
    def attempts(self) -> Attempts: ...

    @property
    def settings(self) -> Settings: ...
    @property
    def first_version(self) -> int: ...
    @property
    def supervisors(self) -> Mapping[str, InstanceSupervisor]: ...
    def tell(self, event: Event) -> None: ...
    def join(self, name: str, description: Description) -> None: ...
    def lose(self, name: str, reason: str) -> None: ...


class ServesSeveral(Protocol):
    """A client whose instance names several models (`Description.models`)."""

    def use_model(self, model: str) -> None:
        """What our own requests there are to name."""


class InstanceSupervisor:
    """Between the driver and one instance.

    Control orders (pause, update, resume) go one after the other. What it is to the scheduler:

        AWAY ── answers, and nothing speaks against it ──▶ JOINED
        JOINED ── fails an order, misses polls, restarts, stands still ──▶ AWAY
        JOINED ── its weights could not be loaded ──▶ UNFIT ── restarted ──▶ AWAY

    UNFIT is AWAY with `unfit`: what it would generate is anybody's guess. What is true of the
    instance itself, whatever it is to the scheduler, outlives its being away: `held`, and that an
    update has left it paused.

    away  why it has not joined; "" while it has
    held  paused by hand: its gauges stand still, a weight update does not let it go on, and after a
          restart it is paused again before it joins
    turn  held by whoever calls it for control, so that nobody comes between pause and resume
    sound  no attempt has failed there, and no poll, since it last answered one: it may have been
           restarted, and then has other weights, so nothing is sent to it before
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
        self._frozen = False  # an update pauses it, or will: its gauges may stand still
        self._left_paused = False  # by an update of ours, or by a hand that let go since
        self._orders: asyncio.Queue[tuple[str, float, Callable[[], Awaitable[None]]]]
        self._orders = asyncio.Queue()
        self._doing: asyncio.Future[None] | None = None
        self._look = asyncio.Event()
        self._misses = 0
        self._failures = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._expect_anew()

    def _expect_anew(self) -> None:
        """It begins, or goes on after a pause: what its gauges said before proves nothing."""
        self._liveness = Liveness(self._settings, asyncio.get_running_loop().time())

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
        except Exception as error:
            if not patient:
                raise
            self.away = _said(error)
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
        self._failures += 1
        self.sound.clear()
        self._look.set()

    # -- control orders --------------------------------------------------------------------

    def pause(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None:
        self._frozen = True

        async def deed() -> None:
            self._left_paused = True
            await self.client.pause(mode, clear_cache)
            if mode == "abort":
                await self._owner.attempts.answered(self.name)
            self._owner.tell(InstancePaused(self.name))

        patience_s = self._settings.control_timeout_s + 2 * self._settings.abort_timeout_s
        self._order("pause", patience_s, deed)

    def resume(self) -> None:
        async def deed() -> None:
            if not self.held:
                await self.client.resume()
            self._frozen = self._left_paused = False
            self._expect_anew()

        self._order("resume", self._settings.control_timeout_s, deed)

    def update(self, version: int, loader: WeightLoader | None) -> None:
        async def deed() -> None:
            try:
                if loader is None:
                    raise InstanceError(f"nobody said how to load version {version}")
                await loader(self.client, version)
                await self.client.set_version(version)
            except Exception as error:
                self.unfit = f"loading version {version} failed: {_said(error)}"
                raise
            self._owner.tell(WeightsUpdated(self.name, version))

        self._order(f"update to {version}", self._settings.update_timeout_s, deed)

    async def hold(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None:
        """Pause it by hand, until `let_go`. Raises InstanceError."""
        async with self.turn:
            await self._ask(self.client.pause(mode, clear_cache))
            self.held = True

    async def let_go(self) -> None:
        """Let it go on after `hold`; one that is away goes on when it joins. Raises
        InstanceError."""
        if self.held and not self.joined:
            self.held, self._left_paused = False, True
            return
        async with self.turn:
            await self._ask(self.client.resume())
            self.released_by_hand()

    def released_by_hand(self) -> None:
        """It goes on: from now on new tokens are expected."""
        self.held = False
        self._expect_anew()

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
                if _is_ending():
                    raise
                log.info("instance %s is gone; so is the order to %s it", self.name, what)
            except Exception as error:
                reason = f"{what}: {_said(error)}"
                if what.startswith("update") and not self.unfit:
                    self.unfit = reason
                self._lose(reason)

    def _lose(self, reason: str) -> None:
        while not self._orders.empty():
            self._orders.get_nowait()
        if self._doing is not None and not self._doing.done():
            self._doing.cancel()
        self.joined = self._frozen = False
        self.away = reason
        self.released.set()
        try:
            self._owner.lose(self.name, reason)
        except Exception:  # whoever else is told of it must not end our watching
            log.exception("instance %s was lost (%s)", self.name, reason)

    # -- watching --------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.poll_s):
                    await self._look.wait()
            self._look.clear()
            try:
                await (self._poll() if self.joined else self._rejoin())
            except asyncio.CancelledError:
                if _is_ending():
                    raise
                log.warning("a look at instance %s was broken off from within", self.name)
            except Exception:
                log.exception("watching instance %s", self.name)

    async def _poll(self) -> None:
        held = self._under_way()  # by now; an answer may end some of them before the gauges come
        failures = self._failures
        try:
            gauges = await self._ask(self.client.gauges(), self._settings.poll_timeout_s)
        except Exception as error:
            self._missed(error)
            return
        self._misses = 0
        before, self.gauges = self.gauges, gauges
        if not self.joined:
            return
        if self._frozen or self.held:
            self._expect_anew()
            return
        if self._was_restarted(gauges, before):
            self._left_paused = False
            # The connections of those that ran before are broken, so these came after.
            for running in self._under_way():
                self._owner.attempts.disbelieve(running)
            self._lose("it was restarted")
            return
        if failures == self._failures:  # else this answer may be from before a restart
            self.sound.set()
        self._owner.tell(_reported(self.name, gauges))
        still_held = [running for running in held if running.attempting is not None]
        verdict = self._liveness.judge(asyncio.get_running_loop().time(), gauges, still_held)
        if verdict.lost:
            self._lose(verdict.lost)
        for running, reason in verdict.stop:
            self._owner.attempts.stop(running, reason)

    def _missed(self, error: Exception) -> None:
        """A poll has brought no gauges."""
        self._misses += 1
        self.sound.clear()
        gone = isinstance(error, InstanceGone)
        if self.joined and (gone or self._misses >= self._settings.misses):
            self._lose(_said(error))
        elif self._misses == 1:
            self._look.set()

    def _was_restarted(self, gauges: Gauges, before: Gauges | None) -> bool:
        """Its weights are those of its start again, and what it held is gone."""
        began = self.description.started_at if self.description else 0.0
        if began and gauges.started_at:
            return gauges.started_at != began
        return before is not None and gauges.generated_tokens < before.generated_tokens

    def _under_way(self) -> list[Running]:
        """What was sent there, less the streams that we do not read because their clients do not:
        those may have ended there."""
        return [
            running
            for running in self._owner.attempts.on(self.name)
            if running.attempting is not None
            and not getattr(running.attempting, "held_back", False)
        ]

    # -- joining ---------------------------------------------------------------------------

    async def _rejoin(self) -> None:
        try:
            await self._admit()
        except Exception as error:
            self.away = _said(error)
            log.debug("instance %s is still away: %s", self.name, self.away)

    async def _admit(self) -> Description:
        before = self.description
        description = await self._ask(self.client.describe())
        restarted = before is not None and description.started_at != before.started_at
        if self.unfit and before is not None and not restarted:
            raise InstanceError(f"{self.name} must be restarted: {self.unfit}")
        if restarted:
            self._left_paused = False
        self._of_our_model(description)
        await self._settle_pause(description)
        if description.version is None:
            # What it makes now is then told apart from what it makes after its first update.
            await self._ask(self.client.set_version(self._owner.first_version))
        self.description = self._of_our_model(description)  # others may have joined meanwhile
        self.unfit = self.away = ""
        self._misses = 0
        self.gauges = None
        self._expect_anew()
        self.sound.set()
        self._owner.join(self.name, self.description)
        self.joined = True
        return self.description

    def _of_our_model(self, description: Description) -> Description:
        """With the fleet's model, that of the first that joined. Raises InstanceError if it does
        not serve that one: half of the answers would come from another."""
        ours = next(
            (
                other.description.model
                for other in self._owner.supervisors.values()
                if other is not self and other.description is not None and other.description.model
            ),
            "",
        )
        if ours in ("", description.model) or not description.model:
            return description
        if ours not in description.models:
            serves = printable(", ".join(description.models) or description.model, 120)
            raise InstanceError(
                f"it serves {serves} where the instances here serve {ours}: one gateway serves one "
                f"model, so start it with --served-model-name {ours} if it is the same, or put it "
                "behind a gateway of its own"
            )
        cast(ServesSeveral, self.client).use_model(ours)
        return msgspec.structs.replace(description, model=ours)

    async def _settle_pause(self, description: Description) -> None:
        """Paused if it is held, else not. Raises InstanceError if somebody else has paused it:
        another scheduler may be loading weights.

        One that does not say whether it is paused is resumed: whoever paused it may be gone.
        """
        if "pause" not in description.capabilities:
            if self.held:
                raise InstanceError(
                    "it is held, but cannot be paused any more; release it, or start vLLM with "
                    "VLLM_SERVER_DEV_MODE=1 in its environment"
                )
            return
        async with self.turn:
            if self.held:
                if not description.paused:
                    await self._ask(self.client.pause("keep", False))
            elif description.paused and not (self._left_paused or self._settings.resume_paused):
                raise InstanceError(
                    "it is paused, and not by us: whoever paused it may be loading weights. It "
                    "joins once it is resumed; if nobody will, as after a crash, POST "
                    f"{self.name}/resume, or let us resume what we find paused (resume_paused)"
                )
            elif description.paused is not False:
                await self._ask(self.client.resume())
            self._left_paused = False

    async def _ask(self, question: Coroutine[Any, Any, T], limit_s: float = 0.0) -> T:
        limit_s = limit_s or self._settings.control_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await question
        except TimeoutError as error:
            raise InstanceError(f"no answer within {limit_s:g} s") from error


def _said(error: Exception) -> str:
    """In a line, for logs and answers."""
    return printable(str(error) or type(error).__name__)


def _is_ending() -> bool:
    """Whether it is this task that is cancelled, not something that it waited for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


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
