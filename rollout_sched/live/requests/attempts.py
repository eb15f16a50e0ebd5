"""Carries out dispatches: starts an attempt and passes its result on.

An abort is believed when its answer has come. It can overtake its request, and vLLM ignores ids
that it does not know. So the abort is repeated until the attempt answers, and a pause with "abort"
is done when all attempts have answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from rollout_sched.core.model.actions import Dispatch, Interrupt
from rollout_sched.core.model.events import (
    Blame,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    TurnFinished,
)
from rollout_sched.live.instances.attempts import AttemptIndex
from rollout_sched.live.ports import (
    AnswerUntrue,
    ConnectionBroken,
    EnginePaused,
    InstanceError,
    InstanceUnreached,
    Outcome,
    RequestRejected,
    RequestTooLong,
    Suspicion,
    WeightsUnknown,
    plain_message,
)
from rollout_sched.live.requests.answers import Settle
from rollout_sched.live.requests.attempt import LiveAttempt
from rollout_sched.live.requests.link import SchedulerLink
from rollout_sched.live.requests.payloads import Payloads, drop
from rollout_sched.live.requests.trajectories import ToolCalls
from rollout_sched.live.settings import Settings

log = logging.getLogger(__name__)


#: Seconds for attempts that a pause aborted to answer; the others count as not reached by it.
OVERTAKEN_S = 0.5


class RunningAttempts(AttemptIndex[LiveAttempt]):
    """Carries out dispatches and interrupts. Holds each attempt from its order to its end, which it
    reports to the scheduler, once. Create it inside a running event loop.

    `run_id`: prefix of every order's name.
    """

    def __init__(
        self,
        link: SchedulerLink,
        payloads: Payloads,
        tools: ToolCalls,
        settings: Settings,
        run_id: str,
    ) -> None:
        super().__init__()
        self._link = link
        self._payloads = payloads
        self._tools = tools
        self._settings = settings
        self._run_id = run_id
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._looking: asyncio.TimerHandle | None = None
        if settings.stream_s:
            self._look_later()

    # -- their beginnings ------------------------------------------------------------------

    def dispatch(self, action: Dispatch) -> None:
        try:
            payload = self._payloads.payload_of(action)
        except Exception as error:  # the caller's own
            self._payloads.note_error(action, error)
            self._link.tell(RequestFailed(action.request, action.attempt, str(error), "request"))
            return
        client = self._link.client(action.instance)
        order_id = f"{self._run_id}-{action.attempt}"
        running = LiveAttempt(action, payload, client, order_id, self._loop.time())
        self.add(running)
        unverified = self._link.unverified(action.instance)
        if unverified is None:
            self._begin(running)
        else:
            self._spawn(self._begin_once_verified(running, unverified))

    async def _begin_once_verified(self, running: LiveAttempt, verified: asyncio.Event) -> None:
        await verified.wait()
        if running.dispatch.attempt in self:
            self._begin(running)

    def _begin(self, running: LiveAttempt) -> None:
        running.begun = self._loop.time()
        patience_s = self._settings.attempt_timeout_s
        if patience_s:
            reason = f"no answer within {patience_s:g} s"
            running.timer = self._loop.call_later(patience_s, self.give_up, running, reason)
        try:
            running.attempting = running.payload.begin(
                running.client, running.dispatch, running.order_id, partial(self._over, running)
            )
        except (InstanceError, RequestRejected, OSError) as error:
            self.failed(running, error)
        except Exception as error:
            log.exception("attempt %d failed: order %s", running.dispatch.attempt, running.order_id)
            unsent = "the request cannot be sent"
            rejected = RequestRejected(f"{unsent}: {error!r}", 500, unquoted=unsent)
            self.failed(running, rejected)

    def _over(self, running: LiveAttempt, result: Outcome | Exception) -> None:
        if isinstance(result, Exception):
            running.cancel()
            self.failed(running, result)
        else:
            running.release()
            self._ended(running, result)

    def _ended(self, running: LiveAttempt, outcome: Outcome) -> None:
        if running.dispatch.attempt not in self:
            return  # its instance may have been removed
        verdict = self._link.judge(running.dispatch, outcome, stopped=running.stopped)
        if verdict is None:
            self.ended(running, outcome)
        elif isinstance(verdict, InstanceError):
            self.failed(running, verdict)
        else:
            self._spawn(self._settle(running, outcome, verdict))

    async def _settle(self, running: LiveAttempt, outcome: Outcome, settle: Settle) -> None:
        """Ask the instance about its answer before the answer is used."""
        try:
            await settle()
        except InstanceError as error:
            self.failed(running, error)
        except Exception as error:
            self._link.fail(error)
        else:
            self.ended(running, outcome)

    # -- their ends ------------------------------------------------------------------------

    def ended(self, running: LiveAttempt, outcome: Outcome) -> None:
        """The attempt has ended by itself, or because it was stopped."""
        dispatch = running.dispatch
        if not self.take(running):
            return
        kept = min(max(0, outcome.tokens), dispatch.max_new_tokens)
        try:
            running.payload.transcript.append(dispatch.attempt, kept, outcome.piece)
        except Exception as error:  # the payload's own
            self._tell_failed(running, error, usable=False)
            return
        request, attempt = dispatch.request, dispatch.attempt
        if outcome.finish == "abort":
            cut = RequestInterrupted(request, attempt, outcome.tokens, outcome.spans)
            if not outcome.resumable:
                cut = msgspec.structs.replace(cut, resumable=False)
            self._link.tell(cut)
        elif outcome.finish == "turn":
            self._tools.expect(dispatch, running.payload)
            self._link.tell(TurnFinished(request, attempt, outcome.tokens, outcome.spans))
        else:
            self._link.tell(
                RequestFinished(request, attempt, outcome.tokens, outcome.spans, outcome.finish)
            )

    def failed(self, running: LiveAttempt, error: Exception) -> None:
        if not self.take(running):
            return
        usable = not isinstance(error, AnswerUntrue)
        if usable:
            try:
                self._keep_streamed(running)
            except Exception as own:  # the payload's own
                error, usable = own, False
        self._tell_failed(running, error, usable=usable)

    def _tell_failed(self, running: LiveAttempt, error: Exception, *, usable: bool) -> None:
        """Report the failure of an attempt that was removed."""
        dispatch = running.dispatch
        if not isinstance(error, InstanceError | RequestRejected | OSError):
            text = "attempt %d of request %s failed"
            log.error(text, dispatch.attempt, dispatch.request, exc_info=error)
        if not usable:
            drop(running.payload, dispatch.attempt)
        self._payloads.note_error(dispatch, error)
        why = plain_message(error)
        log.debug("attempt %d on %s failed: %s", dispatch.attempt, dispatch.instance, why)
        suspicion = suspicion_of(error)
        if suspicion:  # first, because `tell` gives the slot to new work at once
            self._link.suspect(dispatch.instance, suspicion)
        self._link.tell(
            RequestFailed(dispatch.request, dispatch.attempt, str(error), blame_of(error), usable)
        )

    # -- stopping them ---------------------------------------------------------------------

    def interrupt(self, action: Interrupt) -> None:
        running = self.get(action.attempt)
        if running is not None:
            self._spawn(self._abort(running))

    def stop(self, attempt: int, reason: str) -> None:
        """Abort an attempt that may never answer; its request continues from the tokens it has."""
        running = self.get(attempt)
        if running is None:
            return
        running.stopped = True
        log.warning("attempt %d on %s: %s", running.dispatch.attempt, running.client.name, reason)
        self._spawn(self._abort(running, reason))

    def end(self, running: LiveAttempt) -> None:
        """End an attempt whose scheduler is gone; the tokens that it has made are kept."""
        if running.attempting is None:
            self.give_up(running, "it was not sent yet")
        else:
            self._spawn(self._abort(running))

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
        self.failed(running, InstanceError(f"given up: {reason}"))

    def reject_streamed(self, attempt: int) -> None:
        """Fail an attempt whose stream has brought tokens: they may be of unknown weights."""
        running = self.get(attempt)
        if running is None:
            return
        try:
            brought = running.streamed
        except Exception as error:  # the payload's own: its attempt is of no use
            self.failed(running, error)
            return
        if brought:
            running.cancel()
            restarted = WeightsUnknown("its instance was restarted before the attempt began")
            self.failed(running, restarted)

    # -- losing them -----------------------------------------------------------------------

    def lose(self, instance: str, tell: Callable[[], None]) -> None:
        """The instance is gone: keep what the streams of its attempts brought, then call `tell`,
        which reports the loss to the scheduler. What the scheduler sent to it meanwhile is made
        elsewhere. The ends of these attempts are not reported."""
        lost = InstanceError(
            f"{instance} was lost while it worked on the request: look for a crash in its log, and "
            "if the request causes it, leave the request out"
        )
        for running in self.on(instance):
            self._drop(running)
            self._payloads.note_error(running.dispatch, lost)
            try:
                self._keep_streamed(running)
            except Exception as error:  # the payload's own
                self._tell_failed(running, error, usable=False)
        tell()
        for running in self.on(instance):
            self._drop(running)

    async def close(self) -> None:
        """Give up all attempts without reporting them."""
        if self._looking is not None:
            self._looking.cancel()
        for running in self.every():
            self._drop(running)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(asyncio.sleep(0), *self._tasks, return_exceptions=True)

    def _drop(self, running: LiveAttempt) -> None:
        self.take(running)
        running.cancel()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task, at most until this is closed."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what their streams bring ----------------------------------------------------------

    def report_streams(self) -> None:
        for running in self.every():
            try:
                self._report_stream(running)
            except Exception as error:  # the payload's own: its attempt cannot be used
                self.failed(running, error)

    def _report_stream(self, running: LiveAttempt) -> None:
        """Raises what the payload raises."""
        progress = running.progress()
        if progress is not None:
            self._link.tell(progress)

    def _keep_streamed(self, running: LiveAttempt) -> None:
        self._report_stream(running)
        running.keep_streamed()

    def _look_later(self) -> None:
        self._looking = self._loop.call_later(self._settings.stream_s, self._look)

    def _look(self) -> None:
        self._look_later()
        self.report_streams()


def blame_of(error: Exception) -> Blame:
    """Who is to blame for an attempt's error. Only if the request did not reach the instance is it
    certainly the instance."""
    if isinstance(error, RequestRejected):
        return "length" if isinstance(error, RequestTooLong) else "request"
    if isinstance(error, EnginePaused):
        return "nobody"
    return "instance" if isinstance(error, InstanceUnreached) else "unclear"


def suspicion_of(error: Exception) -> Suspicion | None:
    """What an attempt's error, or the cause of its rejection, suggests about the instance."""
    if isinstance(error, EnginePaused):
        return "pause"
    if isinstance(error, RequestRejected):
        return "restart" if isinstance(error.because, WeightsUnknown) else None
    broken = isinstance(error, ConnectionBroken | OSError | WeightsUnknown)
    return "restart" if broken else None
