"""The simulated clients: they ask, wait, ask again after an answer, and leave."""

from __future__ import annotations

from collections.abc import Callable

from rollout_sched.core.actions import Answer, Discard
from rollout_sched.core.events import Event, RequestSubmitted, RequestWithdrawn, SessionEnded
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.sim_attempts import SimAttempts
from rollout_sched.simulators.replay.traffic import Conversation, Traffic


class SimClients:
    """All conversations of a run, each from its arrival to its last answer.

    left  conversations that are not over, including those that have not started
    """

    def __init__(
        self,
        traffic: Traffic | None,
        attempts: SimAttempts,
        queue: EventQueue,
        tell: Callable[[Event], None],
    ) -> None:
        self.left = 0 if traffic is None else len(traffic)
        self._traffic = traffic
        self._patience_s = 0.0 if traffic is None else traffic.patience_s
        self._max_tokens = 0 if traffic is None else traffic.max_tokens
        self._asking = attempts.asking
        self._queue = queue
        self._tell = tell
        self._requests = 0

    @property
    def standing(self) -> str:
        return f" and {self.left} conversations not finished" if self.left else ""

    def start(self) -> None:
        if self._traffic is not None:
            for conversation in self._traffic.conversations():
                self._queue.at(conversation.arrival_s, self._ask, conversation)

    def answer(self, action: Answer) -> None:
        conversation = self._asking.pop(action.sample.request)
        thinks_s = conversation.answered(action.sample.response_tokens)
        if thinks_s is None:
            self._go(conversation)
        else:
            self._queue.after(thinks_s, self._ask, conversation)

    def discard(self, action: Discard) -> None:
        """A request has ended without an answer: its client leaves."""
        conversation = self._asking.pop(action.request, None)
        if conversation is not None:
            self._go(conversation)

    def break_off(self) -> None:
        """Waiting clients get no answer; they ask again at once."""
        waiting = list(self._asking.values())
        self._asking.clear()
        for conversation in waiting:
            self._queue.after(0.0, self._ask, conversation)

    def _ask(self, conversation: Conversation) -> None:
        self._requests += 1
        request = f"direct.{self._requests}"
        self._asking[request] = conversation
        if self._patience_s:
            self._queue.after(self._patience_s, self._lose_patience, request)
        self._tell(
            RequestSubmitted(
                request,
                conversation.group,
                conversation.context_tokens,
                self._max_tokens,
                conversation.session,
            )
        )

    def _lose_patience(self, request: str) -> None:
        if request in self._asking:
            self._tell(RequestWithdrawn(request))

    def _go(self, conversation: Conversation) -> None:
        self.left -= 1
        if conversation.session and conversation.turn:  # else the scheduler may not know it
            self._tell(SessionEnded(conversation.session))
