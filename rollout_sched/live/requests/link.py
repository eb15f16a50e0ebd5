"""A front's interface to its scheduler, and the implementation for a scheduler in this process.

No other part of a front knows where the scheduler is. The link answers what the front would
otherwise look up in it: whether to call a tool, whether an answer is valid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from rollout_sched.core import SchedulerView
from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import Event
from rollout_sched.live.event_pump import EventPump
from rollout_sched.live.instances.supervisor import InstanceSupervisor
from rollout_sched.live.ports import InstanceClient, Outcome, Suspicion
from rollout_sched.live.requests.answers import AnswerChecks, Verdict


class SchedulerLink(Protocol):
    """One front's way to its scheduler."""

    @property
    def broken(self) -> Exception | None:
        """Why the scheduler cannot continue; None while it can."""

    @property
    def tell(self) -> Callable[[Event], None]:
        """Reports an event of a request that this front holds."""

    @property
    def defer(self) -> Callable[..., None]:
        """Calls a function with arguments when the current order or event has been handled: a
        receiver of an answer may send a new request at once."""

    def fail(self, error: Exception) -> None:
        """The scheduler's orders can no longer be carried out."""

    def client(self, instance: str) -> InstanceClient:
        """The client that sends orders to this instance."""

    def unverified(self, instance: str) -> asyncio.Event | None:
        """None if work may be sent to the instance now; else the event to wait for."""

    def suspect(self, instance: str, of: Suspicion) -> None:
        """An attempt has failed in a way that suggests something about its instance."""

    def judge(self, dispatch: Dispatch, outcome: Outcome, *, stopped: bool) -> Verdict:
        """Whether an attempt's answer is accepted; `stopped`: we have aborted it ourselves."""

    def when_acting(self, dispatch: Dispatch, begin: Callable[[], None]) -> None:
        """Call `begin` after the end of the turn was reported, if the tool must be called."""


class DirectLink:
    """The link to a scheduler in this process: events are handled at once."""

    def __init__(
        self,
        pump: EventPump,
        view: SchedulerView,
        supervisors: Mapping[str, InstanceSupervisor],
        checks: AnswerChecks,
    ) -> None:
        self.tell: Callable[[Event], None] = pump.tell  # without a wrapper: it is on the hot path
        self.defer: Callable[..., None] = pump.defer
        self._pump = pump
        self._view = view
        self._supervisors = supervisors
        self._checks = checks

    @property
    def broken(self) -> Exception | None:
        return self._pump.broken

    def fail(self, error: Exception) -> None:
        self._pump.fail(error)

    def client(self, instance: str) -> InstanceClient:
        return self._supervisors[instance].client

    def unverified(self, instance: str) -> asyncio.Event | None:
        verified = self._supervisors[instance].health.verified
        return None if verified.is_set() else verified

    def suspect(self, instance: str, of: Suspicion) -> None:
        supervisor = self._supervisors.get(instance)
        if supervisor is not None:
            supervisor.suspect(of)

    def judge(self, dispatch: Dispatch, outcome: Outcome, *, stopped: bool) -> Verdict:
        return self._checks.judge(dispatch, outcome, stopped=stopped)

    def when_acting(self, dispatch: Dispatch, begin: Callable[[], None]) -> None:
        self._pump.defer(self._begin_if_acting, dispatch, begin)

    def _begin_if_acting(self, dispatch: Dispatch, begin: Callable[[], None]) -> None:
        if self._view.is_acting(dispatch.request, dispatch.attempt):
            begin()
