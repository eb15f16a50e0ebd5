"""Counts are a fold over what the driver sees."""

from __future__ import annotations

from rollout_sched.core.model.actions import Answer, Deliver, Discard, Dispatch
from rollout_sched.core.model.events import (
    InstanceLost,
    InstanceReported,
    RequestFailed,
    RequestInterrupted,
    Woke,
)
from rollout_sched.integrations.gateway.control_plane.counts import Counters
from tests.metrics.told import sample, tell


def test_requests_and_tokens_by_outcome() -> None:
    counters = Counters()
    thrown = [Discard("r", 3, "stale"), Discard("r", 2, "surplus", ends=True)]
    tell(
        counters,
        [
            (0.0, Woke(), [Answer(sample("r", 5)), Answer(sample("r", 7))]),
            (0.0, Woke(), [Deliver(0, 0, (sample("g/0", 11),), last=False), Deliver(0, 0, ())]),
            (0.0, Woke(), list(thrown)),
        ],
    )
    assert counters.outcomes == {"answered": 2, "delivered": 1, "surplus": 1}
    assert counters.tokens == {"answered": 12, "delivered": 11, "stale": 3, "surplus": 2}
    assert counters.batches == 1, "its parts are not batches"


def test_attempts_and_whose_fault_it_is_that_some_fail() -> None:
    counters = Counters()
    sent = [Dispatch("r", 2, "a", 3, 9, 0), Dispatch("r", 3, "a", 7, 9, 0, response_tokens=4)]
    tell(
        counters,
        [
            (0.0, RequestInterrupted("r", 1, 4), list(sent)),
            (1.0, RequestFailed("r", 2, "400", "request"), []),
            (1.0, RequestFailed("r", 3, "gone", "instance"), []),
        ],
    )
    assert (counters.attempts, counters.resumed, counters.interrupted) == (2, 1, 1)
    assert counters.failed == {"request": 1, "instance": 1}


def test_who_is_let_go_is_not_lost() -> None:
    counters = Counters()
    gone = [InstanceLost("a", "it hangs"), InstanceLost("b", "drained", asked=True)]
    tell(counters, [(0.0, event, []) for event in gone])
    assert counters.gone == {"lost": 1, "removed": 1}


def test_what_an_instance_said_goes_with_it() -> None:
    counters = Counters()
    report = InstanceReported("a", 0, 0, 0.0, generated_tokens=9)
    tell(counters, [(0.0, report, [])])
    assert counters.reports == {"a": report}
    tell(counters, [(0.0, InstanceLost("a"), [])])
    assert counters.reports == {}
