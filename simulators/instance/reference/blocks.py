"""vLLM's KV block pool, block by block: the oracle for the runs of `kv_blocks`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import takewhile

BlockName = tuple[Hashable, int]
"""(chain, number): the same name, the same content"""


class Block:
    """One block: its name when it is cached, and how many attempts use it."""

    __slots__ = ("name", "users")

    def __init__(self) -> None:
        self.name: BlockName | None = None
        self.users = 0


class BlockPool:
    """A pool of `count` blocks. Of copies with the same name the oldest is found.

    free  in the order of allocation: blocks without content, then the least recently freed
    """

    def __init__(self, count: int, caching: bool = True) -> None:
        self.count = count
        self.caching = caching
        self.free = [Block() for _ in range(count)]
        self._cached: dict[BlockName, list[Block]] = {}

    def lookup(self, names: Iterable[BlockName]) -> list[Block]:
        """The blocks of the longest cached prefix."""
        return [self._cached[name][0] for name in takewhile(self._cached.__contains__, names)]

    def take(self, blocks: Iterable[Block]) -> None:
        """Use blocks that were found."""
        for block in blocks:
            if not block.users:
                self.free.remove(block)
            block.users += 1

    def allocate(self, count: int) -> list[Block]:
        """Allocate `count` <= len(free) blocks; their cached content is forgotten."""
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            block.users = 1
            if block.name is not None:
                copies = self._cached[block.name]
                copies.remove(block)
                if not copies:
                    del self._cached[block.name]
                block.name = None
        return taken

    def cache(self, block: Block, name: BlockName) -> None:
        """All tokens of the block are scheduled: it can be found from now on."""
        if self.caching and block.name is None:
            block.name = name
            self._cached.setdefault(name, []).append(block)

    def release(self, blocks: Sequence[Block]) -> None:
        """Stop using all blocks of an attempt, its last block first."""
        blank: list[Block] = []
        cached: list[Block] = []
        for block in reversed(blocks):
            block.users -= 1
            if not block.users:
                (blank if block.name is None else cached).append(block)
        self.free = [*blank, *self.free, *cached]

    def clear(self) -> None:
        """Forget all cached content; possible only if no block is in use."""
        if len(self.free) == self.count:
            self._cached.clear()
            for block in self.free:
                block.name = None

    def eviction_order(self) -> Iterator[BlockName]:
        """Names of the cached free blocks, next to be evicted first."""
        return (block.name for block in self.free if block.name is not None)
