"""A front: holds requests and carries out the scheduler's orders for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout_sched.core.actions import Answer, Deliver, Discard, Dispatch, Interrupt
from rollout_sched.live.attempt_starter import AttemptStarter
from rollout_sched.live.attempt_table import AttemptTable
from rollout_sched.live.endings import Endings, OnDeliver, OnGroupFailed
from rollout_sched.live.payload_book import PayloadBook
from rollout_sched.live.running_attempts import RunningAttempts
from rollout_sched.live.scheduler_link import SchedulerLink
from rollout_sched.live.settings import Settings
from rollout_sched.live.tool_calls import ToolCalls


class Front:
    """The payloads of its requests, their running attempts, and their tools. Create it inside a
    running event loop.

    `orders`: the function that carries out an action, by its type. `run_id`: prefix of the name of
    every order to an instance.
    """

    def __init__(
        self,
        link: SchedulerLink,
        settings: Settings,
        run_id: str,
        on_deliver: OnDeliver | None = None,
        on_group_failed: OnGroupFailed | None = None,
    ) -> None:
        self.payloads = PayloadBook()
        self.endings = Endings(link, self.payloads, on_deliver, on_group_failed)
        self.tools = ToolCalls(link, self.payloads)
        running = RunningAttempts(link, self.payloads, self.tools)
        self.attempts = AttemptTable(running, settings)
        patience_s = settings.attempt_timeout_s
        starter = AttemptStarter(link, self.payloads, running, self.attempts, patience_s, run_id)
        self.orders: dict[type[Any], Callable[[Any], None]] = {
            Dispatch: starter.dispatch,
            Interrupt: self.attempts.interrupt,
            Deliver: self.endings.deliver,
            Answer: self.endings.answer,
            Discard: self._discard,
        }

    def _discard(self, action: Discard) -> None:
        self.tools.discard(action)
        self.endings.discard(action)

    def fail_all(self, error: Exception) -> None:
        """Fail all requests and groups."""
        self.tools.cancel_all()
        self.endings.fail_all(error)

    async def close(self) -> None:
        """Stop everything without reporting it."""
        self.tools.cancel_all()
        await self.attempts.close()
