"""Find out when streamed attempts have a chunk to report.

Every decoding attempt gains one token per step, so the step that fills its next chunk is known in
advance: a heap by that step gives the next one. Attempts that do not decode yet are checked
whenever the instance has made a decision. No work is done per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush

from rollout_sched.simulators.instance.reference.instance import ReferenceInstance
from rollout_sched.simulators.instance.sim_instance import SimInstance

#: Called with the number of tokens that an attempt has made so far, and the step that made them.
OnProgress = Callable[[int, int], None]


class _Stream:
    __slots__ = ("attempt", "every", "on_progress", "target")

    def __init__(self, attempt: int, every: int, on_progress: OnProgress) -> None:
        self.attempt = attempt
        self.every = every
        self.on_progress = on_progress
        self.target = 1  # the first token comes alone, then `every` at a time, as in vLLM


class TokenStreams:
    """The streamed attempts of one instance."""

    def __init__(self, instance: SimInstance | ReferenceInstance) -> None:
        self._instance = instance
        self._heap: list[tuple[int, int]] = []
        self._streams: dict[int, _Stream] = {}
        self._stalled: dict[int, _Stream] = {}

    def add(self, attempt: int, every: int, on_progress: OnProgress) -> None:
        """Call `on_progress` whenever the attempt has made `every` more tokens."""
        self._streams[attempt] = self._stalled[attempt] = _Stream(attempt, every, on_progress)

    def remove(self, attempt: int) -> None:
        self._streams.pop(attempt, None)
        self._stalled.pop(attempt, None)

    def next_at(self) -> float:
        """When to call `advance` next, in simulated seconds; infinite if the instance must make a
        decision first."""
        if not self._streams:
            self._heap.clear()
            return math.inf
        for stream in list(self._stalled.values()):
            self._foresee(stream)
        return self._instance.step_at(self._heap[0][0]) if self._heap else math.inf

    def advance(self, now: float) -> None:
        """Report everything that is due by now; the instance must have advanced to `now` before."""
        while self._heap and self._instance.step_at(self._heap[0][0]) <= now:
            step, attempt = heappop(self._heap)
            stream = self._streams.get(attempt)
            if stream is None or attempt in self._stalled:
                continue
            if self._is_made(stream, step, now):
                tokens, stream.target = stream.target, stream.target + stream.every
                stream.on_progress(tokens, step)
            self._foresee(stream)

    def _is_made(self, stream: _Stream, step: int, now: float) -> bool:
        """Whether this step, which is over, made the token that the stream waits for."""
        due = self._instance.due_step(stream.attempt, stream.target)
        if due is not None:
            return due == step
        # It may have been preempted in that step; some pauses preempt all requests first.
        return self._instance.progress(now).get(stream.attempt, 0) >= stream.target

    def _foresee(self, stream: _Stream) -> None:
        step = self._instance.due_step(stream.attempt, stream.target)
        if step is None:
            self._stalled[stream.attempt] = stream
        else:
            self._stalled.pop(stream.attempt, None)
            heappush(self._heap, (step, stream.attempt))
