"""Polls one instance, and judges its health from polls and failed attempts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from rollout_sched.live.asking import ask, said
from rollout_sched.live.attempts import InFlight
from rollout_sched.live.liveness import Liveness, Verdict
from rollout_sched.live.ports import Gauges, InstanceClient, InstanceGone
from rollout_sched.live.settings import Settings


class Poll(NamedTuple):
    """The result of one poll.

    gauges     None if it was not answered
    lost       why this poll makes the instance lost; "" if it does not
    restarted  it was restarted since it joined: it has its start weights, and its requests are gone
    failures   number of failed attempts before the poll was sent
    """

    gauges: Gauges | None
    lost: str
    restarted: bool
    failures: int


class HealthChecks:
    """Checks one instance from when it joins or is resumed after a pause.

    gauges    of the last poll that was answered
    verified  it has answered a poll since the last failed attempt or missed poll. Until then it may
              have been restarted with other weights, so nothing is sent to it
    """

    def __init__(self, client: InstanceClient, settings: Settings) -> None:
        self.gauges: Gauges | None = None
        self.verified = asyncio.Event()
        self._client = client
        self._settings = settings
        self._at_once = asyncio.Event()
        self._misses = 0
        self._failures = 0
        self._started_at = 0.0
        self.forget_progress()

    def joined(self, started_at: float) -> None:
        """It has joined; `started_at` as it reported."""
        self._started_at = started_at
        self._misses = 0
        self.gauges = None
        self.forget_progress()
        self.verified.set()

    def forget_progress(self) -> None:
        """It starts, or is resumed after a pause: its earlier gauges prove nothing."""
        self._liveness = Liveness(self._settings, asyncio.get_running_loop().time())

    def check_now(self) -> None:
        """An attempt failed there: poll now and send nothing until the answer."""
        self._failures += 1
        self.verified.clear()
        self._at_once.set()

    def look_soon(self) -> None:
        """Poll now."""
        self._at_once.set()

    async def until_due(self) -> None:
        """Wait until the next check is due."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.poll_s):
                await self._at_once.wait()
        self._at_once.clear()

    async def poll(self) -> Poll:
        failures = self._failures
        try:
            gauges = await ask(self._client.gauges(), self._settings.poll_timeout_s)
        except Exception as error:
            return Poll(None, self._missed(error), False, failures)
        self._misses = 0
        before, self.gauges = self.gauges, gauges
        return Poll(gauges, "", self._was_restarted(gauges, before), failures)

    def verify(self, poll: Poll) -> None:
        """Mark it as verified, unless an attempt failed while it was polled."""
        if poll.failures == self._failures:
            self.verified.set()

    def judge(self, gauges: Gauges, attempts: Sequence[InFlight]) -> Verdict:
        """See `Liveness.judge`."""
        return self._liveness.judge(asyncio.get_running_loop().time(), gauges, attempts)

    def _missed(self, error: Exception) -> str:
        """Why a missed poll makes the instance lost; "" if it does not yet."""
        self._misses += 1
        self.verified.clear()
        if isinstance(error, InstanceGone) or self._misses >= self._settings.misses:
            return said(error)
        if self._misses == 1:
            self._at_once.set()
        return ""

    def _was_restarted(self, gauges: Gauges, before: Gauges | None) -> bool:
        if self._started_at and gauges.started_at:
            return gauges.started_at != self._started_at
        return before is not None and gauges.generated_tokens < before.generated_tokens
