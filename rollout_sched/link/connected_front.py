"""A front in another process, as the scheduler's host sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from rollout_sched.core.actions import Discard
from rollout_sched.core.errors import CallerError
from rollout_sched.core.events import (
    RequestInterrupted,
    RequestSubmitted,
    RequestWithdrawn,
    SessionEnded,
    ToolReturned,
    TrajectoryEnded,
)
from rollout_sched.link.frame_sequence import FrameSequence
from rollout_sched.link.group_pieces import group_of, keep, keep_streamed
from rollout_sched.link.messages import (
    Order,
    Orders,
    PieceMade,
    Refused,
    Relinquished,
    RestartSuspected,
    Streamed,
    encode,
    read_reports,
)
from rollout_sched.link.ordered_attempts import OrderedAttempts
from rollout_sched.link.outbox import Outbox
from rollout_sched.link.remote_attempts import RemoteAttempts
from rollout_sched.live.driver import Driver

log = logging.getLogger(__name__)


class Owners(Protocol):
    """The part of the host that this uses."""

    def owns(self, front: ConnectedFront, request: str) -> bool:
        """Make `front` the owner of `request`; False if it already has an owner."""

    def no_longer_owned(self, request: str) -> None: ...
    def is_owned(self, front: ConnectedFront, name: str) -> bool:
        """Whether this front owns a client's request or a group."""

    def relinquished(self, front: ConnectedFront, instance: str) -> None: ...
    def discard(self, action: Discard) -> None: ...


class ConnectedFront:
    """Passes the front's reports to the scheduler, and sends it orders.

    ordered   the attempts that it was ordered to make
    groups    the groups that it was given, with their recipes
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
        self.groups: dict[str, bytes] = {}
        self._epoch = epoch
        self._driver = driver
        self._owners = owners
        self._send = send
        self._sent = 0
        self._frames = FrameSequence(epoch)
        self._repeated = 0
        self._outbox: Outbox[Order] = Outbox(self._send_frame)
        self.ordered = OrderedAttempts(driver, self.order, self.tell, owners.discard)
        self._heard: dict[type[Any], Callable[[Any], None]] = {
            **self.ordered.heard,
            RequestSubmitted: self._submitted,
            RequestWithdrawn: self._withdrawn,
            SessionEnded: self.tell,
            ToolReturned: self._tool_is_over,
            TrajectoryEnded: self._tool_is_over,
            PieceMade: self._piece_made,
            Streamed: self._streamed,
            RestartSuspected: self._restart_suspected,
            Relinquished: self._relinquished,
        }

    @property
    def attempts(self) -> RemoteAttempts:
        """The running attempts of the front."""
        return self.ordered.attempts

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
            log.error("%s of front %s was refused: %s", event, self.name, error)

    def end(self) -> list[RequestInterrupted | TrajectoryEnded]:
        """The front is gone. Returns the events of its running work, to be reported to the
        scheduler when its groups have another owner."""
        self._outbox.close()
        turns = self.ordered.turns.items()
        ended = [TrajectoryEnded(name, number, "failed") for name, number in turns]
        return [*self.ordered.end(), *ended]

    def _send_frame(self, orders: list[Order]) -> None:
        self._sent += 1
        self._send(encode(Orders(self._epoch, self._sent, orders)))

    # -- what it says ----------------------------------------------------------------------

    def receive(self, frame: bytes) -> None:
        """Handle a frame of the front. Raises msgspec.DecodeError, FrameMissing."""
        reports = read_reports(frame)
        if self._frames.admits(reports):
            for report in reports.reports:
                self._heard[type(report)](report)

    def _submitted(self, event: RequestSubmitted) -> None:
        if not self._owners.owns(self, event.request):
            self._repeated += 1
            return
        try:
            self._driver.pump.check()
            self._driver.tell(event)
        except Exception as error:  # reported to its client
            self._owners.no_longer_owned(event.request)
            self.order(Refused(event.request, str(error)))

    def _withdrawn(self, event: RequestWithdrawn) -> None:
        if self._owners.is_owned(self, event.request):
            self.tell(event)

    def _piece_made(self, made: PieceMade) -> None:
        """Keep the tokens, unless the attempt is no longer needed."""
        wanted = self._driver.view.versions_of(made.attempt) is not None
        acting = self.ordered.turns.get(made.request) == made.attempt
        if (wanted or acting) and self._owners.is_owned(self, group_of(made.request)):
            keep(self._driver.front.payloads, made)

    def _streamed(self, said: Streamed) -> None:
        wanted = self._driver.view.versions_of(said.attempt) is not None
        if wanted and self._owners.is_owned(self, group_of(said.request)):
            keep_streamed(self._driver.front.payloads, said)

    def _restart_suspected(self, report: RestartSuspected) -> None:
        self.ordered.restart_suspected(report.instance)

    def _relinquished(self, report: Relinquished) -> None:
        self._owners.relinquished(self, report.instance)

    def _tool_is_over(self, event: ToolReturned | TrajectoryEnded) -> None:
        turns = self.ordered.turns
        if turns.get(event.request) == event.attempt:
            del turns[event.request]
            self.tell(event)
