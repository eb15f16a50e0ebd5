"""The book of running attempts: reports the end of each to the scheduler, once."""

from __future__ import annotations

import logging

from rollout_sched.core.events import (
    Blame,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    TurnFinished,
)
from rollout_sched.live.asking import unquoted
from rollout_sched.live.attempts import LiveAttempt
from rollout_sched.live.payload_book import PayloadBook, drop
from rollout_sched.live.ports import (
    AnswerUntrue,
    ConnectionBroken,
    InstanceError,
    InstanceUnreached,
    Outcome,
    RequestRejected,
    WeightsUnknown,
)
from rollout_sched.live.scheduler_link import SchedulerLink
from rollout_sched.live.tool_calls import ToolCalls

log = logging.getLogger(__name__)


class RunningAttempts:
    """Holds each attempt from its order to its end."""

    def __init__(self, link: SchedulerLink, payloads: PayloadBook, tools: ToolCalls) -> None:
        self._link = link
        self._payloads = payloads
        self._tools = tools
        self._running: dict[int, LiveAttempt] = {}
        self._by_instance: dict[str, dict[int, LiveAttempt]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, attempt: int) -> bool:
        return attempt in self._running

    def get(self, attempt: int) -> LiveAttempt | None:
        return self._running.get(attempt)

    def every(self) -> list[LiveAttempt]:
        return list(self._running.values())

    def on(self, instance: str) -> list[LiveAttempt]:
        """The attempts on an instance, in the order of dispatch."""
        return list(self._by_instance.get(instance, {}).values())

    def add(self, running: LiveAttempt) -> None:
        dispatch = running.dispatch
        self._running[dispatch.attempt] = running
        self._by_instance.setdefault(dispatch.instance, {})[dispatch.attempt] = running

    def take(self, running: LiveAttempt) -> bool:
        """Remove an attempt. False if it was removed before: this is not its first end."""
        dispatch = running.dispatch
        if self._running.pop(dispatch.attempt, None) is None:
            return False
        there = self._by_instance[dispatch.instance]
        del there[dispatch.attempt]
        if not there:
            del self._by_instance[dispatch.instance]
        running.end()
        return True

    # -- what their streams bring ----------------------------------------------------------

    def report_stream(self, running: LiveAttempt) -> None:
        """Raises what the payload raises."""
        progress = running.progress()
        if progress is not None:
            self._link.tell(progress)

    def report_streams(self) -> None:
        for running in self.every():
            try:
                self.report_stream(running)
            except Exception as error:  # the payload's own: its attempt cannot be used
                self.failed(running, error)

    def _keep_streamed(self, running: LiveAttempt) -> None:
        self.report_stream(running)
        running.keep_streamed()

    # -- their ends ------------------------------------------------------------------------

    def ended(self, running: LiveAttempt, outcome: Outcome) -> None:
        """The attempt has ended by itself, or because it was stopped."""
        dispatch = running.dispatch
        if not self.take(running):
            return
        kept = min(max(0, outcome.tokens), dispatch.max_new_tokens)
        try:
            running.payload.transcript.keep(dispatch.attempt, kept, outcome.piece)
        except Exception as error:  # the payload's own
            self._tell_failed(running, error, usable=False)
            return
        request, attempt = dispatch.request, dispatch.attempt
        if outcome.finish == "abort":
            self._link.tell(RequestInterrupted(request, attempt, outcome.tokens, outcome.spans))
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
        why = unquoted(error)
        log.debug("attempt %d on %s failed: %s", dispatch.attempt, dispatch.instance, why)
        if may_be_restarted(error):  # first, because `tell` gives the slot to new work at once
            self._link.restart_suspected(dispatch.instance)
        self._link.tell(
            RequestFailed(dispatch.request, dispatch.attempt, str(error), blame_of(error), usable)
        )

    def lose(self, instance: str) -> None:
        """Their instance is gone: keep what their streams brought. The loss must be reported to the
        scheduler next; the ends of the attempts are not reported."""
        for running in self.on(instance):
            self.take(running)
            running.cancel()
            try:
                self._keep_streamed(running)
            except Exception as error:  # the payload's own
                self._tell_failed(running, error, usable=False)

    def forget(self, instance: str) -> None:
        """Drop the attempts on an instance without reporting them."""
        for running in self.on(instance):
            self.take(running)
            running.cancel()

    def clear(self) -> None:
        """Drop all attempts without reporting them."""
        for running in self.every():
            self.take(running)
            running.cancel()


def blame_of(error: Exception) -> Blame:
    """Who is to blame for an attempt's error. Only if the request did not reach the instance is it
    certainly the instance."""
    if isinstance(error, RequestRejected):
        return "request"
    return "instance" if isinstance(error, InstanceUnreached) else "unclear"


def may_be_restarted(error: Exception) -> bool:
    """Whether an attempt's error, or the cause of its rejection, suggests a restart."""
    if isinstance(error, RequestRejected):
        return isinstance(error.because, WeightsUnknown)
    return isinstance(error, ConnectionBroken | OSError | WeightsUnknown)
