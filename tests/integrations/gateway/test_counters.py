"""Counts are a fold over what the driver sees."""

from __future__ import annotations

from rollout_sched.core.actions import Answer, Deliver, Discard, Dispatch
from rollout_sched.core.events import InstanceLost, InstanceReported, RequestInterrupted, Woke
from rollout_sched.core.model import Sample, Segment
from rollout_sched.integrations.gateway.control_plane.counters import STALENESS_BOUNDS, Counters


def sample(tokens: int, staleness: int = 0) -> Sample:
    return Sample("r", "g", 0, 3, tokens, (Segment(0, tokens, "a"),), staleness, "stop")


def test_requests_and_tokens_by_outcome() -> None:
    counters = Counters()
    counters.observe(0.0, Woke(), [Answer(sample(5)), Answer(sample(7))])
    counters.observe(0.0, Woke(), [Deliver(0, 0, (sample(11),))])
    counters.observe(0.0, Woke(), [Discard("r", 3, "stale"), Discard("r", 2, "surplus", ends=True)])
    assert counters.outcomes == {"answered": 2, "delivered": 1, "surplus": 1}
    assert counters.tokens == {"answered": 12, "delivered": 11, "stale": 3, "surplus": 2}
    assert counters.batches == 1


def test_attempts() -> None:
    counters = Counters()
    counters.observe(
        0.0,
        RequestInterrupted("r", 1, 4),
        [Dispatch("r", 2, "a", 3, 9, 0), Dispatch("r", 3, "a", 7, 9, 0, response_tokens=4)],
    )
    assert (counters.attempts, counters.resumed) == (2, 1)
    assert counters.events[RequestInterrupted] == 1


def test_staleness_falls_into_the_bucket_that_holds_it() -> None:
    counters = Counters()
    samples = tuple(sample(1, staleness) for staleness in (0, 0, 1, 5, 999))
    counters.observe(0.0, Woke(), [Deliver(0, 0, samples)])
    by_bound = dict(zip((*STALENESS_BOUNDS, None), counters.staleness, strict=True))
    assert {bound: count for bound, count in by_bound.items() if count} == {
        0: 2,
        1: 1,
        6: 1,
        None: 1,
    }
    assert counters.staleness_sum == 1005


def test_tokens_of_an_instance_go_with_it() -> None:
    counters = Counters()
    counters.observe(0.0, InstanceReported("a", 0, 0, 0.0, generated_tokens=9), [])
    assert counters.generated == {"a": 9}
    counters.observe(0.0, InstanceLost("a"), [])
    assert counters.generated == {}
