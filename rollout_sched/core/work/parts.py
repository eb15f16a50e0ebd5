"""The parts of a scheduler that move requests and groups, each built once."""

from __future__ import annotations

from rollout_sched.core.state.state import State
from rollout_sched.core.work.attempts import AttemptLedger, Backoff
from rollout_sched.core.work.outcomes import FinishedSamples, GroupMoves, RequestMoves
from rollout_sched.core.work.requests import Requests


class Parts:
    """The state of a run and the parts that work on it. Each is given the parts that it calls, so
    they are built in that order."""

    def __init__(self, state: State, max_failures: int, backoff_s: float) -> None:
        self.state = state
        self.backoff = Backoff(backoff_s, state.orders)
        self.ledger = AttemptLedger(state)
        self.requests = Requests(state, self.ledger)
        self.finished = FinishedSamples(state)
        self.group_outcomes = GroupMoves(state, self.requests, self.finished)
        self.outcomes = RequestMoves(
            state, self.requests, self.finished, self.group_outcomes, max_failures
        )
