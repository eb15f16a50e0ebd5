"""Polls one instance, and judges its health from polls and failed attempts.

An instance is lost if it does not answer, if its counters restart, or if nothing moves for a minute
although requests run. Its streamed tokens are kept; the rest is made again elsewhere.

Forgotten requests are found by aborting them: vLLM cannot list its requests, but its gauges count
them. If poll after poll they count fewer than we wait for, the oldest are aborted one after the
other. One that still runs comes back with its tokens and goes on from them; a forgotten one gives
no answer and is made again elsewhere. A wrong suspicion costs a prefill, never a token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rollout_sched.live.instances.attempts import InFlight
from rollout_sched.live.ports import Gauges, InstanceClient, InstanceGone, error_line, with_timeout
from rollout_sched.live.settings import Settings

# ------------------------------------------------------------------------------------------
# Finds what will never answer: an instance without progress, or requests that it has lost.
#
# Judges only from polls and streams; times are seconds of one clock. No decision rests on a single
# poll: gauges lag by one engine step, and requests and answers are in flight.


class Verdict(NamedTuple):
    """Why the instance is lost ("" if it is not); which attempts to stop, with the reason."""

    lost: str
    stop: list[tuple[InFlight, str]]


class Liveness:
    """Judges one instance, poll by poll, from when it joined or was resumed after a pause."""

    def __init__(self, settings: Settings, now: float) -> None:
        self._stall_s = settings.stall_s
        self._forgotten_s = settings.forgotten_s
        self._prefill_rate = settings.prefill_rate
        self._movement = Movement(now)
        self._shortfall = Shortfall(settings.forgotten_s)
        self._streams = Streams()
        # Checking all streams costs time, so it is not done at every poll.
        self._streams_every_s = min(settings.stall_s / 8, settings.forgotten_s / 2)
        self._streams_seen = 0.0
        self._standing: dict[int, float] = {}  # begun streams: since when nothing new came

    def judge(self, now: float, gauges: Gauges, attempts: Sequence[InFlight]) -> Verdict:
        """`attempts`: those that ran before the poll was sent and still run."""
        moved = self._movement.note(now, gauges)
        if now - self._streams_seen >= self._streams_every_s:
            self._streams_seen = now
            self._standing = self._streams.note(
                now, [(e.dispatch.attempt, e.streamed) for e in attempts]
            )
        still_s = now - self._movement.since
        if still_s >= self._stall_s:
            if still_s >= max(map(self._with_its_prompt, attempts), default=0.0) + self._stall_s:
                text = f"no progress for {still_s:.0f} s although {gauges.running} requests run"
                return Verdict(text, [])
            return Verdict("", [])
        if not moved and (gauges.running or gauges.waiting):
            return Verdict("", [])  # the gauges may be old: each engine step renews them
        return Verdict(
            "", [*self._forgotten(now, gauges, attempts), *self._standing_still(now, attempts)]
        )

    def _with_its_prompt(self, running: InFlight) -> float:
        """Seconds that prefill may take for an attempt; 0 once its stream has brought tokens."""
        if running.dispatch.attempt in self._standing:
            return 0.0
        return running.dispatch.context_tokens / self._prefill_rate

    def _forgotten(
        self, now: float, gauges: Gauges, attempts: Sequence[InFlight]
    ) -> list[tuple[InFlight, str]]:
        """The instance has fewer requests than we wait for: some will never be answered.

        It does not say which, so the oldest are stopped one after the other. A request that still
        runs returns its tokens and continues from them; a lost one does not answer, and is made
        again elsewhere.
        """
        here = gauges.running + gauges.waiting
        missing = self._shortfall.note(now, len(attempts) - here)
        if missing:
            missing -= sum(running.stopped for running in attempts)
        if missing <= 0:
            return []
        forgotten_s = self._forgotten_s
        if not gauges.generated_tokens:
            # Its first step may compile kernels; the gauges change only after that step.
            forgotten_s = max(forgotten_s, self._stall_s)
        suspects = [
            running
            for running in attempts
            if not running.stopped
            and now - running.begun >= forgotten_s + self._with_its_prompt(running)
            and now - self._standing.get(running.dispatch.attempt, 0.0) >= forgotten_s
        ]
        suspects.sort(key=lambda running: running.begun)
        reason = f"never answered: the instance reports {here} of {len(attempts)} requests"
        return [(running, reason) for running in suspects[:missing]]

    def _standing_still(
        self, now: float, attempts: Sequence[InFlight]
    ) -> list[tuple[InFlight, str]]:
        """Streams that have begun and bring no more tokens, though the instance makes progress."""
        if self._streams_seen != now:
            return []
        since = (
            (e, self._standing.get(e.dispatch.attempt, now)) for e in attempts if not e.stopped
        )
        return [
            (running, f"its stream has brought no tokens for {now - at:.0f} s")
            for running, at in since
            if now - at >= self._stall_s
        ]


class Movement:
    """Since when an instance has made no progress, though requests run on it.

    vLLM counts the tokens of a prompt only when its prefill is done, but its KV cache fills step by
    step, so a change of KV usage counts as progress too.
    """

    def __init__(self, now: float) -> None:
        self.since = now
        self._seen: tuple[float, ...] = ()

    def note(self, now: float, gauges: Gauges) -> bool:
        """Whether there was progress since the last poll. An idle instance never counts as
        stalled."""
        seen = (
            gauges.generated_tokens,
            gauges.prefill_tokens,
            gauges.cached_tokens,
            gauges.preemptions,
            gauges.kv_usage,
        )
        moved = seen != self._seen
        if moved or not gauges.running:
            self._seen = seen
            self.since = now
        return moved


class Shortfall:
    """How many requests too few an instance has been reporting for `while_s` seconds.

    An instance that others use too reports their requests as well, which hides lost ones of ours.
    """

    def __init__(self, while_s: float) -> None:
        self._while_s = while_s
        self._polls: deque[tuple[float, int]] = deque()

    def note(self, now: float, missing: int) -> int:
        """`missing` by this poll; returns the minimum over the polls of the last `while_s` seconds;
        0 until there are polls for that long."""
        polls = self._polls
        if missing <= 0:
            polls.clear()
            return 0
        polls.append((now, missing))
        while len(polls) > 1 and polls[1][0] <= now - self._while_s:
            polls.popleft()
        if polls[0][0] > now - self._while_s:
            return 0
        return min(least for _, least in polls)


class Streams:
    """Since when each attempt's stream has brought nothing new."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}

    def note(self, now: float, streamed: Iterable[tuple[int, int]]) -> dict[int, float]:
        """`streamed`: (attempt, tokens so far) of all running attempts. Returns, for those with
        tokens, when each was first seen at its current count."""
        before, self._seen = self._seen, {}
        for attempt, tokens in streamed:
            if tokens:
                last = before.get(attempt, (0, now))
                self._seen[attempt] = last if last[0] == tokens else (tokens, now)
        return {attempt: since for attempt, (_, since) in self._seen.items()}


class DraftAcceptance:
    """Whether the model still accepts the tokens that an instance drafts: after new weights, a
    drafter of the old ones may cost time and gain nothing.

    recent  the accepted share of the last drafted tokens; None before there were enough
    """

    #: Enough to judge by: a few steps of a full batch.
    ENOUGH = 2_000

    def __init__(self, least: float) -> None:
        self.recent: float | None = None
        self._least = least
        self._from: Gauges | None = None
        self._rejected = False

    def note(self, gauges: Gauges) -> str:
        """A sentence when the accepted share falls below the least; "" until it does again."""
        before = self._from or gauges
        drafted = gauges.drafted_tokens - before.drafted_tokens
        if self._from is None or drafted < 0:
            self._from = gauges
        if drafted < self.ENOUGH:
            return ""
        self._from = gauges
        accepted = gauges.accepted_tokens - before.accepted_tokens
        self.recent = accepted / drafted
        known, self._rejected = self._rejected, accepted < self._least * drafted
        if known or not self._rejected:
            return ""
        return (
            f"accepts {accepted:,} of the last {drafted:,} drafted tokens: drafting costs more "
            f"than it gains, until the drafter is updated for these weights"
        )


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
    drafts    whether its drafted tokens are accepted
    verified  it has answered a poll since the last failed attempt or missed poll. Until then it may
              have been restarted with other weights, so nothing is sent to it
    """

    def __init__(self, client: InstanceClient, settings: Settings) -> None:
        self.gauges: Gauges | None = None
        self.drafts = DraftAcceptance(settings.min_acceptance)
        self.verified = asyncio.Event()
        self._client = client
        self._settings = settings
        self._at_once = asyncio.Event()
        self._misses = 0
        self._failures = 0
        self._started_at = 0.0
        self.forget_progress()

    def joined(self, started_at: float) -> None:
        """The instance has joined and reported when it was started (`started_at`)."""
        self._started_at = started_at
        self._misses = 0
        self.gauges = None
        self.forget_progress()
        self.verified.set()

    def forget_progress(self) -> None:
        """The instance starts, or is resumed after a pause: its earlier gauges prove nothing."""
        self._liveness = Liveness(self._settings, asyncio.get_running_loop().time())

    def check_now(self) -> None:
        """An attempt failed on the instance: poll now and send nothing until the answer."""
        self._failures += 1
        self.verified.clear()
        self._at_once.set()

    def poll_soon(self) -> None:
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
            gauges = await with_timeout(self._client.gauges(), self._settings.poll_timeout_s)
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
        """Judge the instance from a poll and the attempts that run on it (`Liveness`)."""
        return self._liveness.judge(asyncio.get_running_loop().time(), gauges, attempts)

    def _missed(self, error: Exception) -> str:
        """Why a missed poll makes the instance lost; "" if it does not yet."""
        self._misses += 1
        self.verified.clear()
        if isinstance(error, InstanceGone) or self._misses >= self._settings.misses:
            return error_line(error)
        if self._misses == 1:
            self._at_once.set()
        return ""

    def _was_restarted(self, gauges: Gauges, before: Gauges | None) -> bool:
        if self._started_at and gauges.started_at:
            return gauges.started_at != self._started_at
        return before is not None and gauges.generated_tokens < before.generated_tokens
