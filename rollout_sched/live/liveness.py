"""Who will never answer: an instance that stands still, requests that it has forgotten.

All is judged from what polls and streams bring; times are seconds of one clock. Nothing is judged
from a single poll: gauges lag behind by a step of the engine, answers and questions are on the way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rollout_sched.live.ports import Gauges


class Movement:
    """Since when an instance has made no progress, though requests run there.

    vLLM counts the tokens of a prompt when its prefill is over, but its KV cache fills step by
    step, so that one counts too.
    """

    def __init__(self, now: float) -> None:
        self.since = now
        self._seen: tuple[float, ...] = ()

    def note(self, now: float, gauges: Gauges) -> bool:
        """Whether it has moved since the last poll. Where nothing runs, nothing stands still."""
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
    """How many requests too few an instance has been reporting for `while_s`.

    One that others use too reports more than we know of, and hides what it has forgotten of ours.
    """

    def __init__(self, while_s: float) -> None:
        self._while_s = while_s
        self._polls: deque[tuple[float, int]] = deque()

    def note(self, now: float, missing: int) -> int:
        """`missing` by this poll; returns the fewest of all polls of the last `while_s`, 0 as long
        as there are not so many."""
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
        """From (attempt, tokens so far) of all that are under way, those that have begun: when each
        was first seen to be where it is."""
        before, self._seen = self._seen, {}
        for attempt, tokens in streamed:
            if tokens:
                last = before.get(attempt, (0, now))
                self._seen[attempt] = last if last[0] == tokens else (tokens, now)
        return {attempt: since for attempt, (_, since) in self._seen.items()}
