"""A front in another process, as the scheduler's host sees it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Discard, Dispatch, Interrupt
from rollout_sched.core.model.model import Instance
from rollout_sched.core.model.request_ids import group_of
from rollout_sched.link.pieces import add_piece, add_streamed
from rollout_sched.link.protocol import (
    CallTool,
    ConnectInstance,
    DisconnectInstance,
    FrameSequence,
    InstanceReleased,
    InstanceSuspected,
    InstanceVersion,
    Order,
    Orders,
    Outbox,
    PieceMade,
    RejectRequest,
    Streamed,
    read_reports,
)
from rollout_sched.live import Driver
from rollout_sched.live.instances import AttemptIndex, InFlight
from rollout_sched.live.ports import AnswerUntrue, InstanceError, Outcome
from rollout_sched.live.requests import Settle, blame_of, drop, suspicion_of

if TYPE_CHECKING:
    from rollout_sched.link.host import Host  # which makes these

log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------
# Running attempts at fronts in other processes, as the scheduler's host sees them.


class RemoteAttempt(InFlight):
    """A dispatch that a front carries out.

    begun     when it was ordered, in seconds of the host's clock
    reads     whether it was sent to its front
    streamed  tokens of its stream that the host knows of
    answer    its end as the front reported it; None before
    """

    __slots__ = ("answer", "reads", "streamed")

    streamed: int
    reads: bool

    def __init__(self, dispatch: Dispatch, begun: float) -> None:
        super().__init__(dispatch, begun)
        self.streamed = 0
        self.reads = False
        self.answer: ev.Answered | None = None


class ConnectedFront:
    """Passes the front's reports to the scheduler, and sends it orders. The reported ends of its
    attempts are checked here, where the instances are supervised, before the scheduler is told.

    groups    the groups that it was given, with their specs
    attempts  the running ones
    turns     of trajectories whose tools run at the front: the attempt that made the turn
    """

    def __init__(
        self, name: str, driver: Driver, host: Host, send: Callable[[bytes], None]
    ) -> None:
        self.name = name
        self.groups: dict[str, bytes] = {}
        self.attempts: AttemptIndex[RemoteAttempt] = AttemptIndex()
        self.turns: dict[str, int] = {}
        # What the front knows of instances: that they have joined, and their versions.
        self._reached: dict[str, Instance] = {}
        self._served: dict[str, int] = {}
        self._driver = driver
        self._host = host
        self._frames = FrameSequence(driver.epoch)
        self._repeated = 0
        self._outbox = Outbox(Orders, driver.epoch, send)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._heard: dict[type[Any], Callable[[Any], None]] = {
            ev.TokensArrived: self._arrived,
            ev.RequestFinished: self._ended,
            ev.RequestInterrupted: self._ended,
            ev.TurnFinished: self._ended,
            ev.RequestFailed: self._failed,
            ev.RequestSubmitted: self._submitted,
            ev.RequestWithdrawn: self._withdrawn,
            ev.SessionEnded: self.tell,
            ev.ToolReturned: self._tool_is_over,
            ev.TrajectoryEnded: self._tool_is_over,
            PieceMade: self._piece_made,
            Streamed: self._streamed,
            InstanceSuspected: self._suspected,
            InstanceReleased: self._released,
        }

    @property
    def refused(self) -> int:
        """Number of refused frames (of another epoch, or repeated) and of refused requests (with an
        id that is in use)."""
        return self._frames.refused + self._repeated

    def order(self, message: Order) -> None:
        self._outbox.put(message)

    def tell(self, event: Any) -> None:
        try:
            self._driver.tell(event)
        except CallerError as error:
            log.error("%s of front %s was refused: %s", type(event).__name__, self.name, error)

    # -- what it is ordered ----------------------------------------------------------------

    def dispatch(self, action: Dispatch) -> None:
        attempt = RemoteAttempt(action, self._loop.time())
        self.attempts.add(attempt)
        verified = self._driver.supervisors[action.instance].health.verified
        if verified.is_set():
            self._send_dispatch(attempt)
        else:
            self._spawn(self._send_once_verified(attempt, verified))

    async def _send_once_verified(self, attempt: RemoteAttempt, verified: asyncio.Event) -> None:
        await verified.wait()
        if self.attempts.get(attempt.dispatch.attempt) is attempt:
            self._send_dispatch(attempt)

    def _send_dispatch(self, attempt: RemoteAttempt) -> None:
        attempt.begun, attempt.reads = self._loop.time(), True
        name = attempt.dispatch.instance
        instance = self._driver.view.instance(name)
        if instance is not None:
            self._describe(instance)
        self.order(attempt.dispatch)

    def _describe(self, instance: Instance) -> None:
        """Tell the front what it needs to know of the instance, if that is new."""
        name = instance.id
        if self._reached.get(name) is not instance:
            self._reached[name] = instance
            client = self._driver.supervisors[name].client
            self.order(ConnectInstance(name, getattr(client, "api_key", "")))
        if self._served.get(name) != instance.version:
            self._served[name] = instance.version
            self.order(InstanceVersion(name, instance.version))

    def departed(self, instance: str) -> None:
        """The instance is gone; if it joins again, the front is told again."""
        self._served.pop(instance, None)
        if self._reached.pop(instance, None) is not None:
            self.order(DisconnectInstance(instance))

    def interrupt(self, action: Interrupt) -> None:
        attempt = self.attempts.get(action.attempt)
        if attempt is None:
            return
        if attempt.reads:
            self.order(action)
        else:  # it was never sent
            self.tell(self._interrupted(attempt))

    def end(self) -> list[ev.RequestInterrupted | ev.TrajectoryEnded]:
        """The front is gone. Returns the events of its running work, to be reported to the
        scheduler when its groups have another owner."""
        self._outbox.close()
        for task in self._tasks:
            task.cancel()
        return [
            *(self._interrupted(attempt) for attempt in self.attempts.every()),
            *(ev.TrajectoryEnded(name, number, "failed") for name, number in self.turns.items()),
        ]

    def _interrupted(self, attempt: RemoteAttempt) -> ev.RequestInterrupted:
        """End an attempt that will report nothing more. Its streamed tokens are kept; an answer
        about which its instance has not been asked yet is dropped."""
        request, number = attempt.dispatch.request, attempt.dispatch.attempt
        self.attempts.take(attempt)
        payload = self._driver.front.payloads.get(request)
        kept = 0
        if payload is not None and attempt.answer is not None:
            drop(payload, number)
        elif payload is not None:
            kept = payload.transcript.streamed(number)
            if kept:
                payload.transcript.append(number, kept, payload.transcript.partial(number, kept))
        return ev.RequestInterrupted(request, number, kept)

    def lose(self, instance: str) -> None:
        """The front has reported everything about a lost instance: end the attempts on it."""
        for attempt in self.attempts.on(instance):
            if attempt.answer is not None:  # its instance cannot be asked any more
                error = AnswerUntrue("its instance was lost before it could be asked")
                self._reject(attempt, attempt.answer, error)
            else:
                self.attempts.take(attempt)

    # -- what it says ----------------------------------------------------------------------

    def receive(self, frame: bytes) -> None:
        """Handle a frame of the front. Raises msgspec.DecodeError, FrameMissing."""
        reports = read_reports(frame)
        if self._frames.admits(reports):
            for report in reports.reports:
                self._heard[type(report)](report)

    def _submitted(self, event: ev.RequestSubmitted) -> None:
        if not self._host.owns(self, event.request):
            self._repeated += 1
            return
        try:
            self._driver.pump.check()
            self._driver.tell(event)
        except Exception as error:  # reported to its client
            self._host.no_longer_owned(event.request)
            self.order(RejectRequest(event.request, str(error)))

    def _withdrawn(self, event: ev.RequestWithdrawn) -> None:
        if self._host.is_owned(self, event.request):
            self.tell(event)

    def _piece_made(self, made: PieceMade) -> None:
        """Keep the tokens, unless the attempt is no longer needed."""
        wanted = self._driver.view.is_wanted(made.request, made.attempt)
        acting = self.turns.get(made.request) == made.attempt
        if (wanted or acting) and self._host.is_owned(self, group_of(made.request)):
            add_piece(self._driver.front.payloads, made)

    def _streamed(self, said: Streamed) -> None:
        wanted = self._driver.view.is_wanted(said.request, said.attempt)
        if wanted and self._host.is_owned(self, group_of(said.request)):
            add_streamed(self._driver.front.payloads, said)

    def _suspected(self, report: InstanceSuspected) -> None:
        supervisor = self._driver.supervisors.get(report.instance)
        if supervisor is not None:
            supervisor.suspect(report.of)

    def _released(self, report: InstanceReleased) -> None:
        self._host.released(self, report.instance)

    def _tool_is_over(self, event: ev.ToolReturned | ev.TrajectoryEnded) -> None:
        turns = self.turns
        if turns.get(event.request) == event.attempt:
            del turns[event.request]
            self.tell(event)

    # -- its attempts ----------------------------------------------------------------------

    def _arrived(self, event: ev.TokensArrived) -> None:
        attempt = self.attempts.get(event.attempt)
        if attempt is not None:
            attempt.streamed = event.tokens
            self.tell(event)

    def _ended(self, event: ev.Answered) -> None:
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

    async def _settle(self, attempt: RemoteAttempt, event: ev.Answered, settle: Settle) -> None:
        """Ask the instance about its answer before the answer is used."""
        try:
            await settle()
        except InstanceError as error:
            self._reject(attempt, event, error)
        except Exception as error:
            self._driver.pump.fail(error)
        else:
            self._believe(attempt, event)

    def _believe(self, attempt: RemoteAttempt, event: ev.Answered) -> None:
        if not self.attempts.take(attempt):
            return
        self.tell(event)
        turn_over = isinstance(event, ev.TurnFinished)
        if turn_over and self._driver.view.is_acting(event.request, event.attempt):
            self.turns[event.request] = event.attempt
            self.order(CallTool(event.request, event.attempt))

    def _reject(self, attempt: RemoteAttempt, event: ev.Answered, error: InstanceError) -> None:
        """Refuse an answer. The front has kept its tokens: they are discarded if they are untrue,
        else they count as streamed."""
        if not self.attempts.take(attempt):
            return
        dispatch, untrue = attempt.dispatch, isinstance(error, AnswerUntrue)
        request, number = dispatch.request, dispatch.attempt
        if untrue:
            group, index = dispatch.group, dispatch.index
            self._host.discard(
                Discard(request, event.tokens, "untrue", False, number, group, index)
            )
        elif event.tokens:
            self.tell(ev.TokensArrived(request, number, min(event.tokens, dispatch.max_new_tokens)))
        suspicion = suspicion_of(error)
        if suspicion:
            self._suspected(InstanceSuspected(dispatch.instance, suspicion))
        self._tell_failed(
            dispatch, ev.RequestFailed(request, number, str(error), blame_of(error), not untrue)
        )

    def _failed(self, event: ev.RequestFailed) -> None:
        attempt = self.attempts.get(event.attempt)
        if attempt is not None:
            self.attempts.take(attempt)
            self._tell_failed(attempt.dispatch, event)

    def _tell_failed(self, dispatch: Dispatch, event: ev.RequestFailed) -> None:
        error = InstanceError(event.reason, unquoted=f"the log of front {self.name} says why")
        self._driver.front.payloads.note_error(dispatch, error)
        self.tell(event)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _finish(event: ev.Answered) -> Any:
    if isinstance(event, ev.RequestFinished):
        return event.reason
    return "turn" if isinstance(event, ev.TurnFinished) else "abort"
