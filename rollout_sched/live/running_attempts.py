"""The book of attempts under way: the end of each is told to the scheduler, once."""

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
    """An attempt is here from its order to its end."""

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
        """Those on an instance, in the order in which they were dispatched."""
        return list(self._by_instance.get(instance, {}).values())

    def add(self, running: LiveAttempt) -> None:
        dispatch = running.dispatch
        self._running[dispatch.attempt] = running
        self._by_instance.setdefault(dispatch.instance, {})[dispatch.attempt] = running

    def take(self, running: LiveAttempt) -> bool:
        """Let go of an attempt. False if that has happened: this is not its first end."""
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
            except Exception as error:  # the payload's own: its attempt is of no use
                self.failed(running, error)

    def _keep_streamed(self, running: LiveAttempt) -> None:
        self.report_stream(running)
        running.keep_streamed()

    # -- their ends ------------------------------------------------------------------------

    def ended(self, running: LiveAttempt, outcome: Outcome) -> None:
        """By itself, or because it was stopped."""
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
        """An attempt that is here no longer has failed."""
        dispatch = running.dispatch
        if not isinstance(error, InstanceError | RequestRejected | OSError):
            text = "attempt %d of request %s"
            log.error(text, dispatch.attempt, dispatch.request, exc_info=error)
        if not usable:
            drop(running.payload, dispatch.attempt)
        self._payloads.note_error(dispatch, error)
        why = unquoted(error)
        log.debug("attempt %d on %s failed: %s", dispatch.attempt, dispatch.instance, why)
        if may_be_restarted(error):  # first: its slot is given away as soon as this is told
            self._link.restart_suspected(dispatch.instance)
        self._link.tell(
            RequestFailed(dispatch.request, dispatch.attempt, str(error), blame_of(error), usable)
        )

    def lose(self, instance: str) -> None:
        """Their instance is gone; what their streams brought is kept. The scheduler is to hear of
        the loss next: until then it is not told that they have ended."""
        for running in self.on(instance):
            self.take(running)
            running.cancel()
            try:
                self._keep_streamed(running)
            except Exception as error:  # the payload's own
                self._tell_failed(running, error, usable=False)

    def forget(self, instance: str) -> None:
        """Nobody waits for those on an instance any more, and nobody is told."""
        for running in self.on(instance):
            self.take(running)
            running.cancel()

    def clear(self) -> None:
        """Give up all of them; nobody is told."""
        for running in self.every():
            self.take(running)
            running.cancel()


def blame_of(error: Exception) -> Blame:
    """Whose fault an attempt's error is. Only what was never sent is surely the instance's."""
    if isinstance(error, RequestRejected):
        return "request"
    return "instance" if isinstance(error, InstanceUnreached) else "unclear"


def may_be_restarted(error: Exception) -> bool:
    """Whether an attempt's error, or what it was rejected for, speaks for a restart."""
    if isinstance(error, RequestRejected):
        return isinstance(error.because, WeightsUnknown)
    return isinstance(error, ConnectionBroken | OSError | WeightsUnknown)
