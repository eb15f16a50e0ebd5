"""The attempts on a simulated instance, and its queue of waiting ones."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Final

from rollout_sched.simulators.instance.kv_blocks import Chain, Table
from rollout_sched.simulators.instance.sim_request import Reason, SimRequest

# Final, so that compiled code does not look them up.
ARRIVING: Final = 0
WAITING: Final = 1
PREFILLING: Final = 2
DECODING: Final = 3
OVER: Final = 4


class SimAttempt(Table):
    """State of one attempt on an instance, and the KV blocks it uses.

    `tokens` (context and new ones) is not updated while it decodes; it is then shift + step, with
    `step` the number of steps that the instance has made.
    """

    __slots__ = (
        "arrival",
        "computed",
        "context",
        "goal",
        "known",
        "number",
        "order",
        "priority",
        "reason",
        "shift",
        "span_start",
        "spans",
        "state",
        "tokens",
    )

    def __init__(
        self,
        request: SimRequest,
        goal: int,
        reason: Reason,
        arrival: int,
        shared: Chain,
        own: Chain,
        blocks: int,
    ) -> None:
        super().__init__(shared, own, blocks)
        self.number = request.attempt
        self.priority = request.priority
        self.known = request.known_tokens
        self.context = self.tokens = self.span_start = request.context_tokens
        self.goal = goal  # its final tokens, and the reason why it ends there
        self.reason = reason
        self.arrival = arrival
        self.state = ARRIVING
        self.computed = 0  # while it prefills
        self.shift = 0  # while it decodes
        self.order = -1  # place in the running list, -1 outside
        self.spans: tuple[tuple[int, int], ...] = ()

    def tokens_at(self, step: int) -> int:
        return self.shift + step if self.state == DECODING else self.tokens

    def close_span(self, tokens: int, version: int) -> None:
        """This version made all tokens up to `tokens` that have no version yet."""
        made = tokens - self.span_start
        if not made:
            return
        self.span_start = tokens
        spans = self.spans
        if spans and spans[-1][0] == version:
            self.spans = (*spans[:-1], (version, spans[-1][1] + made))
        else:
            self.spans = (*spans, (version, made))


class SimWaitingQueue:
    """First come first served with preempted attempts in front, or by (priority, arrival)."""

    __slots__ = ("_deque", "_heap", "_priority", "size")

    def __init__(self, priority: bool) -> None:
        self._priority = priority
        self._deque: deque[SimAttempt] = deque()
        self._heap: list[tuple[int, int, SimAttempt]] = []
        self.size = 0

    def push(self, attempt: SimAttempt, front: bool = False) -> None:
        attempt.state = WAITING
        self.size += 1
        if self._priority:
            heappush(self._heap, (attempt.priority, attempt.arrival, attempt))
        elif front:
            self._deque.appendleft(attempt)
        else:
            self._deque.append(attempt)

    def first(self) -> SimAttempt:
        """The next in line; the queue must not be empty."""
        if self._priority:
            heap = self._heap
            while heap[0][2].state != WAITING:
                heappop(heap)
            return heap[0][2]
        queue = self._deque
        while queue[0].state != WAITING:
            queue.popleft()
        return queue[0]

    def pop(self) -> None:
        """Remove what first() has returned."""
        self.size -= 1
        if self._priority:
            heappop(self._heap)
        else:
            self._deque.popleft()

    def discard(self, attempt: SimAttempt) -> None:
        """It has ended while waiting. It is skipped at the head of the queue, so this is free."""
        attempt.state = OVER
        self.size -= 1
