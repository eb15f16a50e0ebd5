"""The running attempts, as supervisors of instances see and stop them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from rollout_sched.core.actions import Interrupt
from rollout_sched.live.attempts import LiveAttempt
from rollout_sched.live.ports import InstanceError, WeightsUnknown
from rollout_sched.live.running_attempts import RunningAttempts
from rollout_sched.live.settings import Settings

log = logging.getLogger(__name__)

#: Seconds for attempts that a pause aborted to answer; the others count as not reached by it.
OVERTAKEN_S = 0.5


class AttemptTable:
    """Carries out Interrupt; aborts attempts that are no longer of use."""

    def __init__(self, running: RunningAttempts, settings: Settings) -> None:
        self._running = running
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._looking: asyncio.TimerHandle | None = None
        if settings.stream_s:
            self._look_later()

    def __len__(self) -> int:
        return len(self._running)

    def every(self) -> list[LiveAttempt]:
        return self._running.every()

    def on(self, instance: str) -> list[LiveAttempt]:
        """The running attempts on an instance."""
        return self._running.on(instance)

    def interrupt(self, action: Interrupt) -> None:
        running = self._running.get(action.attempt)
        if running is not None:
            self.spawn(self._abort(running))

    def stop(self, attempt: int, reason: str) -> None:
        """Abort an attempt that may never answer; its request continues from the tokens it has."""
        running = self._running.get(attempt)
        if running is None:
            return
        running.stopped = True
        log.warning("attempt %d on %s: %s", running.dispatch.attempt, running.client.name, reason)
        self.spawn(self._abort(running, reason))

    def end(self, running: LiveAttempt) -> None:
        """End an attempt whose scheduler is gone; the tokens that it has made are kept."""
        if running.attempting is None:
            self.give_up(running, "it was not sent yet")
        else:
            self.spawn(self._abort(running))

    async def _abort(self, running: LiveAttempt, reason: str = "it did not stop") -> None:
        if not await running.abort(self._settings.abort_timeout_s):
            self.give_up(running, reason)

    async def answered(self, instance: str) -> None:
        """Wait after a pause that aborts, until every attempt there has answered or was given up.

        An order that was sent before the pause may arrive after it. vLLM then keeps the request
        until it is resumed, unless the request is aborted individually.
        """
        ends = [running.ended() for running in self.on(instance)]
        if ends:
            await asyncio.wait(ends, timeout=OVERTAKEN_S)
        await asyncio.gather(*(self._abort(running) for running in self.on(instance)))

    def give_up(self, running: LiveAttempt, reason: str) -> None:
        """The instance will never answer an attempt."""
        running.cancel()
        self._running.failed(running, InstanceError(f"given up: {reason}"))

    def disbelieve(self, attempt: int) -> None:
        """Fail an attempt whose stream has brought tokens: they may be of unknown weights."""
        running = self._running.get(attempt)
        if running is None:
            return
        try:
            brought = running.streamed
        except Exception as error:  # the payload's own: its attempt is of no use
            self._running.failed(running, error)
            return
        if brought:
            running.cancel()
            restarted = WeightsUnknown("its instance was restarted before the attempt began")
            self._running.failed(running, restarted)

    def lose(self, instance: str, tell: Callable[[], None]) -> None:
        """Their instance is gone: keep what their streams brought, then call `tell`, which reports
        the loss to the scheduler. What the scheduler sent there meanwhile is made elsewhere."""
        self._running.lose(instance)
        tell()
        self._running.forget(instance)

    async def close(self) -> None:
        """Give up all attempts without reporting them."""
        if self._looking is not None:
            self._looking.cancel()
        self._running.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(asyncio.sleep(0), *self._tasks, return_exceptions=True)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task, at most until this is closed."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _look_later(self) -> None:
        self._looking = self._loop.call_later(self._settings.stream_s, self._report_streams)

    def _report_streams(self) -> None:
        self._look_later()
        self._running.report_streams()
