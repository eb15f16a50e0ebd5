"""Who is in a step, by hand-made examples, on the simulated instance and on its reference."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.simulators.instance.kv_blocks import KvBlocks
from rollout_sched.simulators.instance.model import SimRequest
from rollout_sched.simulators.instance.scheduler import DecodeBatch, SimAttempt, SimWaitingQueue
from tests.simulators.instance.by_hand import Make, follow, instance, request


def test_a_long_prefill_takes_the_budget_chunk_by_chunk(make: Make) -> None:
    one = make(max_num_batched_tokens=16)
    one.submit(request(1, context=1, new=6), 0.0)
    one.submit(request(2, context=40, new=1), 0.0)
    # 1 + 15, then 15 and 10 beside the token of the first.
    assert [(e.attempt, e.at) for e in follow(one)] == [(2, 3.0), (1, 6.0)]  # type: ignore[union-attr]


def test_siblings_share_the_prompt(make: Make) -> None:
    one = make(max_num_batched_tokens=100)
    for attempt in range(4):
        one.submit(request(attempt, context=42, new=8, shared_tokens=42), 0.0)
    follow(one, until=1.0)
    assert one.gauges().cached_tokens == 3 * 40
    # The shared part once, its half full end four times.
    assert one.gauges().kv_blocks_used == 10 + 4


def test_another_salt_finds_nothing(make: Make) -> None:
    one = make()
    one.submit(request(1, context=40, new=1, shared_tokens=40), 0.0)
    one.submit(request(2, context=40, new=1, shared_tokens=40, salt=1), 0.0)
    follow(one)
    assert one.gauges().cached_tokens == 0


def test_the_last_admitted_is_preempted_when_blocks_run_out(make: Make) -> None:
    one = make(kv_blocks=8, prefix_caching=False)
    one.submit(request(1, context=12, new=16), 0.0)
    one.submit(request(2, context=12, new=16), 0.0)
    # Both hold 3 blocks, get a 4th with their 2nd token and would need a 5th with the 6th.
    follow(one, until=6.5)
    assert (one.gauges().running, one.gauges().waiting, one.gauges().preemptions) == (1, 1, 1)
    said = follow(one)
    assert [(e.attempt, e.tokens, e.at) for e in said] == [(1, 16, 16.0), (2, 16, 27.0)]  # type: ignore[union-attr]
    assert one.gauges().reprefilled_tokens == 16


def test_a_preempted_one_is_first_in_line_again(make: Make) -> None:
    one = make(kv_blocks=8, prefix_caching=False, max_num_seqs=2)
    one.submit(request(1, context=12, new=16), 0.0)
    one.submit(request(2, context=12, new=16), 0.0)
    one.submit(request(3, context=4, new=1), 0.0)
    assert [e.attempt for e in follow(one)] == [1, 3, 2]  # type: ignore[union-attr]
    assert one.gauges().preemptions == 1


def test_the_watermark_holds_back_admission_while_others_run(make: Make) -> None:
    for watermark, waiting in ((0.0, 0), (0.2, 1)):
        one = make(kv_blocks=10, watermark=watermark)
        one.submit(request(1, context=18, new=3), 0.0)
        one.submit(request(2, context=14, new=3), 0.0)
        follow(one, until=1.5)
        assert one.gauges().waiting == waiting
        assert len(follow(one)) == 2


def test_at_least_one_token_is_computed(make: Make) -> None:
    """A prompt of whole blocks is not found whole, so its last block exists twice."""
    one = make()
    for attempt in (1, 2):
        one.submit(request(attempt, context=12, new=1, shared_tokens=12), 0.0)
    follow(one)
    assert one.gauges().cached_tokens == 8
    assert sorted(block for _, block in one.eviction_order()) == [0, 1, 2, 2]


def test_with_priorities_the_least_urgent_is_preempted(make: Make) -> None:
    one = make(kv_blocks=8, prefix_caching=False, scheduling="priority")
    one.submit(request(1, context=12, new=16, priority=5), 0.0)
    one.submit(request(2, context=12, new=16, priority=1), 0.0)
    assert [e.attempt for e in follow(one)] == [2, 1]  # type: ignore[union-attr]
    assert one.gauges().preemptions == 1


def test_a_blocked_first_request_is_not_overtaken(make: Make) -> None:
    one = make(kv_blocks=10, prefix_caching=False)
    one.submit(request(1, context=20, new=10), 0.0)
    one.submit(request(2, context=30, new=1), 1.5)
    one.submit(request(3, context=4, new=1), 1.5)
    follow(one, until=5.0)
    assert (one.gauges().running, one.gauges().waiting) == (1, 2)
    assert [e.attempt for e in follow(one)] == [1, 2, 3]  # type: ignore[union-attr]


SIZE = 4


def batch_of(contexts: list[int], step: int) -> tuple[DecodeBatch, list[SimAttempt]]:
    batch, attempts, blocks = DecodeBatch(SIZE), [], KvBlocks(1, True)
    for order, context in enumerate(contexts):
        request = SimRequest(order, context, 50, 50, "p", 0, order)
        chains = blocks.chain(("p", order)), blocks.chain(("o", order))
        attempt = SimAttempt(request, context + 3 + order, "stop", order, *chains, 0)
        attempt.order = order
        batch.join(attempt, step)
        attempts.append(attempt)
    return batch, attempts


def walked_demand(contexts: list[int], steps: int) -> int:
    """Blocks taken one step at a time: a step computes the last token made so far."""
    return sum((context + made - 1) % SIZE == 0 for made in range(steps) for context in contexts)


contexts = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(contexts, st.integers(0, 30), st.integers(0, 30))
def test_demand_is_what_single_steps_take(lengths: list[int], step: int, steps: int):
    batch, attempts = batch_of(lengths, step)
    assert batch.demand(step, steps) == walked_demand(lengths, steps)
    batch.check_invariants(attempts)


@given(contexts, st.integers(0, 30), st.integers(1, 30), st.integers(0, 40))
def test_as_many_steps_fit_as_there_are_blocks(lengths, step, steps, free):
    batch, _ = batch_of(lengths, step)
    fit = batch.steps_that_fit(step, steps, free)
    assert 0 <= fit <= steps
    assert walked_demand(lengths, fit) <= free
    if fit < steps:
        assert walked_demand(lengths, fit + 1) > free


def test_contexts_grow_by_one_a_step_and_ends_come_in_order():
    batch, attempts = batch_of([10, 20], step=5)
    assert batch.context(5) == 30
    assert batch.context(8) == 36
    assert batch.next_end() == 5 + 3
    first = batch.ending(8)
    assert first == attempts[:1]
    batch.leave(first[0], 8)
    assert first[0].tokens == 13
    assert batch.next_end() == 5 + 4


def test_books_that_do_not_add_up_are_found():
    batch, attempts = batch_of([10, 20], step=5)
    with pytest.raises(AssertionError, match="miscounted"):
        batch.check_invariants(attempts[:1])


def make(number: int, *, arrival: int = 0, priority: int = 0) -> SimAttempt:
    request = SimRequest(number, 10, 5, 5, "prompt", 4, number, priority=priority)
    blocks = KvBlocks(8, True)
    shared, own = blocks.chain(("p", number)), blocks.chain(("o", number))
    return SimAttempt(request, 15, "stop", arrival, shared, own, 0)


def drain(queue: SimWaitingQueue) -> list[int]:
    numbers = []
    while queue.size:
        numbers.append(queue.first().number)
        queue.pop()
    return numbers


def test_spans_follow_the_versions_that_made_the_tokens():
    attempt = make(1)
    attempt.close_span(12, version=3)
    attempt.close_span(12, version=4)
    attempt.close_span(13, version=3)
    attempt.close_span(15, version=5)
    assert attempt.spans == ((3, 3), (5, 2))


def test_first_come_first_served_with_the_preempted_in_front():
    queue = SimWaitingQueue(priority=False)
    queue.push(make(1, arrival=1))
    queue.push(make(2, arrival=2))
    queue.push(make(3, arrival=0), front=True)
    assert drain(queue) == [3, 1, 2]


def test_by_priority_then_arrival():
    queue = SimWaitingQueue(priority=True)
    queue.push(make(1, arrival=1, priority=5))
    queue.push(make(2, arrival=2, priority=0))
    queue.push(make(3, arrival=0, priority=5), front=True)
    assert drain(queue) == [2, 3, 1]


def test_an_aborted_request_is_skipped():
    queue = SimWaitingQueue(priority=False)
    gone = make(1)
    queue.push(gone)
    queue.push(make(2))
    queue.discard(gone)
    assert drain(queue) == [2]


def test_a_prompt_found_in_the_cache_is_counted_as_such() -> None:
    one = instance(kv_blocks=50)
    for number in (1, 2):
        one.submit(request(number, context=10, new=3, shared_tokens=10), 10.0 * number)
        follow(one)
    gauges = one.gauges()
    assert gauges.generated_tokens == 6
    assert gauges.prefill_tokens + gauges.cached_tokens == 20
    assert gauges.cached_tokens == 8  # whole blocks of 4, and one token is always computed
    assert gauges.reprefilled_tokens == gauges.preemptions == 0
