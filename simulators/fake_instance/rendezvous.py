"""The rendezvous of the ranks of a weight-transfer group: as with NCCL, all wait for the last one.

A group is identified by its master's address and port, across all simulated servers of this
machine. A rank is a file locked by its owner, so a rank is free again when its process has ended.
Rank 0 is the trainer's and not waited for, because the trainer here is often a test without NCCL.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

#: Seconds between two checks of the ranks.
LOOK_S = 0.02


class RankRange(msgspec.Struct, frozen=True):
    """The ranks `first` ... `first + count - 1` of one server, in a group of `world` ranks."""

    group: str
    first: int
    count: int
    world: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)


class Rendezvous:
    """One server's membership in groups; in one at a time."""

    def __init__(self) -> None:
        self._locked: dict[Path, int] = {}  # rank's file -> its descriptor

    async def join(self, place: RankRange) -> None:
        """Wait until every rank is present: forever if one is missing, or if another server has one
        of ours."""
        self.leave()
        folder = _folder(place.group)
        for rank in place.ranks:
            path = folder / str(rank)
            while (descriptor := _lock(path)) is None:
                await asyncio.sleep(LOOK_S)
            self._locked[path] = descriptor
        others = [folder / str(rank) for rank in range(1, place.world) if rank not in place.ranks]
        while not _all_locked(others):
            await asyncio.sleep(LOOK_S)

    def leave(self) -> None:
        for path, descriptor in self._locked.items():
            path.unlink(missing_ok=True)
            os.close(descriptor)
        self._locked.clear()


def _folder(group: str) -> Path:
    """The group's folder, owned by this user."""
    digest = blake2b(group.encode(), digest_size=8).hexdigest()
    folder = Path(tempfile.gettempdir(), f"rollout_sched_ranks_{os.getuid()}", digest)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _lock(path: Path) -> int | None:
    """The descriptor of the file with an exclusive lock; None if another process has it."""
    import fcntl  # not available on every platform

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except OSError:  # it is locked, or its owner deleted it
        pass
    os.close(descriptor)
    return None


def _all_locked(paths: Sequence[Path]) -> bool:
    return all(_is_locked(path) for path in paths)


def _is_locked(path: Path) -> bool:
    """Takes a shared lock for a moment, so a process that wants the exclusive lock must retry."""
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
