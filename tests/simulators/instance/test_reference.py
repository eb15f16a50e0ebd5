"""What the reference tells of a step. That it does what the jumping instance does is in
tests/laws, and that both do what vLLM does in tests/vllm."""

from __future__ import annotations

from tests.simulators.instance.by_hand import follow, instance, request
from tests.simulators.instance.reference import BlockPool, ReferenceInstance, StepRecord


def test_each_steps_decisions_are_recorded() -> None:
    one = instance(ReferenceInstance, kv_blocks=8)
    one.submit(request(1, context=12, new=16, shared_tokens=12), 0.0)
    one.submit(request(2, context=12, new=16, shared_tokens=12), 0.0)
    follow(one, until=0.5)
    assert one.step_end == 1.0
    # The second finds two of its three blocks; the last is computed again.
    assert one.last_step == StepRecord({1: 12, 2: 4}, [], {1: 0, 2: 8})
    follow(one, until=1.5)
    assert one.last_step == StepRecord({1: 1, 2: 1}, [], {})
    follow(one, until=9.5)
    assert one.last_step == StepRecord({1: 1}, [2], {})
    assert one.running == [1]


# ------------------------------------------------------------------------------------------
# vLLM's block pool: blank blocks first, then the least recently freed, the oldest copy found.


def test_freed_text_is_found_until_its_block_is_reused() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    for number, block in enumerate(blocks):
        pool.cache(block, ("text", number))
    pool.release(blocks)
    names = [("text", number) for number in range(3)]
    assert pool.lookup(names) == blocks
    assert list(pool.eviction_order()) == [("text", 1), ("text", 0)]
    pool.allocate(2)  # the blank one, then the tail of the text
    assert pool.lookup(names) == blocks[:1]


def test_the_oldest_copy_is_found() -> None:
    pool = BlockPool(2)
    older, newer = pool.allocate(1), pool.allocate(1)
    pool.cache(older[0], ("text", 0))
    pool.cache(newer[0], ("text", 0))
    assert pool.lookup([("text", 0)]) == older


def test_clear_waits_until_nothing_is_in_use() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.cache(blocks[0], ("text", 0))
    pool.clear()
    assert pool.lookup([("text", 0)]) == blocks
    pool.release(blocks)
    pool.clear()
    assert pool.lookup([("text", 0)]) == []
