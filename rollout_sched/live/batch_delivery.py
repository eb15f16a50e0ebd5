"""Batches on their way to trainers: each is kept until all of it is acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rollout_sched.live.leases import TRAINER, LeaseFacts, Leases
from rollout_sched.live.samples import Batch

#: A trainer that waits for what follows is heard of so often within the term of its lease.
_LOOKS = 3


class NotYet(Exception):
    """Nothing had come in time; ask again."""


class Asked(NamedTuple):
    """The batch that is being made: who asked for it (None: somebody in an earlier run), and
    whether in parts."""

    trainer: str | None
    parts: bool


class Position(NamedTuple):
    """What has arrived: a batch, and of it the parts up to this one; None: all of it."""

    batch: int | None
    part: int | None


class NoMoreBatches(NamedTuple):
    """There will be no more: nothing is left, or why."""

    error: Exception | None


class BatchDelivery:
    """One batch is made at a time: it is requested, comes as a whole or in parts, is taken by a
    trainer (`live.leases` says whose it is), and is acknowledged.

    Whoever asks says what has arrived, and gets what follows it; so a connection or a wait that
    breaks off loses nothing, and nothing comes twice. The parts of a batch are kept until all of it
    has arrived: a trainer that starts anew, whose gradients are gone, gets the batch from its
    first part on, and so does one that takes over what another has left.

    `request(parts)` is called to ask for a batch, as a whole or in parts, and once more where that
    changes; what comes of it is told by `deliver` or `fail`, then or later. `acknowledged` is
    called with the number of a batch of which all has arrived. `clock`: seconds, for the leases.

    `expected`: what is made, and will be delivered once it is in a store.
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
        self._batches: dict[int, list[Batch]] = {}  # the parts of each that is not acknowledged
        self._ended: NoMoreBatches | None = None
        self._closed = False
        self._changed = asyncio.Event()

    def restore(
        self, parts: list[Batch], asked: bool | None, leases: Mapping[int, LeaseFacts]
    ) -> None:
        """What an earlier run had handed out and was not told the arrival of, and to whom; and
        whether a batch was asked for, in parts or as a whole."""
        kept = {batch.number for batch in parts}
        known = {n: lease for n, lease in leases.items() if n in kept or lease.acknowledged}
        self.leases.restore(known, self._clock())
        self._asked = None if asked is None else Asked(None, asked)
        for part in parts:
            self._add(part)

    @property
    def awaited(self) -> bool:
        """Whether a batch was requested and is not whole."""
        return self._asked is not None and self._ended is None

    @property
    def uids(self) -> set[str]:
        """The groups that were handed out, or will be, and are not acknowledged."""
        here = [*self.expected, *(part for parts in self._batches.values() for part in parts)]
        made = {sample.uid for part in here for sample in part.samples}
        lost = {group.uid for part in here for group in part.failed}
        return made | lost | {uid for part in here for uid in part.filtered}

    @property
    def begun(self) -> bool:
        """Whether a part of a batch has come, and not the last one."""
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
        """What follows the batch `acknowledged`, its number, of which all has arrived, or the parts
        up to `part`: the rest of that batch, or the next one that is not another trainer's; None
        when nothing is left that could ever be this one's.

        All of a batch as one; with `parts` what of it is whole. Without the number of what was
        handed out last, that comes again. Raises NotYet after `timeout_s` seconds, and what comes
        then waits for the next call; LeaseEnded if what has arrived is another trainer's.
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
            raise NotYet
        found = self._for(trainer, arrived, parts)
        if found:
            self.leases.take(found[0].number, trainer, self._clock())
            return _joined(found)
        if self._ended is None or (self._ended.error is None and self.leases.may_come_to(trainer)):
            raise NotYet
        if self._ended.error is not None:
            raise self._ended.error
        return None

    def renew(self, trainer: str) -> int | None:
        """A trainer is alive. Returns the number of the batch that it has."""
        return self.leases.renew(trainer, self._clock())

    def told(self) -> list[dict[str, Any]]:
        """For people: whose each batch is."""
        return self.leases.told(self._clock())

    def expect(self, batch: Batch) -> None:
        """It is delivered soon, and before any other."""
        self.expected.append(batch)

    def deliver(self, batch: Batch | None) -> None:
        """A batch, or its next part, to whoever asks; None, nothing is left, for ever."""
        if batch is None:
            self._ended = NoMoreBatches(None)
        else:
            self.expected = [other for other in self.expected if other is not batch]
            self._add(batch)
            if batch.last:
                self._asked = None
        self._change()

    def fail(self, error: Exception) -> None:
        """There will be no more; a request for another would fail too."""
        self._ended = NoMoreBatches(error)
        self._change()

    def close(self) -> None:
        """Send away who waits."""
        self._closed = True
        self._change()

    def _add(self, part: Batch) -> None:
        self._batches.setdefault(part.number, []).append(part)
        self.leases.deliver(part.number)

    def _is_whole(self, batch: int) -> bool:
        return self._batches[batch][-1].last

    def _can_answer(self, trainer: str, arrived: Position, parts: bool) -> bool:
        """Now; asks for a batch if that is what is missing."""
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
        """What this trainer may be handed now: parts that follow what has arrived."""
        held = self.leases.held_by(trainer)
        for number in self.leases.free if held is None else [held]:
            here = self._batches[number]
            if parts or self._is_whole(number):
                return here[_arrived(here, arrived) :]
        return []

    def _acknowledge(self, number: int, part: int | None, trainer: str) -> None:
        """An acknowledgement that comes twice does not count for the batch after."""
        here = self._batches.get(number)
        if here and here[-1].last and part in (None, len(here) - 1):
            self.leases.acknowledge(number, trainer)
            del self._batches[number]
            self._acknowledged(number)
            self._change()

    def _ask(self, trainer: str, parts: bool) -> None:
        """Who waits while a batch is made for another asks when that is whole."""
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
        """Wait until something comes, somebody's lease ends, or this one's is to be renewed."""
        term_s, end = self.leases.term_s, self.leases.next_end
        wait_s = None if end is None else max(0.0, min(end - self._clock(), term_s / _LOOKS))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._changed.wait()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _arrived(parts: list[Batch], position: Position) -> int:
    """How many of these have arrived."""
    batch, part = position
    known = batch == parts[0].number and part is not None and 0 <= part < len(parts)
    return part + 1 if known and part is not None else 0


def _joined(parts: list[Batch]) -> Batch:
    """Parts that follow one another, as one."""
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
