"""Delivers batches to trainers and keeps each until all of it is acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rollout_sched.live.leases import TRAINER, LeaseFacts, Leases
from rollout_sched.live.samples import Batch

#: Renewals per lease term while a trainer waits for its next batch.
_LOOKS = 3


class NotReady(Exception):
    """Nothing was ready in time; ask again."""


class Asked(NamedTuple):
    """The batch that is being made: the trainer that asked for it (None: in an earlier run), and
    whether it asked for parts."""

    trainer: str | None
    parts: bool


class Position(NamedTuple):
    """What the trainer has received: a batch, with its parts up to `part`; None: all of it."""

    batch: int | None
    part: int | None


class NoMoreBatches(NamedTuple):
    """No more batches will come: nothing is left, or an error is the reason."""

    error: Exception | None


class BatchDelivery:
    """One batch is made at a time: it is requested, comes whole or in parts, is taken by a trainer
    (`live.leases` records which), and is acknowledged.

    Each call says what has been received and gets what follows it, so a broken connection or wait
    loses nothing and delivers nothing twice. All parts of a batch are kept until the whole batch is
    acknowledged: a restarted trainer, which has lost its gradients, gets the batch from its first
    part again, and so does a trainer that takes the batch over from another.

    `request(parts)` is called to ask for a batch, whole or in parts, and again when that changes;
    the answer is a call of `deliver` or `fail`, at once or later. `acknowledged` is called with the
    number of a batch that was received completely. `clock`: seconds, for the leases.

    `expected`: batches that are made and will be delivered once they are in a store.
    """

    def __init__(
        self,
        request: Callable[[bool], None],
        leases: Leases,
        acknowledged: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        self.leases = leases
        self.expected: list[Batch] = []
        self._request = request
        self._acknowledged = acknowledged
        self._clock = clock
        self._asked: Asked | None = None
        self._batches: dict[int, list[Batch]] = {}  # parts of each unacknowledged batch
        self._ended: NoMoreBatches | None = None
        self._closed = False
        self._changed = asyncio.Event()

    def restore(
        self, parts: list[Batch], asked: bool | None, leases: Mapping[int, LeaseFacts]
    ) -> None:
        """Take over from an earlier run: the parts not acknowledged there, their leases, and
        whether a batch was requested (`asked`: in parts or whole; None: no request)."""
        kept = {batch.number for batch in parts}
        known = {n: lease for n, lease in leases.items() if n in kept or lease.acknowledged}
        self.leases.restore(known, self._clock())
        self._asked = None if asked is None else Asked(None, asked)
        for part in parts:
            self._add(part)

    @property
    def awaited(self) -> bool:
        """Whether a batch was requested and is not complete."""
        return self._asked is not None and self._ended is None

    @property
    def uids(self) -> set[str]:
        """The groups that were or will be delivered and are not acknowledged."""
        here = [*self.expected, *(part for parts in self._batches.values() for part in parts)]
        made = {sample.uid for part in here for sample in part.samples}
        lost = {group.uid for part in here for group in part.failed}
        return made | lost | {uid for part in here for uid in part.filtered}

    @property
    def begun(self) -> bool:
        """Whether a part of a batch has come, but not its last one."""
        return not all(map(self._is_whole, self._batches))

    async def next(
        self,
        acknowledged: int | None,
        timeout_s: float | None,
        *,
        trainer: str = TRAINER,
        part: int | None = None,
        parts: bool = False,
    ) -> Batch | None:
        """Returns what follows the batch with the number `acknowledged`, which was received
        completely, or up to `part`: the rest of that batch, or the next one that no other trainer
        holds. None when nothing is left that this trainer could ever get.

        Returns a whole batch; with `parts`, the groups that are complete. Without the number of the
        last delivered batch, that batch comes again. Raises NotReady after `timeout_s` seconds (a
        later batch waits for the next call), and LeaseEnded if the received batch now belongs to
        another trainer.
        """
        arrived = Position(acknowledged, part)
        if acknowledged is not None:
            self.leases.check(acknowledged, trainer)
            self._acknowledge(acknowledged, part, trainer)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._can_answer(trainer, arrived, parts):
                    await self._news()
        if self._closed:
            raise NotReady
        found = self._for(trainer, arrived, parts)
        if found:
            self.leases.take(found[0].number, trainer, self._clock())
            return _joined(found)
        if self._ended is None or (self._ended.error is None and self.leases.may_come_to(trainer)):
            raise NotReady
        if self._ended.error is not None:
            raise self._ended.error
        return None

    def renew(self, trainer: str) -> int | None:
        """The trainer is alive: renew its lease. Returns the number of the batch that it holds."""
        return self.leases.renew(trainer, self._clock())

    def told(self) -> list[dict[str, Any]]:
        """For display: which trainer holds each batch."""
        return self.leases.told(self._clock())

    def expect(self, batch: Batch) -> None:
        """The batch will be delivered soon, before any other."""
        self.expected.append(batch)

    def deliver(self, batch: Batch | None) -> None:
        """A batch, or its next part, is ready for trainers; None: no batch will ever follow."""
        if batch is None:
            self._ended = NoMoreBatches(None)
        else:
            self.expected = [other for other in self.expected if other is not batch]
            self._add(batch)
            if batch.last:
                self._asked = None
        self._change()

    def fail(self, error: Exception) -> None:
        """No more batches will come; further requests would fail too."""
        self._ended = NoMoreBatches(error)
        self._change()

    def close(self) -> None:
        """End all waits."""
        self._closed = True
        self._change()

    def _add(self, part: Batch) -> None:
        self._batches.setdefault(part.number, []).append(part)
        self.leases.deliver(part.number)

    def _is_whole(self, batch: int) -> bool:
        return self._batches[batch][-1].last

    def _can_answer(self, trainer: str, arrived: Position, parts: bool) -> bool:
        """Whether there is an answer now; requests a batch if none was requested."""
        now = self._clock()
        self.leases.renew(trainer, now)
        self.leases.end(now)
        if not self._closed and not self._for(trainer, arrived, parts):
            self._ask(trainer, parts)
        if self._closed or self._for(trainer, arrived, parts):
            return True
        return self._ended is not None and not (
            self._ended.error is None and self.leases.may_come_to(trainer)
        )

    def _for(self, trainer: str, arrived: Position, parts: bool) -> list[Batch]:
        """The parts that this trainer may get now: those after what it has received."""
        held = self.leases.held_by(trainer)
        for number in self.leases.free if held is None else [held]:
            here = self._batches[number]
            if parts or self._is_whole(number):
                return here[_arrived(here, arrived) :]
        return []

    def _acknowledge(self, number: int, part: int | None, trainer: str) -> None:
        """A repeated acknowledgement does not count for the next batch."""
        here = self._batches.get(number)
        if here and here[-1].last and part in (None, len(here) - 1):
            self.leases.acknowledge(number, trainer)
            del self._batches[number]
            self._acknowledged(number)
            self._change()

    def _ask(self, trainer: str, parts: bool) -> None:
        """Request a batch. A trainer that waits while another's batch is being made requests its
        own when that one is complete."""
        before = self._asked
        if self._ended is not None or before == Asked(trainer, parts):
            return
        if before is not None and (before.trainer not in (None, trainer) or before.parts == parts):
            return
        self._asked = Asked(trainer, parts)
        try:
            self._request(parts)
        except BaseException:
            self._asked = before
            raise

    async def _news(self) -> None:
        """Wait until something changes, a lease ends, or this trainer's lease must be renewed."""
        term_s, end = self.leases.term_s, self.leases.next_end
        wait_s = None if end is None else max(0.0, min(end - self._clock(), term_s / _LOOKS))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._changed.wait()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _arrived(parts: list[Batch], position: Position) -> int:
    """How many of these parts were received."""
    batch, part = position
    known = batch == parts[0].number and part is not None and 0 <= part < len(parts)
    return part + 1 if known and part is not None else 0


def _joined(parts: list[Batch]) -> Batch:
    """Consecutive parts as one batch."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    return Batch(
        last.number,
        last.version,
        [sample for part in parts for sample in part.samples],
        [failed for part in parts for failed in part.failed],
        last.part,
        last.last,
        [uid for part in parts for uid in part.filtered],
        last.missing,
    )
