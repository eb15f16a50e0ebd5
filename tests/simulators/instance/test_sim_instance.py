"""What an instance says and when, by hand-made examples. The law that jumping equals stepping is
in tests/laws, the comparison with real vLLM in tests/vllm."""

from __future__ import annotations

import math

import pytest

from rollout_sched.simulators.instance.model import CostModel, Ended
from tests.simulators.instance.by_hand import Make, follow, instance, request


def test_the_first_token_comes_with_the_prefill(make: Make) -> None:
    one = make()
    one.submit(request(7, context=10, new=5), 100.0)
    assert follow(one) == [Ended(7, 5, ((1, 5),), "stop", 105.0)]
    gauges = one.gauges()
    assert (gauges.steps, gauges.generated_tokens, gauges.prefill_tokens) == (5, 5, 10)
    assert gauges.kv_blocks_used == 0
    assert one.next_at() == math.inf


def test_limits_end_it_earlier(make: Make) -> None:
    one = make(max_model_len=32)
    one.submit(request(1, context=10, new=9, max_new_tokens=3), 0.0)
    one.submit(request(2, context=10, new=3, max_new_tokens=3), 0.0)
    one.submit(request(3, context=30, new=9), 0.0)
    ended = {e.attempt: (e.tokens, e.reason) for e in follow(one) if isinstance(e, Ended)}
    assert ended == {1: (3, "length"), 2: (3, "stop"), 3: (2, "length")}


def test_a_submit_within_a_step_waits_for_its_end(make: Make) -> None:
    one = make()
    one.submit(request(1, new=10), 0.0)
    assert follow(one, until=2.5) == []
    one.submit(request(2, new=1), 2.5)
    assert one.gauges().waiting == 0
    assert follow(one, until=3.0) == []
    assert (one.gauges().running, one.gauges().waiting) == (1, 1)
    assert [e.at for e in follow(one)] == [4.0, 10.0]


def test_a_submit_at_a_boundary_is_in_time_for_the_next_step(make: Make) -> None:
    one = make()
    one.submit(request(1, new=3), 0.0)
    assert [e.at for e in follow(one, until=3.0)] == [3.0]
    one.submit(request(2, new=1), 3.0)
    one.next_at()
    one.advance(3.0)
    one.submit(request(3, new=1), 3.0)
    assert [(e.attempt, e.at) for e in follow(one)] == [(2, 4.0), (3, 4.0)]  # type: ignore[union-attr]


def test_progress_and_gauges_between_events() -> None:
    one = instance()
    one.submit(request(1, context=10, new=100), 0.0)
    one.submit(request(2, context=10, new=100), 0.0)
    follow(one, until=20.5)
    assert one.progress(20.5) == {1: 20, 2: 20}
    assert (one.gauges().steps, one.gauges().generated_tokens) == (20, 40)
    assert one.gauges().kv_blocks_used == 2 * math.ceil((10 + 19) / 4)
    assert one.gauges().kv_usage == one.gauges().kv_blocks_used / 1000


def test_time_does_not_go_back() -> None:
    one = instance()
    one.submit(request(1), 5.0)
    with pytest.raises(ValueError, match="time went back"):
        one.advance(4.0)
    with pytest.raises(ValueError, match="time went back"):
        one.submit(request(2), 4.0)


def test_asking_when_a_step_ends_changes_nothing() -> None:
    """Asked within a step that leaves out a running attempt, which does everything one step later,
    the instance must not keep what it foretold from where that attempt was before."""
    cost = CostModel(step_s=1.0, weights_s=0.0, token_s=0.0, context_s=0.01)
    ends = []
    for asked in (False, True):
        one = instance(
            cost=cost, kv_blocks=8, prefix_caching=False, scheduling="priority", max_num_seqs=2
        )
        one.submit(request(1, context=12, new=16, priority=5), 0.0)
        one.submit(request(2, context=12, new=16, priority=1), 0.5)
        one.pause(2.0, "wait", clear_cache=False)  # so that nothing has to be decided but this
        while one.gauges().preemptions == 0:
            one.advance(math.nextafter(one.next_at(), math.inf))
        if asked:
            one.step_at(one.gauges().steps + 4)
        ends.append([(e.attempt, e.at) for e in follow(one) if isinstance(e, Ended)])
    assert ends[0] == ends[1]
