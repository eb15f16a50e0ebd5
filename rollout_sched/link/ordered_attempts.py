"""The attempts that a front was ordered to make, from the order to their checked end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rollout_sched.core.actions import Discard, Dispatch, Interrupt
from rollout_sched.core.events import (
    PrefixVerified,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    TokensArrived,
    TurnFinished,
)
from rollout_sched.core.model import Instance
from rollout_sched.link.messages import CallTool, ContinueAttempt, Departed, Order, Reach, Serves
from rollout_sched.link.remote_attempts import RemoteAttempt, RemoteAttempts
from rollout_sched.live.answer_checks import Settle
from rollout_sched.live.driver import Driver
from rollout_sched.live.payload_book import drop
from rollout_sched.live.ports import AnswerUntrue, InstanceError, Outcome
from rollout_sched.live.running_attempts import blame_of, may_be_restarted

Ended = RequestFinished | TurnFinished | RequestInterrupted


class OrderedAttempts:
    """The attempts of one front. Their reported ends are checked here, where the instances are
    supervised, before the scheduler is told.

    attempts  the running ones
    turns     of trajectories whose tools run at the front: the attempt that made the turn
    heard     the handlers of the front's reports about attempts, by type
    """

    def __init__(
        self,
        driver: Driver,
        order: Callable[[Order], None],
        tell: Callable[[Any], None],
        discard: Callable[[Discard], None],
    ) -> None:
        self.attempts = RemoteAttempts()
        self.turns: dict[str, int] = {}
        self.heard: dict[type[Any], Callable[[Any], None]] = {
            TokensArrived: self._arrived,
            PrefixVerified: self._passed,
            RequestFinished: self._ended,
            RequestInterrupted: self._ended,
            TurnFinished: self._ended,
            RequestFailed: self._failed,
        }
        # What the front knows of instances: that they have joined, and their versions.
        self._reached: dict[str, Instance] = {}
        self._served: dict[str, int] = {}
        self._driver = driver
        self._order = order
        self._tell = tell
        self._discard = discard
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- ordered ---------------------------------------------------------------------------

    def dispatch(self, action: Dispatch) -> None:
        attempt = RemoteAttempt(action, self._loop.time())
        self.attempts.add(attempt)
        verified = self._driver.supervisors[action.instance].health.verified
        if verified.is_set():
            self._send(attempt)
        else:
            self._spawn(self._send_once_verified(attempt, verified))

    async def _send_once_verified(self, attempt: RemoteAttempt, verified: asyncio.Event) -> None:
        await verified.wait()
        if self.attempts.get(attempt.dispatch.attempt) is attempt:
            self._send(attempt)

    def _send(self, attempt: RemoteAttempt) -> None:
        attempt.begun, attempt.reads = self._loop.time(), True
        name = attempt.dispatch.instance
        instance = self._driver.view.instance(name)
        if instance is not None:
            self._describe(instance)
        self._order(attempt.dispatch)

    def _describe(self, instance: Instance) -> None:
        """Tell the front what it needs to know of the instance, if that is new."""
        name = instance.id
        if self._reached.get(name) is not instance:
            self._reached[name] = instance
            client = self._driver.supervisors[name].client
            self._order(Reach(name, getattr(client, "api_key", "")))
        if self._served.get(name) != instance.version:
            self._served[name] = instance.version
            self._order(Serves(name, instance.version))

    def departed(self, instance: str) -> None:
        """The instance is gone; if it joins again, the front is told again."""
        self._served.pop(instance, None)
        if self._reached.pop(instance, None) is not None:
            self._order(Departed(instance))

    def interrupt(self, action: Interrupt) -> None:
        attempt = self.attempts.get(action.attempt)
        if attempt is None:
            return
        if attempt.reads:
            self._order(action)
        else:  # it was never sent
            self._tell(self._interrupted(attempt))

    def end(self) -> list[RequestInterrupted]:
        """The front is gone: returns the events of its attempts for the scheduler."""
        for task in self._tasks:
            task.cancel()
        return [self._interrupted(attempt) for attempt in self.attempts.every()]

    def _interrupted(self, attempt: RemoteAttempt) -> RequestInterrupted:
        """End an attempt that will report nothing more. Its streamed tokens are kept; an answer
        about which its instance has not been asked yet is dropped."""
        request, number = attempt.dispatch.request, attempt.dispatch.attempt
        self.attempts.take(number)
        payload = self._driver.front.payloads.get(request)
        kept = 0
        if payload is not None and attempt.answer is not None:
            drop(payload, number)
        elif payload is not None:
            kept = payload.transcript.streamed(number)
            if kept:
                payload.transcript.keep(number, kept, payload.transcript.partial(number, kept))
        return RequestInterrupted(request, number, kept)

    def lose(self, instance: str) -> None:
        """The front has reported everything about a lost instance: end the attempts there."""
        for attempt in self.attempts.on(instance):
            if attempt.answer is not None:  # its instance cannot be asked any more
                error = AnswerUntrue("its instance was lost before it could be asked")
                self._reject(attempt, attempt.answer, error)
            else:
                self.attempts.take(attempt.dispatch.attempt)

    # -- on their way ----------------------------------------------------------------------

    def _arrived(self, event: TokensArrived) -> None:
        attempt = self.attempts.get(event.attempt)
        if attempt is not None:
            attempt.streamed = event.tokens
            self._tell(event)

    def _passed(self, event: PrefixVerified) -> None:
        attempt, view = self.attempts.get(event.attempt), self._driver.view
        if attempt is None or view.is_stopping(event.attempt):
            self._order(ContinueAttempt(event.attempt, None))
            return
        self._tell(event)
        attempt.dispatch = view.going_on(attempt.dispatch)
        self._order(ContinueAttempt(event.attempt, attempt.dispatch))

    def restart_suspected(self, instance: str) -> None:
        """An attempt has failed in a way that suggests a restart of its instance."""
        supervisor = self._driver.supervisors.get(instance)
        if supervisor is not None:
            supervisor.health.check_now()

    # -- their ends ------------------------------------------------------------------------

    def _ended(self, event: Ended) -> None:
        attempt = self.attempts.get(event.attempt)
        if attempt is None:
            return
        attempt.answer = event
        outcome = Outcome(event.tokens, _finish(event), event.spans, None)
        verdict = self._driver.checks.judge(attempt.dispatch, outcome, stopped=attempt.stopped)
        if verdict is None:
            self._believe(attempt, event)
        elif isinstance(verdict, InstanceError):
            self._reject(attempt, event, verdict)
        else:
            self._spawn(self._settle(attempt, event, verdict))

    async def _settle(self, attempt: RemoteAttempt, event: Ended, settle: Settle) -> None:
        """Ask the instance about its answer before the answer is used."""
        try:
            await settle()
        except InstanceError as error:
            self._reject(attempt, event, error)
        except Exception as error:
            self._driver.pump.fail(error)
        else:
            self._believe(attempt, event)

    def _believe(self, attempt: RemoteAttempt, event: Ended) -> None:
        if self.attempts.take(event.attempt) is None:
            return
        self._tell(event)
        turn_over = isinstance(event, TurnFinished)
        if turn_over and self._driver.view.is_acting(event.request, event.attempt):
            self.turns[event.request] = event.attempt
            self._order(CallTool(event.request, event.attempt))

    def _reject(self, attempt: RemoteAttempt, event: Ended, error: InstanceError) -> None:
        """Refuse an answer. The front has kept its tokens: they are discarded if they are untrue,
        else they count as streamed."""
        if self.attempts.take(event.attempt) is None:
            return
        dispatch, untrue = attempt.dispatch, isinstance(error, AnswerUntrue)
        request, number = dispatch.request, dispatch.attempt
        if untrue:
            group, index = dispatch.group, dispatch.index
            self._discard(Discard(request, event.tokens, "untrue", False, number, group, index))
        elif event.tokens:
            self._tell(TokensArrived(request, number, min(event.tokens, dispatch.max_new_tokens)))
        if may_be_restarted(error):
            self.restart_suspected(dispatch.instance)
        self._tell_failed(
            dispatch, RequestFailed(request, number, str(error), blame_of(error), not untrue)
        )

    def _failed(self, event: RequestFailed) -> None:
        attempt = self.attempts.take(event.attempt)
        if attempt is not None:
            self._tell_failed(attempt.dispatch, event)

    def _tell_failed(self, dispatch: Dispatch, event: RequestFailed) -> None:
        self._driver.front.payloads.note_error(dispatch, InstanceError(event.reason))
        self._tell(event)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _finish(event: Ended) -> Any:
    if isinstance(event, RequestFinished):
        return event.reason
    return "turn" if isinstance(event, TurnFinished) else "abort"
