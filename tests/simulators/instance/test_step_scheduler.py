"""Who is in a step, by hand-made examples, on the simulated instance and on its reference."""

from __future__ import annotations

from tests.simulators.instance.by_hand import Make, follow, request


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


def test_nobody_overtakes_a_blocked_first(make: Make) -> None:
    one = make(kv_blocks=10, prefix_caching=False)
    one.submit(request(1, context=20, new=10), 0.0)
    one.submit(request(2, context=30, new=1), 1.5)
    one.submit(request(3, context=4, new=1), 1.5)
    follow(one, until=5.0)
    assert (one.gauges().running, one.gauges().waiting) == (1, 2)
    assert [e.attempt for e in follow(one)] == [1, 2, 3]  # type: ignore[union-attr]
