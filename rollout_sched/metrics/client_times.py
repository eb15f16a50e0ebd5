"""How long clients wait for their responses: a fold whose memory does not grow with time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_sched.core.actions import Answer, Discard, Dispatch
from rollout_sched.core.events import RequestSubmitted, Restored
from rollout_sched.metrics.fold import Handler
from rollout_sched.metrics.histogram import SECONDS, TOKENS, Histogram


class ClientTimes:
    """Times of direct requests.

    wait      seconds from submission to the first dispatch
    duration  seconds from submission to the answer
    tokens    of the answered responses
    """

    __slots__ = ("_sent", "_waiting", "duration", "tokens", "wait")

    def __init__(self) -> None:
        self.wait = Histogram(SECONDS)
        self.duration = Histogram(SECONDS)
        self.tokens = Histogram(TOKENS)
        self._waiting: dict[str, float] = {}  # time of submission, until the first dispatch
        self._sent: dict[str, float] = {}  # the same, until the answer

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            RequestSubmitted: self._asked,
            Dispatch: self._dispatched,
            Answer: self._answered,
            Discard: self._discarded,
            Restored: self._restored,
        }

    def _asked(self, now: float, event: RequestSubmitted) -> None:
        self._waiting[event.request] = now

    def _dispatched(self, now: float, action: Dispatch) -> None:
        since = self._waiting.pop(action.request, None)
        if since is not None:
            self._sent[action.request] = since
            self.wait.add(now - since)

    def _answered(self, now: float, action: Answer) -> None:
        since = self._sent.pop(action.sample.request, None)
        if since is not None:
            self.duration.add(now - since)
        self.tokens.add(action.sample.response_tokens)

    def _discarded(self, now: float, action: Discard) -> None:
        if action.ends:
            self._waiting.pop(action.request, None)
            self._sent.pop(action.request, None)

    def _restored(self, now: float, event: Restored) -> None:
        """The connections of earlier requests ended with the earlier scheduler."""
        self._waiting.clear()
        self._sent.clear()
