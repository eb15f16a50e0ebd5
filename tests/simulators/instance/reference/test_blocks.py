"""vLLM's block pool: blank blocks first, then the least recently freed, the oldest copy found."""

from __future__ import annotations

from rollout_sched.simulators.instance.reference.blocks import BlockPool


def test_what_was_freed_is_found_until_its_block_is_handed_out() -> None:
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
