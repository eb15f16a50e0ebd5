"""Checks each answer against what is known of its instance, before the answer is used."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from rollout_sched.core.actions import Dispatch
from rollout_sched.core.view import SchedulerView
from rollout_sched.live.contradictions import AnswerSource, Contradictions
from rollout_sched.live.ports import InstanceError, Outcome

#: Asks the instance about its answer; the answer is accepted unless this raises InstanceError.
Settle = Callable[[], Coroutine[Any, Any, None]]
#: None: accept the answer. An error: the attempt failed. Else the instance must be asked first.
Verdict = Settle | InstanceError | None


class AnswerChecks:
    """Checks every attempt that has ended by itself or was stopped."""

    def __init__(
        self,
        view: SchedulerView,
        supervisors: Mapping[str, AnswerSource],
        contradictions: Contradictions,
    ) -> None:
        self._view = view
        self._supervisors = supervisors
        self._contradictions = contradictions

    def judge(self, dispatch: Dispatch, outcome: Outcome, *, stopped: bool) -> Verdict:
        """`stopped`: the driver has aborted the attempt. If an attempt aborts unasked, its instance
        is checked soon."""
        attempt = dispatch.attempt
        if outcome.finish == "abort" and not (stopped or self._view.is_stopping(attempt)):
            self._supervisors[dispatch.instance].suspect()
            if not outcome.tokens:
                return InstanceError("aborted by the instance without a token")
        if self._contradictions.kind(attempt, outcome.spans):
            source = self._supervisors[dispatch.instance]
            return partial(self._contradictions.settle, attempt, outcome.spans, source)
        return None
