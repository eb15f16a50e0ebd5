"""The attempts under way: begun, watched over, and their ends told to the scheduler, each once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, cast

from rollout_sched.core.actions import Dispatch, Interrupt
from rollout_sched.core.events import (
    Blame,
    PrefixVerified,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    TurnFinished,
)
from rollout_sched.live.attempts import LiveAttempt
from rollout_sched.live.contradictions import Contradictions
from rollout_sched.live.event_pump import EventPump
from rollout_sched.live.instance_supervisor import InstanceSupervisor
from rollout_sched.live.payload_book import PayloadBook, drop
from rollout_sched.live.ports import (
    AnswerUntrue,
    Attempting,
    ConnectionBroken,
    InstanceError,
    InstanceUnreached,
    Outcome,
    RequestRejected,
    Verifying,
    WeightsUnknown,
)
from rollout_sched.live.settings import Settings
from rollout_sched.live.tool_calls import ToolCalls

log = logging.getLogger(__name__)

#: Seconds for what a pause has aborted to answer, before the rest counts as not reached by it.
OVERTAKEN_S = 0.5


class AttemptTable:
    """Carries out Dispatch and Interrupt; an attempt is here from its order to its end."""

    def __init__(
        self,
        pump: EventPump,
        payloads: PayloadBook,
        tools: ToolCalls,
        supervisors: Mapping[str, InstanceSupervisor],
        contradictions: Contradictions,
        settings: Settings,
        run_id: str,
    ) -> None:
        self._pump = pump
        self._contradictions = contradictions
        self._payloads = payloads
        self._tools = tools
        self._supervisors = supervisors
        self._settings = settings
        self._run_id = run_id
        self._view = pump.scheduler.view
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, LiveAttempt] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        if settings.stream_s:
            self._loop.call_later(settings.stream_s, self._report_streams)

    def __len__(self) -> int:
        return len(self._running)

    def on(self, instance: str) -> Sequence[LiveAttempt]:
        """The attempts under way on an instance."""
        known = self._view.instance(instance)
        attempts = () if known is None else known.attempts
        return [self._running[attempt] for attempt in attempts if attempt in self._running]

    # -- their beginning -------------------------------------------------------------------

    def dispatch(self, action: Dispatch) -> None:
        try:
            payload = self._payloads.of(action)
        except Exception as error:  # the caller's own
            self._payloads.note_error(action, error)
            self._pump.tell(RequestFailed(action.request, action.attempt, str(error), "request"))
            return
        supervisor = self._supervisors[action.instance]
        order_id = f"{self._run_id}-{action.attempt}"
        running = LiveAttempt(action, payload, supervisor.client, order_id, self._loop.time())
        self._running[action.attempt] = running
        if supervisor.health.verified.is_set():
            self._begin(running)
        else:
            self._spawn(self._begin_once_verified(running, supervisor))

    async def _begin_once_verified(
        self, running: LiveAttempt, supervisor: InstanceSupervisor
    ) -> None:
        await supervisor.health.verified.wait()
        if running.dispatch.attempt in self._running:
            self._begin(running)

    def _begin(self, running: LiveAttempt) -> None:
        running.begun = self._loop.time()
        patience_s = self._settings.attempt_timeout_s
        if patience_s:
            reason = f"no answer within {patience_s:g} s"
            running.timer = self._loop.call_later(patience_s, self.forget, running, reason)
        try:
            running.attempting = self._attempting(running)
        except (InstanceError, RequestRejected, OSError) as error:
            self._failed(running, error)
        except Exception as error:
            log.exception("attempt %d of request %s", running.dispatch.attempt, running.order_id)
            self._failed(running, RequestRejected(f"it cannot be sent: {error!r}", 500))

    def _attempting(self, running: LiveAttempt) -> Attempting:
        payload, dispatch, over = running.payload, running.dispatch, partial(self._over, running)
        if not dispatch.draft:
            return payload.begin(running.client, dispatch, running.order_id, over)
        verifying = cast(Verifying, payload)
        passed = partial(self._passed, running)
        return verifying.begin_verified(running.client, dispatch, running.order_id, passed, over)

    def _passed(self, running: LiveAttempt, tokens: int) -> Dispatch | None:
        """So much of its draft is kept: how it goes on, or None if it is to stop."""
        dispatch = running.dispatch
        if self._was_stopped(running) or self._pump.broken is not None:
            return None
        self._pump.tell(PrefixVerified(dispatch.request, dispatch.attempt, tokens))
        running.dispatch = self._view.going_on(dispatch)
        return running.dispatch

    # -- their end -------------------------------------------------------------------------

    def _over(self, running: LiveAttempt, result: Outcome | Exception) -> None:
        if isinstance(result, Exception):
            running.cancel()
            self._failed(running, result)
        else:
            running.let_go()
            self._ended(running, result)

    def _ended(self, running: LiveAttempt, outcome: Outcome) -> None:
        dispatch = running.dispatch
        if dispatch.attempt not in self._running:
            return  # its instance may be here no longer
        unasked = outcome.finish == "abort" and not self._was_stopped(running)
        if unasked:
            self._supervisors[dispatch.instance].suspect()
        if unasked and not outcome.tokens:
            self._failed(running, InstanceError("aborted by the instance without a token"))
        elif self._contradictions.kind(dispatch.attempt, outcome.spans):
            self._spawn(self._settle(running, outcome))
        else:
            self._tell_ended(running, outcome)

    async def _settle(self, running: LiveAttempt, outcome: Outcome) -> None:
        """Its versions are not those that are known: its instance is asked before anybody hears."""
        source = self._supervisors[running.dispatch.instance]
        try:
            await self._contradictions.settle(running.dispatch.attempt, outcome.spans, source)
        except InstanceError as error:
            self._failed(running, error)
        except Exception as error:
            self._pump.fail(error)
        else:
            self._tell_ended(running, outcome)

    def _tell_ended(self, running: LiveAttempt, outcome: Outcome) -> None:
        dispatch = running.dispatch
        if not self._take(running):
            return
        kept = min(max(0, outcome.tokens), dispatch.max_new_tokens)
        try:
            running.payload.transcript.keep(dispatch.attempt, kept, outcome.piece)
        except Exception as error:  # the payload's own
            self._tell_failed(running, error, usable=False)
            return
        request, attempt = dispatch.request, dispatch.attempt
        if outcome.finish == "abort":
            self._pump.tell(RequestInterrupted(request, attempt, outcome.tokens, outcome.spans))
        elif outcome.finish == "turn":
            self._tools.expect(dispatch, running.payload)
            self._pump.tell(TurnFinished(request, attempt, outcome.tokens, outcome.spans))
        else:
            self._pump.tell(
                RequestFinished(request, attempt, outcome.tokens, outcome.spans, outcome.finish)
            )

    def _was_stopped(self, running: LiveAttempt) -> bool:
        """An attempt that we stopped, alone or with its whole instance."""
        return running.stopped or self._view.is_stopping(running.dispatch.attempt)

    def _failed(self, running: LiveAttempt, error: Exception) -> None:
        if not self._take(running):
            return
        usable = not isinstance(error, AnswerUntrue)
        if usable:
            try:
                self._keep_streamed(running)
            except Exception as own:  # the payload's own
                error, usable = own, False
        self._tell_failed(running, error, usable=usable)

    def _tell_failed(self, running: LiveAttempt, error: Exception, *, usable: bool) -> None:
        """An attempt that is here no longer has failed."""
        dispatch = running.dispatch
        if not isinstance(error, InstanceError | RequestRejected | OSError):
            text = "attempt %d of request %s"
            log.error(text, dispatch.attempt, dispatch.request, exc_info=error)
        if not usable:
            drop(running.payload, dispatch.attempt)
        self._payloads.note_error(dispatch, error)
        log.info("attempt %d on %s failed: %s", dispatch.attempt, dispatch.instance, error)
        supervisor = self._supervisors.get(dispatch.instance)
        if supervisor is not None and _may_be_restarted(error):
            supervisor.health.check_now()  # first: its slot is given away as soon as this is told
        self._pump.tell(
            RequestFailed(dispatch.request, dispatch.attempt, str(error), _blame(error), usable)
        )

    def _take(self, running: LiveAttempt) -> bool:
        """Let go of an attempt. False if that has happened: this is not its first end."""
        if self._running.pop(running.dispatch.attempt, None) is None:
            return False
        running.end()
        return True

    # -- what their streams bring ----------------------------------------------------------

    def _report_stream(self, running: LiveAttempt) -> None:
        progress = running.progress()
        if progress is not None:
            self._pump.tell(progress)

    def _keep_streamed(self, running: LiveAttempt) -> None:
        self._report_stream(running)
        running.keep_streamed()

    def _report_streams(self) -> None:
        self._loop.call_later(self._settings.stream_s, self._report_streams)
        for running in list(self._running.values()):
            try:
                self._report_stream(running)
            except Exception as error:  # the payload's own: its attempt is of no use
                self._failed(running, error)

    # -- stopped from here -----------------------------------------------------------------

    def interrupt(self, action: Interrupt) -> None:
        running = self._running.get(action.attempt)
        if running is not None:
            self._spawn(self._abort(running))

    def stop(self, running: LiveAttempt, reason: str) -> None:
        """Break off an attempt of which nothing more may come; it goes on from what it brings."""
        running.stopped = True
        log.warning("attempt %d on %s: %s", running.dispatch.attempt, running.client.name, reason)
        self._spawn(self._abort(running, reason))

    async def _abort(self, running: LiveAttempt, reason: str = "it did not stop") -> None:
        if not await running.abort(self._settings.abort_timeout_s):
            self.forget(running, reason)

    async def answered(self, instance: str) -> None:
        """Every attempt there has answered, or was given up, after a pause that aborts.

        An order may arrive after the pause that was sent after it; vLLM keeps it until it is
        resumed, unless it is aborted by itself.
        """
        ends = [running.ended() for running in self.on(instance)]
        if ends:
            await asyncio.wait(ends, timeout=OVERTAKEN_S)
        await asyncio.gather(*(self._abort(running) for running in self.on(instance)))

    def forget(self, running: LiveAttempt, reason: str) -> None:
        """Give up an attempt that the instance will never answer."""
        running.cancel()
        self._failed(running, InstanceError(f"given up: {reason}"))

    def disbelieve(self, running: LiveAttempt) -> None:
        """Nothing that its stream has brought, if anything, is gone on from."""
        try:
            brought = running.streamed
        except Exception as error:  # the payload's own: its attempt is of no use
            self._failed(running, error)
            return
        if brought:
            running.cancel()
            self._failed(running, WeightsUnknown("its instance was restarted before it began"))

    def lose(self, instance: str) -> None:
        """Their instance is gone; what their streams brought is kept. The scheduler is to hear of
        the loss next: until then it is not told that they have ended."""
        for running in self.on(instance):
            self._take(running)
            running.cancel()
            try:
                self._keep_streamed(running)
            except Exception as error:  # the payload's own
                self._tell_failed(running, error, usable=False)

    def forget_lost(self, instance: str) -> None:
        """The scheduler knows of the loss: what it sent there meanwhile is made elsewhere."""
        sent = [e for e in self._running.values() if e.dispatch.instance == instance]
        for running in sent:
            self._take(running)
            running.cancel()

    async def close(self) -> None:
        """Give up all of them; nobody is told."""
        for running in self._running.values():
            running.end()
            running.cancel()
        self._running.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(asyncio.sleep(0), *self._tasks, return_exceptions=True)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _blame(error: Exception) -> Blame:
    """Whose fault an attempt's error is. Only what was never sent is surely the instance's."""
    if isinstance(error, RequestRejected):
        return "request"
    return "instance" if isinstance(error, InstanceUnreached) else "unclear"


def _may_be_restarted(error: Exception) -> bool:
    """Whether an attempt's error, or what it was rejected for, speaks for a restart."""
    if isinstance(error, RequestRejected):
        return isinstance(error.because, WeightsUnknown)
    return isinstance(error, ConnectionBroken | OSError | WeightsUnknown)
