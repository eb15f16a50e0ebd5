"""Paged KV blocks with a prefix cache, kept as runs of blocks instead of single ones.

What is reproduced (vLLM 0.32, v1/core/block_pool.py and kv_cache_manager.py):

* A block is *cached* once all its tokens are scheduled. It stays cached after its user releases it,
  until it is allocated again. Only whole blocks are ever found.
* The free list has two parts. Free blocks without content (*blank*) are allocated first; then
  cached ones, least recently freed first. A user's blocks are freed from the tail, so a chain is
  evicted from its end and the rest of it is always a prefix.
* Equal content may exist twice: if a prompt is a multiple of the block size, every sibling computes
  its last block, because at least one token must be computed. The oldest copy is found.

It does not matter which blank block is allocated, so blank blocks are only counted. Cached blocks
with the same history are in one `BlockRun`: neighbours in one chain, freed together. A request of
30,000 tokens is one run, and taking or evicting any number of its blocks is one operation.

A large fleet has a hundred thousand chains and tables, most with one run. Hence tuples of runs,
which need no memory when empty and little when short.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Final, NamedTuple

ChainKey = tuple[Hashable, ...]


class Chain:
    """One line of text: block i of it always has the same content.

    runs   its cached blocks; several runs may have the same block numbers
    users  live tables that refer to it
    owner  who writes it now, for chains that only one may write; else None
    """

    __slots__ = ("key", "owner", "runs", "users")

    def __init__(self, key: ChainKey) -> None:
        self.key = key
        self.runs: tuple[BlockRun, ...] = ()
        self.users = 0
        self.owner: int | None = None


class BlockRun:
    """Blocks lo <= i < hi of one chain, cached, used by the same `ref_count` tables.

    An unused run is a link of the free list. If a run in use must be split, the right part follows
    the left one (`rest`), so that users of the whole still reach it.
    """

    __slots__ = ("birth", "chain", "hi", "lo", "newer", "older", "ref_count", "rest")

    older: BlockRun
    newer: BlockRun

    def __init__(self, chain: Chain, lo: int, hi: int, birth: int, ref_count: int) -> None:
        self.chain = chain
        self.lo = lo
        self.hi = hi
        self.birth = birth
        self.ref_count = ref_count
        self.rest: BlockRun | None = None


class Table:
    """The blocks that one attempt uses: shared runs first, then its own growing run.

    Blocks below `shared_blocks` belong to the prompt's chain, the others to the attempt's own.
    The own run is not an object before it is freed: it starts at `own_lo`, and its end follows from
    the number of tokens.
    """

    __slots__ = ("own", "own_lo", "runs", "shared", "shared_blocks")

    def __init__(self, shared: Chain, own: Chain, shared_blocks: int) -> None:
        shared.users += 1
        own.users += 1
        self.shared = shared
        self.own = own
        self.shared_blocks = self.own_lo = shared_blocks
        self.runs: tuple[tuple[BlockRun, int], ...] = ()
        """(first run, end of the used part): later runs are reached by `rest`"""


class CacheHit(NamedTuple):
    """Cached blocks found for a context, from its start."""

    blocks: int
    idle: int
    """how many of them are free now, so that taking them removes them from the free list"""
    parts: list[tuple[BlockRun, int, int]]


NO_HIT: Final = CacheHit(0, 0, [])


class KvBlocks:
    """A pool of `blocks` KV blocks. `free` counts those that can be allocated."""

    __slots__ = ("_births", "_chains", "_ring", "blank", "blocks", "caching", "free")

    def __init__(self, blocks: int, caching: bool) -> None:
        self.blocks = blocks
        self.caching = caching
        self.free = blocks
        self.blank = blocks
        self._births = 0
        self._chains: dict[ChainKey, Chain] = {}
        # Free cached runs in a ring: ring.newer is the next to be evicted.
        self._ring = BlockRun(Chain(()), 0, 0, 0, 0)
        self._ring.older = self._ring.newer = self._ring

    # Chains

    def chain(self, key: ChainKey) -> Chain:
        """The chain of this name. It is kept while it has cached blocks or users."""
        chain = self._chains.get(key)
        if chain is None:
            chain = self._chains[key] = Chain(key)
        return chain

    def retire(self, table: Table) -> None:
        """Remove a table that uses nothing any more."""
        shared, own = table.shared, table.own
        shared.users -= 1
        if not shared.users and not shared.runs:
            del self._chains[shared.key]
        own.users -= 1
        if not own.users and not own.runs:
            del self._chains[own.key]

    # Finding and using

    def lookup(self, table: Table, limit: int) -> CacheHit:
        """The longest cached prefix of at most `limit` whole blocks. Changes nothing."""
        shared = table.shared_blocks
        found = 0
        parts: list[tuple[BlockRun, int, int]] = []
        if shared and table.shared.runs:
            found = _follow(table.shared, 0, min(shared, limit), parts)
        if found == shared and table.own.runs:
            found = _follow(table.own, shared, limit, parts)
        if not parts:
            return NO_HIT
        idle = 0
        for run, lo, hi in parts:
            if not run.ref_count:
                idle += hi - lo
        return CacheHit(found, idle, parts)

    def take(self, table: Table, hit: CacheHit) -> None:
        """Use the blocks of a hit that `lookup` has just returned."""
        runs: list[tuple[BlockRun, int]] = []
        # Backwards, because cutting a run keeps its left part under the old name.
        for run, lo, hi in reversed(hit.parts):
            taken = self._carve(run, lo, hi)
            if not taken.ref_count:
                _unlink(taken)
                self.free -= hi - lo
            taken.ref_count += 1
            runs.append((taken, hi))
        table.runs = tuple(reversed(runs))
        table.own_lo = max(hit.blocks, table.shared_blocks)

    def _carve(self, run: BlockRun, lo: int, hi: int) -> BlockRun:
        """Cut lo <= i < hi out of a run; the free list and the users do not change."""
        if hi < run.hi:
            self._split(run, hi)
        return self._split(run, lo) if lo > run.lo else run

    def _split(self, run: BlockRun, at: int) -> BlockRun:
        right = BlockRun(run.chain, at, run.hi, run.birth, run.ref_count)
        right.rest = run.rest
        run.hi = at
        run.rest = right
        run.chain.runs += (right,)
        if not run.ref_count:  # the tail is freed first
            _link(right, run)
        return right

    # Handing out and giving back

    def allocate(self, count: int) -> None:
        """Allocate `count` <= free blocks, evicting cached ones when no blank one is left."""
        self.free -= count
        self.blank -= count
        if self.blank < 0:
            self._evict(-self.blank)
            self.blank = 0

    def _evict(self, count: int) -> None:
        while count:
            run = self._ring.newer
            size = run.hi - run.lo
            if size > count:
                run.hi -= count
                return
            count -= size
            _unlink(run)
            chain = run.chain
            if len(chain.runs) > 1:
                chain.runs = tuple([other for other in chain.runs if other is not run])
                continue
            chain.runs = ()
            if not chain.users:
                del self._chains[chain.key]

    def seal(self, table: Table, start: int, end: int) -> None:
        """Blocks start <= i < end are scheduled to the last token: those of the prompt become
        findable.

        The attempt's own blocks need no entry before they are freed, because no other attempt looks
        for them while it lives.
        """
        if end > table.shared_blocks:
            end = table.shared_blocks
        if start < end and self.caching:
            table.runs += ((self._cache(table.shared, start, end, 1), end),)

    def _cache(self, chain: Chain, lo: int, hi: int, ref_count: int) -> BlockRun:
        self._births += 1
        run = BlockRun(chain, lo, hi, self._births, ref_count)
        chain.runs += (run,)
        return run

    def release(self, table: Table, full: int, used: int) -> None:
        """Release all `used` blocks of a table, of which the first `full` are cached."""
        if not self.caching:
            self.free += used
            self.blank += used
            return
        self.free += used - full
        self.blank += used - full
        if full > table.own_lo and not self._regrow(table, full):
            self.free += full - table.own_lo
            _link(self._cache(table.own, table.own_lo, full, 0), self._ring)
        for run, end in reversed(table.runs):
            if run.hi < end:
                self._let_go_of_parts(run, end)
                continue
            run.ref_count -= 1
            if not run.ref_count:
                self.free += run.hi - run.lo
                _link(run, self._ring)
        table.runs = ()
        table.own_lo = table.shared_blocks

    def _let_go_of_parts(self, run: BlockRun, end: int) -> None:
        parts = [run]
        while run.hi < end:
            assert run.rest is not None
            run = run.rest
            parts.append(run)
        for part in reversed(parts):
            part.ref_count -= 1
            if not part.ref_count:
                self.free += part.hi - part.lo
                _link(part, self._ring)

    def _regrow(self, table: Table, full: int) -> bool:
        """If the own run continues where the chain's only run ends, extend that one: freed
        together, tail first, the two are one run."""
        if len(table.own.runs) != 1 or not table.runs:
            return False
        run, hi = table.runs[-1]
        if run is not table.own.runs[0] or run.hi != hi or run.ref_count != 1:
            return False
        run.hi = full
        table.runs = (*table.runs[:-1], (run, full))
        return True

    def clear(self) -> bool:
        """Forget all cached content; possible only if nothing is in use."""
        if self.free != self.blocks:
            return False
        self.blank = self.blocks
        self.close()
        for chain in list(self._chains.values()):
            if not chain.users:
                del self._chains[chain.key]
        return True

    def close(self) -> None:
        """Release all runs; they refer to each other, so each must be unlinked."""
        ring = self._ring
        for chain in self._chains.values():
            for run in chain.runs:
                run.older = run.newer = ring
            chain.runs = ()
        ring.older = ring.newer = ring

    # For tests

    def eviction_order(self) -> Iterator[tuple[ChainKey, int]]:
        """(chain, block number) of the cached free blocks, next to be evicted first."""
        run = self._ring.newer
        while run is not self._ring:
            for number in reversed(range(run.lo, run.hi)):
                yield run.chain.key, number
            run = run.newer

    def check_invariants(self, tables: Iterable[tuple[Table, int, int]]) -> None:
        """Compare with all tables that use blocks, each with its (full, used) block counts.

        Raises AssertionError with the first violated invariant.
        """
        refs: dict[BlockRun, int] = {}
        private = 0
        for table, full, used in tables:
            private += used - full + max(0, full - table.own_lo) if self.caching else used
            for run, end in table.runs:
                refs[run] = refs.get(run, 0) + 1
                while run.hi < end:
                    assert run.rest is not None, "a run in use ends early"
                    run = run.rest
                    refs[run] = refs.get(run, 0) + 1
                assert run.hi == end, "a run in use was cut in the middle"
        assert all(run.ref_count == count for run, count in refs.items()), "wrong ref_count"
        used_blocks = private + sum(run.hi - run.lo for run in refs)
        assert self.free == self.blocks - used_blocks, f"free {self.free}, used {used_blocks}"
        cached = sum(1 for _ in self.eviction_order())
        assert self.free == self.blank + cached, f"free {self.free} = {self.blank} + {cached}?"
        for key, chain in self._chains.items():
            assert key == chain.key, "a chain is filed under another name"
            assert chain.users or chain.runs, "a dead chain is kept"
            assert all(run.lo < run.hi for run in chain.runs), "an empty run is kept"


def _follow(chain: Chain, at: int, limit: int, parts: list[tuple[BlockRun, int, int]]) -> int:
    """Add the cached blocks at <= i < limit of a chain up to the first gap; returns where it is."""
    runs = chain.runs
    while at < limit:
        oldest = None
        for run in runs:
            if run.lo <= at < run.hi and (oldest is None or run.birth < oldest.birth):
                oldest = run
        if oldest is None:
            break
        # No older copy begins further on: a user that releases a block has used all blocks before
        # it, so these stay longer in the free list.
        end = min(oldest.hi, limit)
        parts.append((oldest, at, end))
        at = end
    return at


def _link(run: BlockRun, place: BlockRun) -> None:
    """Insert into the free list, to be evicted just before `place`."""
    older = place.older
    run.newer = place
    run.older = older
    older.newer = run
    place.older = run


def _unlink(run: BlockRun) -> None:
    run.older.newer = run.newer
    run.newer.older = run.older
