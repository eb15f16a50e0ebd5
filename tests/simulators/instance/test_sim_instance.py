"""What an instance says and when, by hand-made examples. The law that jumping equals stepping is
in tests/laws, the comparison with real vLLM in tests/vllm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from rollout_sched.simulators.instance.cost_model import CostModel
from rollout_sched.simulators.instance.sim_instance import (
    Ended,
    InstanceSpec,
    Paused,
    SimInstance,
    SimRequest,
)

# Every step takes exactly one second, whatever it does.
SECOND = CostModel(step_s=1.0, weights_s=0.0, token_s=0.0)


def instance(single_step: bool = False, **settings: Any) -> SimInstance:
    defaults = {"cost": SECOND, "kv_blocks": 1000, "block_size": 4, "max_num_seqs": 8}
    spec = InstanceSpec(**{**defaults, "max_num_batched_tokens": 64, **settings})
    return SimInstance(spec, version=1, single_step=single_step)


def request(attempt: int, context: int = 10, new: int = 5, **changes: Any) -> SimRequest:
    settings = {"max_new_tokens": 1000, "prompt_stream": "p", "shared_tokens": 0}
    return SimRequest(attempt, context, new, **{**settings, "stream": attempt, **changes})


def follow(one: SimInstance, until: float = math.inf) -> list[Ended | Paused]:
    """Do what a driver does: go from next_at to next_at."""
    said: list[Ended | Paused] = []
    while one.next_at() <= until and one.next_at() < math.inf:
        said += one.advance(one.next_at())
        one.check_invariants()
    if until < math.inf:
        said += one.advance(until)
    return said


@pytest.fixture(params=[False, True], ids=["jumping", "stepping"])
def make(request: pytest.FixtureRequest) -> Callable[..., SimInstance]:
    return lambda **settings: instance(single_step=request.param, **settings)


Make = Callable[..., SimInstance]


def test_the_first_token_comes_with_the_prefill(make: Make) -> None:
    one = make()
    one.submit(request(7, context=10, new=5), 100.0)
    assert follow(one) == [Ended(7, 5, ((1, 5),), "stop", 105.0)]
    assert (one.steps, one.generated_tokens, one.prefill_tokens) == (5, 5, 10)
    assert one.busy_s == 5.0
    assert one.kv_blocks_used == 0
    assert one.next_at() == math.inf


def test_limits_end_it_earlier(make: Make) -> None:
    one = make(max_model_len=32)
    one.submit(request(1, context=10, new=9, max_new_tokens=3), 0.0)
    one.submit(request(2, context=10, new=3, max_new_tokens=3), 0.0)
    one.submit(request(3, context=30, new=9), 0.0)
    ended = {e.attempt: (e.tokens, e.reason) for e in follow(one) if isinstance(e, Ended)}
    assert ended == {1: (3, "length"), 2: (3, "stop"), 3: (2, "length")}


def test_a_long_prefill_takes_the_budget_chunk_by_chunk(make: Make) -> None:
    one = make(max_num_batched_tokens=16)
    one.submit(request(1, context=1, new=6), 0.0)
    one.submit(request(2, context=40, new=1), 0.0)
    # 1 + 15, then 15 and 10 beside the token of the first.
    assert [(e.attempt, e.at) for e in follow(one)] == [(2, 3.0), (1, 6.0)]  # type: ignore[union-attr]


def test_a_submit_within_a_step_waits_for_its_end(make: Make) -> None:
    one = make()
    one.submit(request(1, new=10), 0.0)
    assert follow(one, until=2.5) == []
    one.submit(request(2, new=1), 2.5)
    assert one.waiting == 0
    assert follow(one, until=3.0) == []
    assert (one.running, one.waiting) == (1, 1)
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


def test_an_abort_returns_what_is_there_and_loses_the_step_under_way(make: Make) -> None:
    one = make()
    one.submit(request(1, new=50), 0.0)
    follow(one, until=3.5)
    one.abort(1, 3.5)
    assert follow(one) == [Ended(1, 3, ((1, 3),), "abort", 4.0)]
    assert one.generated_tokens == 3
    one.abort(1, 5.0)
    one.abort(99, 5.0)
    assert follow(one) == []


def test_an_abort_in_the_last_step_comes_first(make: Make) -> None:
    one = make()
    one.submit(request(1, new=3), 0.0)
    follow(one, until=2.5)
    one.abort(1, 2.5)
    assert follow(one) == [Ended(1, 2, ((1, 2),), "abort", 3.0)]


def test_aborted_text_is_found_again(make: Make) -> None:
    one = make()
    one.submit(request(1, context=10, new=50), 0.0)
    follow(one, until=30.0)
    one.abort(1, 30.0)
    one.submit(request(2, context=40, new=5, stream=1, known_tokens=39), 30.0)
    follow(one)
    # 39 tokens were computed, of which 9 whole blocks of 4 can be found.
    assert one.cached_tokens == 36
    assert one.prefill_tokens == 10 + 4
    assert one.reprefilled_tokens == 3


def test_siblings_share_the_prompt(make: Make) -> None:
    one = make(max_num_batched_tokens=100)
    for attempt in range(4):
        one.submit(request(attempt, context=42, new=8, shared_tokens=42), 0.0)
    follow(one, until=1.0)
    assert one.cached_tokens == 3 * 40
    assert one.kv_blocks_used == 10 + 4  # the shared part once, its half full end four times


def test_another_salt_finds_nothing(make: Make) -> None:
    one = make()
    one.submit(request(1, context=40, new=1, shared_tokens=40), 0.0)
    one.submit(request(2, context=40, new=1, shared_tokens=40, salt=1), 0.0)
    follow(one)
    assert one.cached_tokens == 0


def test_the_last_admitted_is_preempted_when_blocks_run_out(make: Make) -> None:
    one = make(kv_blocks=8, prefix_caching=False)
    one.submit(request(1, context=12, new=16), 0.0)
    one.submit(request(2, context=12, new=16), 0.0)
    # Both hold 3 blocks, get a 4th with their 2nd token and would need a 5th with the 6th.
    follow(one, until=6.5)
    assert (one.running, one.waiting, one.preemptions) == (1, 1, 1)
    said = follow(one)
    assert [(e.attempt, e.tokens, e.at) for e in said] == [(1, 16, 16.0), (2, 16, 27.0)]  # type: ignore[union-attr]
    assert one.reprefilled_tokens == 16


def test_a_preempted_one_is_first_in_line_again(make: Make) -> None:
    one = make(kv_blocks=8, prefix_caching=False, max_num_seqs=2)
    one.submit(request(1, context=12, new=16), 0.0)
    one.submit(request(2, context=12, new=16), 0.0)
    one.submit(request(3, context=4, new=1), 0.0)
    assert [e.attempt for e in follow(one)] == [1, 3, 2]  # type: ignore[union-attr]
    assert one.preemptions == 1


def test_the_watermark_holds_back_admission_while_others_run(make: Make) -> None:
    for watermark, waiting in ((0.0, 0), (0.2, 1)):
        one = make(kv_blocks=10, watermark=watermark)
        one.submit(request(1, context=18, new=3), 0.0)
        one.submit(request(2, context=14, new=3), 0.0)
        follow(one, until=1.5)
        assert one.waiting == waiting
        assert len(follow(one)) == 2


def test_at_least_one_token_is_computed(make: Make) -> None:
    """A prompt of whole blocks is not found whole, so its last block exists twice."""
    one = make()
    for attempt in (1, 2):
        one.submit(request(attempt, context=12, new=1, shared_tokens=12), 0.0)
    follow(one)
    assert one.cached_tokens == 8
    assert sorted(block for _, block in one.eviction_order()) == [0, 1, 2, 2]


def test_with_priorities_the_least_urgent_is_preempted(make: Make) -> None:
    one = make(kv_blocks=8, prefix_caching=False, scheduling="priority")
    one.submit(request(1, context=12, new=16, priority=5), 0.0)
    one.submit(request(2, context=12, new=16, priority=1), 0.0)
    assert [e.attempt for e in follow(one)] == [2, 1]  # type: ignore[union-attr]
    assert one.preemptions == 1


def test_nobody_overtakes_a_blocked_first(make: Make) -> None:
    one = make(kv_blocks=10, prefix_caching=False)
    one.submit(request(1, context=20, new=10), 0.0)
    one.submit(request(2, context=30, new=1), 1.5)
    one.submit(request(3, context=4, new=1), 1.5)
    follow(one, until=5.0)
    assert (one.running, one.waiting) == (1, 2)
    assert [e.attempt for e in follow(one)] == [1, 2, 3]  # type: ignore[union-attr]


def test_pausing_keeps_everything_in_place(make: Make) -> None:
    one = make()
    one.submit(request(1, new=10), 0.0)
    follow(one, until=3.5)
    one.pause(3.5, "keep", clear_cache=False)
    assert follow(one, until=20.0) == [Paused("keep", 4.0)]
    assert one.next_at() == math.inf
    assert one.busy_s == 4.0
    one.set_version(2, 20.0)
    one.resume(20.0)
    assert follow(one) == [Ended(1, 10, ((1, 4), (2, 6)), "stop", 26.0)]
    assert one.preemptions == 0


def test_keep_and_clear_computes_everything_again(make: Make) -> None:
    one = make()
    one.submit(request(1, context=10, new=10), 0.0)
    follow(one, until=4.0)
    one.pause(4.0, "keep", clear_cache=True)
    assert follow(one, until=5.0) == [Paused("keep", 4.0)]
    assert (one.running, one.waiting, one.kv_blocks_used, one.preemptions) == (0, 1, 0, 1)
    one.resume(5.0)
    assert [e.at for e in follow(one)] == [11.0]
    assert (one.prefill_tokens, one.reprefilled_tokens) == (10 + 14, 13)


def test_pause_abort_ends_all_in_order_of_arrival(make: Make) -> None:
    one = make(max_num_seqs=1)
    one.submit(request(1, new=10), 0.0)
    one.submit(request(2, new=10), 0.0)
    follow(one, until=2.5)
    one.pause(2.5, "abort", clear_cache=False)
    one.submit(request(3, new=1), 2.7)
    said = follow(one, until=9.0)
    assert said == [
        Ended(1, 3, ((1, 3),), "abort", 3.0),
        Ended(2, 0, (), "abort", 3.0),
        Paused("abort", 3.0),
    ]
    one.resume(9.0)
    assert [e.at for e in follow(one)] == [10.0]


def test_pause_wait_drains_those_running_only(make: Make) -> None:
    one = make(max_num_seqs=1)
    one.submit(request(1, new=5), 0.0)
    one.submit(request(2, new=5), 0.0)
    follow(one, until=1.5)
    one.pause(1.5, "wait", clear_cache=True)
    said = follow(one, until=9.0)
    assert said == [Ended(1, 5, ((1, 5),), "stop", 5.0), Paused("wait", 5.0)]
    assert one.waiting == 1
    one.resume(9.0)
    assert [e.at for e in follow(one)] == [14.0]


def test_an_idle_instance_pauses_at_once(make: Make) -> None:
    one = make()
    one.pause(3.0, "keep", clear_cache=True)
    assert one.next_at() == 3.0
    assert one.advance(3.0) == [Paused("keep", 3.0)]


def test_a_live_version_change_counts_from_the_next_step(make: Make) -> None:
    one = make()
    one.submit(request(1, new=6), 0.0)
    follow(one, until=2.5)
    one.set_version(2, 2.5)
    assert follow(one) == [Ended(1, 6, ((1, 3), (2, 3)), "stop", 6.0)]


def test_progress_and_gauges_between_events() -> None:
    one = instance()
    one.submit(request(1, context=10, new=100), 0.0)
    one.submit(request(2, context=10, new=100), 0.0)
    follow(one, until=20.5)
    assert one.progress(20.5) == {1: 20, 2: 20}
    assert (one.steps, one.generated_tokens) == (20, 40)
    assert one.kv_blocks_used == 2 * math.ceil((10 + 19) / 4)
    assert one.kv_usage == one.kv_blocks_used / 1000
    assert one.busy_s == 20.5


def test_time_does_not_go_back() -> None:
    one = instance()
    one.submit(request(1), 5.0)
    with pytest.raises(ValueError, match="time went back"):
        one.advance(4.0)
    with pytest.raises(ValueError, match="time went back"):
        one.submit(request(2), 4.0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (request(1, context=0), "context_tokens"),
        (request(1, new=0), "new_tokens"),
        (request(1, max_new_tokens=0), "max_new_tokens"),
        (request(1, shared_tokens=11), "shared_tokens"),
        (request(1, known_tokens=11), "known_tokens"),
        (request(1, context=128), "raise max_model_len"),
        (
            request(1, context=60, new=30),
            "23 blocks of 4, but the instance has 20; raise",
        ),
    ],
)
def test_work_that_can_never_run_is_refused(wrong: SimRequest, says: str) -> None:
    one = instance(kv_blocks=20, max_model_len=128)
    with pytest.raises(ValueError, match=says):
        one.submit(wrong, 0.0)
    assert one.next_at() == math.inf


def test_one_text_has_one_attempt_at_a_time() -> None:
    one = instance()
    one.submit(request(1), 0.0)
    with pytest.raises(ValueError, match="already on this instance"):
        one.submit(request(1), 0.0)
    with pytest.raises(ValueError, match="already has attempt 1"):
        one.submit(request(2, stream=1), 0.0)
    one.abort(1, 0.0)
    one.submit(request(2, stream=1), 0.0)
    assert [e.attempt for e in follow(one)] == [1, 2]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kv_blocks": 0}, "kv_blocks"),
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens"),
        ({"watermark": 1.0}, "watermark"),
    ],
)
def test_settings_that_vllm_refuses_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        instance(**wrong)
