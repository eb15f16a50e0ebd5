"""Carries out dispatches: starts an attempt and passes its result on."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import cast

from rollout_sched.core.actions import Dispatch
from rollout_sched.core.events import RequestFailed
from rollout_sched.live.answer_checks import Settle
from rollout_sched.live.attempt_table import AttemptTable
from rollout_sched.live.attempts import LiveAttempt
from rollout_sched.live.payload_book import PayloadBook
from rollout_sched.live.ports import (
    Attempting,
    InstanceError,
    Outcome,
    RequestRejected,
    Verifying,
)
from rollout_sched.live.running_attempts import RunningAttempts
from rollout_sched.live.scheduler_link import SchedulerLink

log = logging.getLogger(__name__)


class AttemptStarter:
    """`patience_s`: timeout of a whole attempt; 0: none. `run_id`: prefix of every order's name."""

    def __init__(
        self,
        link: SchedulerLink,
        payloads: PayloadBook,
        running: RunningAttempts,
        table: AttemptTable,
        patience_s: float,
        run_id: str,
    ) -> None:
        self._link = link
        self._payloads = payloads
        self._running = running
        self._table = table
        self._patience_s = patience_s
        self._run_id = run_id
        self._loop = asyncio.get_running_loop()

    def dispatch(self, action: Dispatch) -> None:
        try:
            payload = self._payloads.of(action)
        except Exception as error:  # the caller's own
            self._payloads.note_error(action, error)
            self._link.tell(RequestFailed(action.request, action.attempt, str(error), "request"))
            return
        client = self._link.client(action.instance)
        order_id = f"{self._run_id}-{action.attempt}"
        running = LiveAttempt(action, payload, client, order_id, self._loop.time())
        self._running.add(running)
        unverified = self._link.unverified(action.instance)
        if unverified is None:
            self._begin(running)
        else:
            self._table.spawn(self._begin_once_verified(running, unverified))

    async def _begin_once_verified(self, running: LiveAttempt, verified: asyncio.Event) -> None:
        await verified.wait()
        if running.dispatch.attempt in self._running:
            self._begin(running)

    def _begin(self, running: LiveAttempt) -> None:
        running.begun = self._loop.time()
        if self._patience_s:
            reason = f"no answer within {self._patience_s:g} s"
            give_up = self._table.give_up
            running.timer = self._loop.call_later(self._patience_s, give_up, running, reason)
        try:
            running.attempting = self._attempting(running)
        except (InstanceError, RequestRejected, OSError) as error:
            self._running.failed(running, error)
        except Exception as error:
            log.exception("attempt %d failed: order %s", running.dispatch.attempt, running.order_id)
            rejected = RequestRejected(f"the request cannot be sent: {error!r}", 500)
            self._running.failed(running, rejected)

    def _attempting(self, running: LiveAttempt) -> Attempting:
        payload, dispatch, over = running.payload, running.dispatch, partial(self._over, running)
        if not dispatch.draft:
            return payload.begin(running.client, dispatch, running.order_id, over)
        verifying = cast(Verifying, payload)
        passed = partial(self._passed, running)
        return verifying.begin_verified(running.client, dispatch, running.order_id, passed, over)

    async def _passed(self, running: LiveAttempt, tokens: int) -> Dispatch | None:
        """`tokens` of its draft passed: returns the dispatch to continue with, None to stop."""
        rest = await self._link.passed(running.dispatch, tokens, stopped=running.stopped)
        if rest is not None:
            running.dispatch = rest
        return rest

    def _over(self, running: LiveAttempt, result: Outcome | Exception) -> None:
        if isinstance(result, Exception):
            running.cancel()
            self._running.failed(running, result)
        else:
            running.release()
            self._ended(running, result)

    def _ended(self, running: LiveAttempt, outcome: Outcome) -> None:
        if running.dispatch.attempt not in self._running:
            return  # its instance may have been removed
        verdict = self._link.judge(running.dispatch, outcome, stopped=running.stopped)
        if verdict is None:
            self._running.ended(running, outcome)
        elif isinstance(verdict, InstanceError):
            self._running.failed(running, verdict)
        else:
            self._table.spawn(self._settle(running, outcome, verdict))

    async def _settle(self, running: LiveAttempt, outcome: Outcome, settle: Settle) -> None:
        """Ask the instance about its answer before the answer is used."""
        try:
            await settle()
        except InstanceError as error:
            self._running.failed(running, error)
        except Exception as error:
            self._link.fail(error)
        else:
            self._running.ended(running, outcome)
