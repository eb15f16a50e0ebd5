"""What a front asks of the scheduler, wherever that is, and the answer where it is in the process.

Nothing else of a front knows where the scheduler is. What it would have to look up there it is told
instead: how an attempt goes on, whether a tool is wanted, what an answer is worth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from rollout_sched.core.actions import Dispatch
from rollout_sched.core.events import Event, PrefixVerified
from rollout_sched.core.view import SchedulerView
from rollout_sched.live.answer_checks import AnswerChecks, Verdict
from rollout_sched.live.event_pump import EventPump
from rollout_sched.live.instance_supervisor import InstanceSupervisor
from rollout_sched.live.ports import InstanceClient, Outcome


class SchedulerLink(Protocol):
    """One front's way to its scheduler."""

    @property
    def broken(self) -> Exception | None:
        """Why the scheduler cannot go on; None while it can."""

    @property
    def tell(self) -> Callable[[Event], None]:
        """Something has happened to what this front holds."""

    @property
    def afterwards(self) -> Callable[..., None]:
        """Call this, with these arguments, when the order or event under way is dealt with: whoever
        is answered may ask again at once."""

    def fail(self, error: Exception) -> None:
        """What the scheduler orders can no longer be carried out."""

    def client(self, instance: str) -> InstanceClient:
        """Whose orders go to this instance."""

    def unverified(self, instance: str) -> asyncio.Event | None:
        """None where an instance may be sent something now; else what has to be waited for."""

    def restart_suspected(self, instance: str) -> None:
        """An attempt has failed as it would if its instance were restarted."""

    def judge(self, dispatch: Dispatch, outcome: Outcome, *, stopped: bool) -> Verdict:
        """What an attempt's answer is worth; `stopped`: we have broken it off ourselves."""

    async def passed(self, dispatch: Dispatch, tokens: int, *, stopped: bool) -> Dispatch | None:
        """So many tokens of its draft are kept: how it goes on, or None if it is to stop."""

    def when_acting(self, dispatch: Dispatch, begin: Callable[[], None]) -> None:
        """Once it has been told that an attempt has ended a turn: begin, if a tool is wanted."""


class DirectLink:
    """To a scheduler in this process: what is told is handled at once."""

    def __init__(
        self,
        pump: EventPump,
        view: SchedulerView,
        supervisors: Mapping[str, InstanceSupervisor],
        checks: AnswerChecks,
    ) -> None:
        self.tell: Callable[[Event], None] = pump.tell  # as it is, for it is on the hot path
        self.afterwards: Callable[..., None] = pump.afterwards
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

    def restart_suspected(self, instance: str) -> None:
        supervisor = self._supervisors.get(instance)
        if supervisor is not None:
            supervisor.health.check_now()

    def judge(self, dispatch: Dispatch, outcome: Outcome, *, stopped: bool) -> Verdict:
        return self._checks.judge(dispatch, outcome, stopped=stopped)

    async def passed(self, dispatch: Dispatch, tokens: int, *, stopped: bool) -> Dispatch | None:
        if stopped or self._view.is_stopping(dispatch.attempt) or self._pump.broken is not None:
            return None
        self._pump.tell(PrefixVerified(dispatch.request, dispatch.attempt, tokens))
        return self._view.going_on(dispatch)

    def when_acting(self, dispatch: Dispatch, begin: Callable[[], None]) -> None:
        self._pump.afterwards(self._begin_if_acting, dispatch, begin)

    def _begin_if_acting(self, dispatch: Dispatch, begin: Callable[[], None]) -> None:
        if self._view.is_acting(dispatch.request, dispatch.attempt):
            begin()
