"""Runs of blocks against single blocks: the same hits, counts and evictions, in any history."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sched.simulators.instance.kv_blocks import KvBlocks, Table

SIZE = 4
Label = tuple[Any, int]


@dataclass(eq=False)
class Block:
    label: Label | None = None
    holders: int = 0


@dataclass
class SingleBlocks:
    """vLLM's block pool, block by block: free list, cache of copies in order of insertion."""

    blocks: int
    free: list[Block] = field(default_factory=list)
    cache: dict[Label, list[Block]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = [Block() for _ in range(self.blocks)]

    def lookup(self, labels: list[Label]) -> list[Block]:
        found = []
        for label in labels:
            if label not in self.cache:
                break
            found.append(self.cache[label][0])
        return found

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            if not block.holders:
                self.free.remove(block)
            block.holders += 1

    def allocate(self, count: int) -> list[Block]:
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            block.holders = 1
            if block.label is not None:
                self.cache[block.label].remove(block)
                if not self.cache[block.label]:
                    del self.cache[block.label]
                block.label = None
        return taken

    def seal(self, block: Block, label: Label) -> None:
        if block.label is None:
            block.label = label
            self.cache.setdefault(label, []).append(block)

    def release(self, blocks: list[Block]) -> None:
        first, last = [], []
        for block in reversed(blocks):
            block.holders -= 1
            if not block.holders:
                (first if block.label is None else last).append(block)
        self.free = first + self.free + last

    def clear(self) -> None:
        self.cache.clear()
        for block in self.free:
            block.label = None

    def eviction_order(self) -> list[Label]:
        return [block.label for block in self.free if block.label is not None]


@dataclass
class Holder:
    """One attempt in both worlds."""

    table: Table
    stream: int
    computed: int
    blocks: list[Block]

    def label(self, number: int) -> Label:
        chain = self.table.shared if number < self.table.shared_blocks else self.table.own
        return chain.key, number


class Both:
    def __init__(self, blocks: int) -> None:
        self.runs = KvBlocks(blocks, caching=True)
        self.single = SingleBlocks(blocks)
        self.holders: list[Holder] = []

    def admit(self, prompt: int, shared: int, stream: int, context: int) -> None:
        if any(holder.stream == stream for holder in self.holders):
            return
        shared = min(shared, context // SIZE)
        runs = self.runs
        own = runs.chain((0, prompt, shared, stream))
        holder = Holder(Table(runs.chain((0, prompt)), own, shared), stream, 0, [])
        hit = runs.lookup(holder.table, (context - 1) // SIZE)
        found = self.single.lookup([holder.label(i) for i in range((context - 1) // SIZE)])
        assert hit.blocks == len(found)
        assert hit.idle == sum(not block.holders for block in found)
        if -(-context // SIZE) - hit.blocks + hit.idle > runs.free:
            runs.retire(holder.table)
            return
        if hit.blocks:
            runs.take(holder.table, hit)
        self.single.touch(found)
        holder.blocks = found
        holder.computed = hit.blocks * SIZE
        self.holders.append(holder)
        self.grow(holder, context - holder.computed)

    def grow(self, holder: Holder, tokens: int) -> None:
        start, end = holder.computed, holder.computed + tokens
        blocks = -(-end // SIZE) - -(-start // SIZE)
        if blocks > self.runs.free:
            return
        self.runs.allocate(blocks)
        self.runs.seal(holder.table, start // SIZE, end // SIZE)
        holder.blocks = holder.blocks + self.single.allocate(blocks)
        for number in range(start // SIZE, end // SIZE):
            self.single.seal(holder.blocks[number], holder.label(number))
        holder.computed = end

    def release(self, which: int) -> None:
        holder = self.holders.pop(which)
        self.runs.release(holder.table, holder.computed // SIZE, -(-holder.computed // SIZE))
        self.runs.retire(holder.table)
        self.single.release(holder.blocks)

    def clear(self) -> None:
        assert self.runs.clear() == (not self.holders)
        if not self.holders:
            self.single.clear()

    def compare(self) -> None:
        assert self.runs.free == len(self.single.free)
        assert list(self.runs.eviction_order()) == self.single.eviction_order()
        self.runs.check_invariants(
            (h.table, h.computed // SIZE, -(-h.computed // SIZE)) for h in self.holders
        )


operations = st.lists(
    st.one_of(
        st.tuples(
            st.just("admit"),
            st.integers(0, 1),
            st.sampled_from([0, 1, 2, 2, 2, 3, 4]),
            st.integers(0, 4),
            st.sampled_from([1, 7, 8, 8, 9, 12, 16, 21, 24]),
        ),
        st.tuples(st.just("grow"), st.integers(0, 9), st.integers(1, 20)),
        st.tuples(st.just("release"), st.integers(0, 9)),
        st.just(("clear",)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=300)
@given(st.integers(4, 40), operations)
def test_runs_are_blocks(blocks: int, script: list[Any]) -> None:
    both = Both(blocks)
    for name, *arguments in script:
        if name == "admit":
            both.admit(*arguments)
        elif name == "clear":
            both.clear()
        elif both.holders:
            which = arguments[0] % len(both.holders)
            if name == "grow":
                both.grow(both.holders[which], arguments[1])
            else:
                both.release(which)
        both.compare()


def test_a_hit_in_the_middle_of_a_newer_copy() -> None:
    """It leaves both ends of that copy where they were in the free list, the tail in front."""
    both = Both(20)
    both.admit(prompt=0, shared=0, stream=1, context=3 * SIZE)
    both.release(0)
    both.admit(prompt=0, shared=0, stream=1, context=3 * SIZE)  # block 2 is computed again
    both.grow(both.holders[0], 3 * SIZE)
    both.release(0)
    both.compare()
    both.admit(prompt=0, shared=0, stream=1, context=5 * SIZE)
    both.compare()
    assert [number for _, number in both.runs.eviction_order()] == [5, 4, 2]


def table(pool: KvBlocks, stream: int, shared: int) -> Table:
    return Table(pool.chain((0, "prompt")), pool.chain((0, "prompt", shared, stream)), shared)


def test_a_sibling_finds_the_prompt_and_keeps_it_when_the_first_leaves() -> None:
    pool = KvBlocks(10, caching=True)
    first, second = table(pool, 1, 3), table(pool, 2, 3)
    pool.allocate(4)
    pool.seal(first, 0, 4)
    hit = pool.lookup(second, 5)
    assert (hit.blocks, hit.idle) == (3, 0)
    pool.take(second, hit)
    pool.release(first, full=4, held=4)
    assert pool.free == 7
    assert list(pool.eviction_order()) == [((0, "prompt", 3, 1), 3)]
    pool.release(second, full=3, held=3)
    assert [number for _, number in pool.eviction_order()] == [3, 2, 1, 0]


def test_a_long_request_is_one_run_however_much_of_it_is_evicted() -> None:
    pool = KvBlocks(2000, caching=True)
    long, other = table(pool, 1, 0), table(pool, 2, 0)
    pool.allocate(1500)
    pool.release(long, full=1500, held=1500)
    pool.allocate(1200)  # 500 blank ones, then the long one's tail
    assert len(long.own.runs) == 1
    assert pool.lookup(long, 9999).blocks == 800
    pool.release(other, full=0, held=1200)
    assert pool.free == 2000


def test_an_attempt_that_goes_on_stays_one_run() -> None:
    pool = KvBlocks(100, caching=True)
    one = table(pool, 1, 0)
    for full in (10, 20, 30):
        hit = pool.lookup(one, 99)
        pool.take(one, hit)
        pool.allocate(full - hit.blocks)
        pool.release(one, full=full, held=full)
    assert len(one.own.runs) == 1
    assert pool.lookup(one, 99).blocks == 30


def test_nothing_is_found_without_prefix_cache() -> None:
    pool = KvBlocks(10, caching=False)
    one = table(pool, 1, 2)
    pool.allocate(5)
    pool.seal(one, 0, 5)
    pool.release(one, full=4, held=5)
    assert pool.free == pool.blank == 10
    assert pool.lookup(one, 5).blocks == 0


def test_clear_waits_until_nothing_is_held() -> None:
    pool = KvBlocks(10, caching=True)
    one = table(pool, 1, 0)
    pool.allocate(3)
    assert not pool.clear()
    pool.release(one, full=3, held=3)
    assert pool.clear()
    assert list(pool.eviction_order()) == []
    assert pool.lookup(one, 3).blocks == 0


def test_chains_without_blocks_and_users_are_forgotten() -> None:
    pool = KvBlocks(4, caching=True)
    for stream in range(100):
        one = table(pool, stream, 0)
        pool.allocate(2)
        pool.release(one, full=2, held=2)
        pool.retire(one)
    assert len(pool._chains) <= 3
    with pytest.raises(KeyError):
        pool._chains[(0, "prompt", 0, 0)]
