"""Delivers batches to trainers and keeps each until all of it is acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import msgspec

from rollout_sched.core.errors import CallerError, IllegalMove
from rollout_sched.live.trainer.samples import Batch

# ------------------------------------------------------------------------------------------
# Leases: which trainer holds a delivered batch, as a table of moves.
#
#                     take                acknowledge
#     DELIVERED ──────────────▶ LEASED ─────────────────▶ ACKNOWLEDGED
#         │                      │  ▲                       ▲   ▲
#         │                  end │  │ take                  │   │
#         │                      ▼  │        acknowledge    │   │
#         │                     EXPIRED ────────────────────┘   │
#         └─────────────────────────────────────────────────────┘
#           acknowledge, if the store has lost the holder
#
# A move that the table does not list is an error and changes nothing. There is no clock in here:
# `now` is in seconds of the caller's clock.
#
# Invariants: a trainer holds at most one batch; a batch is held by at most one trainer; a trainer
# that has lost a batch to another cannot acknowledge it.
#
# The core knows no trainers: it makes one batch at a time for whoever asks.
#
# * A lease that has expired is lost when another trainer takes the batch, not before: a trainer
#   that was only slow is not told to throw away work that no other does.
# * A trainer that lost a batch is remembered until it takes another, because then it knows. So its
#   late acknowledgement is refused, whatever restarts in between; the cost is one remembered batch
#   for each trainer that never came back.
# * The holder of a batch is stored before the batch is handed out; the end of its lease is not
#   stored. While nothing serves, nobody can renew, so after a restart each lease has its whole term
#   again.
# * A batch passes to another trainer unchanged: making it again because versions have moved would
#   give two batches with one number. There is one sequence of versions, whoever publishes; several
#   batches of one version make the bound on open groups stricter, never looser.
# * Without names all trainers count as one, and without `lease_s` a lease does not end.

#: The name of a trainer, which it keeps after a restart.
TrainerName = Annotated[
    str, msgspec.Meta(min_length=1, max_length=256, pattern=r"\A[^\x00-\x1f\x7f]*\Z")
]

#: The default name of a trainer.
TRAINER = "trainer"


class LeaseEnded(CallerError):
    """A trainer names a batch that another trainer holds: discard what was trained on it."""


class LeaseState(StrEnum):
    """The state of a delivered batch."""

    DELIVERED = "delivered"  # no trainer has it yet
    LEASED = "leased"
    EXPIRED = "expired"  # its trainer may still acknowledge it, until another takes it
    ACKNOWLEDGED = "acknowledged"


DELIVERED, LEASED, EXPIRED, ACKNOWLEDGED = LeaseState


class LeaseMove(StrEnum):
    """The verbs of the table."""

    TAKE = "be taken"  # by a trainer, or again by its holder
    END = "end"
    ACKNOWLEDGE = "be acknowledged"


TAKE, END, ACKNOWLEDGE = LeaseMove

MOVES: dict[LeaseState, dict[LeaseMove, LeaseState]] = {
    DELIVERED: {TAKE: LEASED, ACKNOWLEDGE: ACKNOWLEDGED},
    LEASED: {TAKE: LEASED, END: EXPIRED, ACKNOWLEDGE: ACKNOWLEDGED},
    EXPIRED: {TAKE: LEASED, ACKNOWLEDGE: ACKNOWLEDGED},
    ACKNOWLEDGED: {},
}


class LeaseFacts(msgspec.Struct, frozen=True):
    """What is stored of a lease. Its end is not stored: no trainer can renew while we are down.

    holder        the trainer that has the batch, or had it last
    former        earlier holders that may not know that they have lost it
    acknowledged  the batch is acknowledged, and is remembered only for the former holders
    """

    holder: str
    former: tuple[str, ...] = ()
    acknowledged: bool = False


class Lease:
    """The lease of one batch. `until`: when it expires; None: never."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.state: LeaseState = DELIVERED
        self.holder: str | None = None
        self.former: set[str] = set()
        self.until: float | None = None

    def take(self, trainer: str, until: float | None) -> None:
        self._move(TAKE)
        if self.holder not in (None, trainer):
            self.former.add(str(self.holder))
        self.former.discard(trainer)
        self.holder, self.until = trainer, until

    def end(self) -> None:
        self._move(END)
        self.until = None

    def acknowledge(self, trainer: str) -> None:
        self._move(ACKNOWLEDGE)
        self.holder, self.until = trainer, None

    @property
    def facts(self) -> LeaseFacts | None:
        """None: nothing needs to be stored."""
        over = self.state is ACKNOWLEDGED
        if self.holder is None or (over and not self.former):
            return None
        return LeaseFacts(self.holder, tuple(sorted(self.former)), over)

    def restore(self, facts: LeaseFacts, until: float | None) -> None:
        self.state = ACKNOWLEDGED if facts.acknowledged else LEASED
        self.holder, self.former = facts.holder, set(facts.former)
        self.until = None if facts.acknowledged else until

    def summary(self, now: float) -> dict[str, Any]:
        """For display."""
        ends_in_s = None if self.until is None else max(0.0, self.until - now)
        return {
            "batch": self.batch,
            "state": str(self.state),
            "trainer": self.holder,
            "ends_in_s": ends_in_s,
        }

    def _move(self, verb: LeaseMove) -> None:
        after = MOVES[self.state].get(verb)
        if after is None:
            raise IllegalMove(f"batch {self.batch} is {self.state}: it cannot {verb}")
        self.state = after


class Leases:
    """The leases of unacknowledged batches, and of batches that a former holder may still claim.

    `term_s`: seconds after which a silent trainer's lease expires; 0: never. `changed` is called
    with a batch and the facts to store of its lease; None: nothing more.
    """

    def __init__(
        self, term_s: float, changed: Callable[[int, LeaseFacts | None], None] | None = None
    ) -> None:
        self.term_s = term_s
        self._changed = changed
        self._leases: dict[int, Lease] = {}

    def restore(self, facts: dict[int, LeaseFacts], now: float) -> None:
        """Leases of an earlier run; each gets its whole term again, as it could not be renewed."""
        for batch, known in facts.items():
            lease = self._leases[batch] = Lease(batch)
            lease.restore(known, self._until(now))

    def deliver(self, batch: int) -> None:
        """A trainer may take it from now on."""
        self._leases.setdefault(batch, Lease(batch))

    def held_by(self, trainer: str) -> int | None:
        """The batch that a trainer holds, or whose lease has expired without another taking it."""
        for lease in self._leases.values():
            if lease.holder == trainer and lease.state in (LEASED, EXPIRED):
                return lease.batch
        return None

    @property
    def free(self) -> list[int]:
        """Batches that any trainer may take, in order."""
        return sorted(n for n, one in self._leases.items() if one.state in (DELIVERED, EXPIRED))

    def may_come_to(self, trainer: str) -> bool:
        """Whether this trainer may still get one of the batches that others hold or nobody has."""
        return any(
            lease.state in (DELIVERED, EXPIRED) or lease.until is not None
            for lease in self._leases.values()
            if lease.state is not ACKNOWLEDGED and lease.holder != trainer
        )

    def take(self, batch: int, trainer: str, now: float) -> None:
        """The trainer holds it from now on, and is no longer a former holder of other batches."""
        lease = self._leases[batch]
        before = lease.facts
        lease.take(trainer, self._until(now))
        if lease.facts != before:
            self._say(lease)
        for other in list(self._leases.values()):
            if other is not lease and trainer in other.former:
                other.former.discard(trainer)
                self._say(other)

    def renew(self, trainer: str, now: float) -> int | None:
        """The trainer was heard of: renew its lease. Returns the batch."""
        held = self.held_by(trainer)
        if held is not None:
            self._leases[held].take(trainer, self._until(now))
        return held

    def end(self, now: float) -> None:
        """Expire the leases whose time is over."""
        for lease in self._leases.values():
            if lease.until is not None and lease.until <= now:
                lease.end()

    @property
    def next_end(self) -> float | None:
        return min(
            (one.until for one in self._leases.values() if one.until is not None), default=None
        )

    def check(self, batch: int, trainer: str) -> None:
        """Raises LeaseEnded if another trainer holds the batch that this one names."""
        lease = self._leases.get(batch)
        if lease is None or lease.holder in (None, trainer):
            return
        if trainer in lease.former:
            what = "has acknowledged it" if lease.state is ACKNOWLEDGED else "has it now"
            raise LeaseEnded(
                f"batch {batch}: the lease of trainer {trainer!r} ended, and trainer "
                f"{lease.holder!r} {what}; discard what was trained on it, and ask for the next "
                f"one; to avoid this, increase [live] lease_s ({self.term_s:g} now)"
            )
        if lease.state is not ACKNOWLEDGED:
            raise LeaseEnded(
                f"batch {batch} was handed to trainer {lease.holder!r}, not to {trainer!r}; "
                "acknowledge it under that name, or ask for the next one"
            )

    def acknowledge(self, batch: int, trainer: str) -> None:
        """Acknowledge the batch. Raises LeaseEnded if another trainer holds it."""
        self.check(batch, trainer)
        lease = self._leases[batch]
        lease.acknowledge(trainer)
        self._say(lease)

    def summary(self, now: float) -> list[dict[str, Any]]:
        """For display: the leases of unacknowledged batches."""
        here: Iterable[Lease] = self._leases.values()
        return [lease.summary(now) for lease in here if lease.state is not ACKNOWLEDGED]

    def _until(self, now: float) -> float | None:
        return now + self.term_s if self.term_s else None

    def _say(self, lease: Lease) -> None:
        facts = lease.facts
        if lease.state is ACKNOWLEDGED and facts is None:
            del self._leases[lease.batch]
        if self._changed is not None:
            self._changed(lease.batch, facts)


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
    (`Leases` records which), and is acknowledged.

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
        """Take over from an earlier run: the parts not acknowledged in it, their leases, and
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

    def summary(self) -> list[dict[str, Any]]:
        """For display: which trainer holds each batch."""
        return self.leases.summary(self._clock())

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
