"""One front that is elsewhere, as the host of the scheduler knows it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from rollout_sched.core.actions import Discard, Dispatch, Interrupt
from rollout_sched.core.errors import CallerError
from rollout_sched.core.events import (
    PrefixVerified,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestSubmitted,
    RequestWithdrawn,
    SessionEnded,
    TokensArrived,
    ToolReturned,
    TrajectoryEnded,
    TurnFinished,
)
from rollout_sched.link.group_pieces import group_of, keep, keep_streamed
from rollout_sched.link.messages import (
    Act,
    GoesOn,
    Order,
    Orders,
    PieceMade,
    Refused,
    Relinquished,
    RestartSuspected,
    Serves,
    Streamed,
    encode,
    read_reports,
)
from rollout_sched.link.outbox import Outbox
from rollout_sched.link.remote_attempts import RemoteAttempt, RemoteAttempts
from rollout_sched.live.answer_checks import Settle
from rollout_sched.live.driver import Driver
from rollout_sched.live.ports import AnswerUntrue, InstanceError, Outcome
from rollout_sched.live.running_attempts import blame_of, may_be_restarted

log = logging.getLogger(__name__)

Ended = RequestFinished | TurnFinished | RequestInterrupted


class Owners(Protocol):
    """What this needs of its host."""

    def owns(self, front: ConnectedFront, request: str) -> None: ...
    def disowned(self, request: str) -> None: ...
    def is_owned(self, front: ConnectedFront, name: str) -> bool:
        """Whether a request of a client, or a group, is this front's."""

    def relinquished(self, front: ConnectedFront, instance: str) -> None: ...
    def discard(self, action: Discard) -> None: ...


class ConnectedFront:
    """What it reports is told to the scheduler; what it is ordered goes out.

    attempts  that it was ordered to make, until it has said how they ended
    groups    that it was given: their recipes
    turns     trajectories whose tools work there: the attempt that made the turn
    refused   reports that were for another epoch of the scheduler
    """

    def __init__(
        self,
        name: str,
        epoch: str,
        driver: Driver,
        owners: Owners,
        send: Callable[[bytes], None],
    ) -> None:
        self.name = name
        self.attempts = RemoteAttempts()
        self.groups: dict[str, bytes] = {}
        self.turns: dict[str, int] = {}
        self.refused = 0
        self._served: dict[str, int] = {}  # the versions of instances that it was told
        self._epoch = epoch
        self._driver = driver
        self._owners = owners
        self._send = send
        self._outbox: Outbox[Order] = Outbox(self._send_frame)
        self._tasks: set[asyncio.Task[None]] = set()
        self._heard: dict[type[Any], Callable[[Any], None]] = {
            RequestSubmitted: self._submitted,
            RequestWithdrawn: self._withdrawn,
            SessionEnded: driver.tell,
            TokensArrived: self._arrived,
            PrefixVerified: self._passed,
            RequestFinished: self._ended,
            RequestInterrupted: self._ended,
            TurnFinished: self._ended,
            RequestFailed: self._failed,
            ToolReturned: self._tool_is_over,
            TrajectoryEnded: self._tool_is_over,
            PieceMade: self._piece_made,
            Streamed: self._streamed,
            RestartSuspected: self._restart_suspected,
            Relinquished: self._relinquished,
        }

    # -- what it is ordered ----------------------------------------------------------------

    def order(self, message: Order) -> None:
        self._outbox.put(message)

    def dispatch(self, action: Dispatch) -> None:
        attempt = RemoteAttempt(action, self._now())
        self.attempts.add(attempt)
        verified = self._driver.supervisors[action.instance].health.verified
        if verified.is_set():
            self._send_dispatch(attempt)
        else:
            self._spawn(self._dispatch_once_verified(attempt, verified))

    async def _dispatch_once_verified(
        self, attempt: RemoteAttempt, verified: asyncio.Event
    ) -> None:
        await verified.wait()
        if self.attempts.get(attempt.dispatch.attempt) is attempt:
            self._send_dispatch(attempt)

    def _send_dispatch(self, attempt: RemoteAttempt) -> None:
        attempt.begun, attempt.reads = self._now(), True
        name = attempt.dispatch.instance
        instance = self._driver.view.instance(name)
        if instance is not None and self._served.get(name) != instance.version:
            self._served[name] = instance.version
            self.order(Serves(name, instance.version))
        self.order(attempt.dispatch)

    def interrupt(self, action: Interrupt) -> None:
        attempt = self.attempts.get(action.attempt)
        if attempt is None:
            return
        if attempt.reads:
            self.order(action)
        else:  # it was never sent
            self.tell(self._break_off(attempt))

    def _break_off(self, attempt: RemoteAttempt) -> RequestInterrupted:
        """Nothing of it will come any more; what its stream has brought here is gone on from."""
        request, number = attempt.dispatch.request, attempt.dispatch.attempt
        self.attempts.take(number)
        payload = self._driver.payloads.get(request)
        kept = 0 if payload is None else payload.transcript.streamed(number)
        if payload is not None and kept:
            payload.transcript.keep(number, kept, payload.transcript.partial(number, kept))
        return RequestInterrupted(request, number, kept)

    def end(self) -> list[RequestInterrupted | TrajectoryEnded]:
        """It is gone: what the scheduler is to be told of what it had under way, as soon as its
        groups are somebody else's."""
        self._outbox.close()
        for task in self._tasks:
            task.cancel()
        attempts = [self._break_off(attempt) for attempt in self.attempts.every()]
        turns = [TrajectoryEnded(name, number, "failed") for name, number in self.turns.items()]
        return [*attempts, *turns]

    def lose(self, instance: str) -> None:
        """It has said all that it will of an instance that is lost."""
        for attempt in self.attempts.on(instance):
            if attempt.answer is not None:  # its instance cannot be asked any more
                error = AnswerUntrue("its instance was lost before it could be asked")
                self._disbelieve(attempt, attempt.answer, error)
            else:
                self.attempts.take(attempt.dispatch.attempt)

    # -- what it says ----------------------------------------------------------------------

    def receive(self, frame: bytes) -> None:
        """One of its frames. Raises msgspec.DecodeError."""
        reports = read_reports(frame)
        if reports.epoch != self._epoch:
            self.refused += len(reports.reports)
            return
        for report in reports.reports:
            self._heard[type(report)](report)

    def tell(self, event: Any) -> None:
        try:
            self._driver.tell(event)
        except CallerError as error:
            log.error("%s of front %s was refused: %s", event, self.name, error)

    def _submitted(self, event: RequestSubmitted) -> None:
        self._owners.owns(self, event.request)
        try:
            self._driver.pump.check()
            self._driver.tell(event)
        except Exception as error:  # its client is told
            self._owners.disowned(event.request)
            self.order(Refused(event.request, str(error)))

    def _withdrawn(self, event: RequestWithdrawn) -> None:
        if self._owners.is_owned(self, event.request):
            self.tell(event)

    def _arrived(self, event: TokensArrived) -> None:
        attempt = self.attempts.get(event.attempt)
        if attempt is not None:
            attempt.streamed = event.tokens
            self.tell(event)

    def _passed(self, event: PrefixVerified) -> None:
        attempt, view = self.attempts.get(event.attempt), self._driver.view
        if attempt is None or view.is_stopping(event.attempt):
            self.order(GoesOn(event.attempt, None))
            return
        self.tell(event)
        attempt.dispatch = view.going_on(attempt.dispatch)
        self.order(GoesOn(event.attempt, attempt.dispatch))

    def _piece_made(self, made: PieceMade) -> None:
        """Of what nobody wants any more there is nothing to hold."""
        wanted = self._driver.view.versions_of(made.attempt) is not None
        acting = self.turns.get(made.request) == made.attempt
        if (wanted or acting) and self._owners.is_owned(self, group_of(made.request)):
            keep(self._driver.payloads, made)

    def _streamed(self, said: Streamed) -> None:
        wanted = self._driver.view.versions_of(said.attempt) is not None
        if wanted and self._owners.is_owned(self, group_of(said.request)):
            keep_streamed(self._driver.payloads, said)

    def _restart_suspected(self, report: RestartSuspected) -> None:
        supervisor = self._driver.supervisors.get(report.instance)
        if supervisor is not None:
            supervisor.health.check_now()

    def _relinquished(self, report: Relinquished) -> None:
        self._owners.relinquished(self, report.instance)

    def _tool_is_over(self, event: ToolReturned | TrajectoryEnded) -> None:
        if self.turns.get(event.request) == event.attempt:
            del self.turns[event.request]
            self.tell(event)

    # -- how attempts end ------------------------------------------------------------------

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
            self._disbelieve(attempt, event, verdict)
        else:
            self._spawn(self._settle(attempt, event, verdict))

    async def _settle(self, attempt: RemoteAttempt, event: Ended, settle: Settle) -> None:
        """Its instance is asked before anybody hears of its answer."""
        try:
            await settle()
        except InstanceError as error:
            self._disbelieve(attempt, event, error)
        except Exception as error:
            self._driver.pump.fail(error)
        else:
            self._believe(attempt, event)

    def _believe(self, attempt: RemoteAttempt, event: Ended) -> None:
        if self.attempts.take(event.attempt) is None:
            return
        self.tell(event)
        turn_over = isinstance(event, TurnFinished)
        if turn_over and self._driver.view.is_acting(event.request, event.attempt):
            self.turns[event.request] = event.attempt
            self.order(Act(event.request, event.attempt))

    def _disbelieve(self, attempt: RemoteAttempt, event: Ended, error: InstanceError) -> None:
        """The front has kept what came: that goes, or counts as far as it can."""
        if self.attempts.take(event.attempt) is None:
            return
        dispatch, untrue = attempt.dispatch, isinstance(error, AnswerUntrue)
        request, number = dispatch.request, dispatch.attempt
        if untrue:
            group, index = dispatch.group, dispatch.index
            self._owners.discard(
                Discard(request, event.tokens, "untrue", False, number, group, index)
            )
        elif event.tokens:
            self.tell(TokensArrived(request, number, min(event.tokens, dispatch.max_new_tokens)))
        if may_be_restarted(error):
            self._restart_suspected(RestartSuspected(dispatch.instance))
        self._tell_failed(
            dispatch, RequestFailed(request, number, str(error), blame_of(error), not untrue)
        )

    def _failed(self, event: RequestFailed) -> None:
        attempt = self.attempts.take(event.attempt)
        if attempt is not None:
            self._tell_failed(attempt.dispatch, event)

    def _tell_failed(self, dispatch: Dispatch, event: RequestFailed) -> None:
        self._driver.payloads.note_error(dispatch, InstanceError(event.reason))
        self.tell(event)

    # -- small things ----------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _send_frame(self, orders: list[Order]) -> None:
        self._send(encode(Orders(self._epoch, orders)))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _finish(event: Ended) -> Any:
    if isinstance(event, RequestFinished):
        return event.reason
    return "turn" if isinstance(event, TurnFinished) else "abort"
