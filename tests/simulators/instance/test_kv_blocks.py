"""Runs of blocks against single blocks: the same hits, counts and evictions, in any history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_sched.simulators.instance.kv_blocks import KvBlocks, Table
from tests.simulators.instance.reference import Block, BlockName, BlockPool

SIZE = 4


@dataclass
class User:
    """One attempt in both worlds."""

    table: Table
    stream: int
    computed: int
    blocks: list[Block]

    def name(self, number: int) -> BlockName:
        chain = self.table.shared if number < self.table.shared_blocks else self.table.own
        return chain.key, number


class Both:
    def __init__(self, blocks: int) -> None:
        self.runs = KvBlocks(blocks, caching=True)
        self.pool = BlockPool(blocks)
        self.users: list[User] = []

    def admit(self, prompt: int, shared: int, stream: int, context: int) -> None:
        if any(user.stream == stream for user in self.users):
            return
        shared = min(shared, context // SIZE)
        runs = self.runs
        own = runs.chain((0, prompt, shared, stream))
        user = User(Table(runs.chain((0, prompt)), own, shared), stream, 0, [])
        hit = runs.lookup(user.table, (context - 1) // SIZE)
        found = self.pool.lookup(user.name(i) for i in range((context - 1) // SIZE))
        assert hit.blocks == len(found)
        assert hit.idle == sum(not block.users for block in found)
        if -(-context // SIZE) - hit.blocks + hit.idle > runs.free:
            runs.retire(user.table)
            return
        if hit.blocks:
            runs.take(user.table, hit)
        self.pool.take(found)
        user.blocks = found
        user.computed = hit.blocks * SIZE
        self.users.append(user)
        self.grow(user, context - user.computed)

    def grow(self, user: User, tokens: int) -> None:
        start, end = user.computed, user.computed + tokens
        blocks = -(-end // SIZE) - -(-start // SIZE)
        if blocks > self.runs.free:
            return
        self.runs.allocate(blocks)
        self.runs.seal(user.table, start // SIZE, end // SIZE)
        user.blocks = user.blocks + self.pool.allocate(blocks)
        for number in range(start // SIZE, end // SIZE):
            self.pool.cache(user.blocks[number], user.name(number))
        user.computed = end

    def release(self, which: int) -> None:
        user = self.users.pop(which)
        self.runs.release(user.table, user.computed // SIZE, -(-user.computed // SIZE))
        self.runs.retire(user.table)
        self.pool.release(user.blocks)

    def clear(self) -> None:
        assert self.runs.clear() == (not self.users)
        if not self.users:
            self.pool.clear()

    def compare(self) -> None:
        assert self.runs.free == len(self.pool.free)
        assert list(self.runs.eviction_order()) == list(self.pool.eviction_order())
        self.runs.check_invariants(
            (h.table, h.computed // SIZE, -(-h.computed // SIZE)) for h in self.users
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
        elif both.users:
            which = arguments[0] % len(both.users)
            if name == "grow":
                both.grow(both.users[which], arguments[1])
            else:
                both.release(which)
        both.compare()


def test_a_hit_in_the_middle_of_a_newer_copy() -> None:
    """It leaves both ends of that copy where they were in the free list, the tail in front."""
    both = Both(20)
    both.admit(prompt=0, shared=0, stream=1, context=3 * SIZE)
    both.release(0)
    both.admit(prompt=0, shared=0, stream=1, context=3 * SIZE)  # block 2 is computed again
    both.grow(both.users[0], 3 * SIZE)
    both.release(0)
    both.compare()
    both.admit(prompt=0, shared=0, stream=1, context=5 * SIZE)
    both.compare()
    assert [number for _, number in both.runs.eviction_order()] == [5, 4, 2]


def table(pool: KvBlocks, stream: int, shared: int) -> Table:
    return Table(pool.chain((0, "prompt")), pool.chain((0, "prompt", shared, stream)), shared)


def test_a_long_request_is_one_run_however_much_of_it_is_evicted() -> None:
    pool = KvBlocks(2000, caching=True)
    long, other = table(pool, 1, 0), table(pool, 2, 0)
    pool.allocate(1500)
    pool.release(long, full=1500, used=1500)
    pool.allocate(1200)  # 500 blank ones, then the long one's tail
    assert len(long.own.runs) == 1
    assert pool.lookup(long, 9999).blocks == 800
    pool.release(other, full=0, used=1200)
    assert pool.free == 2000


def test_an_attempt_that_goes_on_stays_one_run() -> None:
    pool = KvBlocks(100, caching=True)
    one = table(pool, 1, 0)
    for full in (10, 20, 30):
        hit = pool.lookup(one, 99)
        pool.take(one, hit)
        pool.allocate(full - hit.blocks)
        pool.release(one, full=full, used=full)
    assert len(one.own.runs) == 1
    assert pool.lookup(one, 99).blocks == 30


def test_nothing_is_found_without_prefix_cache() -> None:
    pool = KvBlocks(10, caching=False)
    one = table(pool, 1, 2)
    pool.allocate(5)
    pool.seal(one, 0, 5)
    pool.release(one, full=4, used=5)
    assert pool.free == pool.blank == 10
    assert pool.lookup(one, 5).blocks == 0


def test_chains_without_blocks_and_users_are_forgotten() -> None:
    pool = KvBlocks(4, caching=True)
    for stream in range(100):
        one = table(pool, stream, 0)
        pool.allocate(2)
        pool.release(one, full=2, used=2)
        pool.retire(one)
    assert len(pool._chains) <= 3
    with pytest.raises(KeyError):
        pool._chains[(0, "prompt", 0, 0)]
