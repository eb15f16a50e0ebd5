"""An interrupted request goes on with its text; one that begins anew gets another."""

from __future__ import annotations

import msgspec
import pytest

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import RequestFinished, RequestInterrupted
from rollout_sched.simulators.instance.model import Ended
from rollout_sched.simulators.replay.attempts import SimAttempts
from rollout_sched.simulators.replay.scenario import Job
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import SampleRecord, Trace, Turn
from tests.helpers import make_trace


def dispatch(attempt: int, made: int = 0, computed: int = 0) -> Dispatch:
    return Dispatch("g/0", attempt, "i", 10 + made, 100, 0, made, computed, group="g")


def test_a_text_is_named_by_the_attempt_that_began_it() -> None:
    attempts = SimAttempts(Workload(make_trace({"g": [9]}), Job()))
    first = attempts.begin(dispatch(1))
    assert (first.stream, first.new_tokens) == (1, 9)
    event, tool = attempts.end(Ended(1, 4, ((0, 4),), "abort", 1.0))
    assert event == RequestInterrupted("g/0", 1, 4, ((0, 4),))
    assert tool is None
    resumed = attempts.begin(dispatch(2, made=4, computed=13))
    assert (resumed.stream, resumed.new_tokens, resumed.known_tokens) == (1, 5, 13)
    attempts.end(Ended(2, 1, ((0, 1),), "abort", 2.0))
    anew = attempts.begin(dispatch(3))
    assert (anew.stream, anew.new_tokens) == (3, 9)
    event, _ = attempts.end(Ended(3, 9, ((0, 9),), "stop", 3.0))
    assert event == RequestFinished("g/0", 3, 9, ((0, 9),), "stop")


def test_resumed_attempts_repeat_and_restarted_ones_differ() -> None:
    load = Workload(make_trace({"g": list(range(10, 60))}), Job())
    attempts = SimAttempts(load)
    assert attempts.begin(dispatch(1)).new_tokens == 10
    attempts.end(Ended(1, 4, ((0, 4),), "abort", 1.0))
    assert attempts.begin(dispatch(2, made=4, computed=14)).new_tokens == 6
    attempts.end(Ended(2, 0, (), "abort", 2.0))
    lengths = []
    for attempt in range(3, 9):
        lengths.append(attempts.begin(dispatch(attempt)).new_tokens)
        attempts.end(Ended(attempt, 0, (), "abort", 3.0))
    assert len(set(lengths)) > 3
    assert load.length("g", 0) == lengths[-1]


@pytest.mark.parametrize(("limit", "reason"), [(9, "stop"), (50, "length")])
def test_a_sample_recorded_under_a_lower_cap_ends_with_its_segment(limit: int, reason: str) -> None:
    """Else the scheduler, told that the segment is used up, would ask for what is not there."""
    sample = SampleRecord("g", 0, 4, (Turn(9),), finish="length")
    attempts = SimAttempts(Workload(Trace("t", {"g": [sample]}), Job(max_tokens=100)))
    attempts.begin(msgspec.structs.replace(dispatch(1), max_new_tokens=limit))
    event, _ = attempts.end(Ended(1, 9, ((0, 9),), "stop", 1.0))
    assert event == RequestFinished("g/0", 1, 9, ((0, 9),), reason)
