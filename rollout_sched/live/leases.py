"""Leases: which trainer holds a delivered batch, as a table of moves.

                    take                acknowledge
    DELIVERED ──────────────▶ LEASED ─────────────────▶ ACKNOWLEDGED
        │                      │  ▲                       ▲   ▲
        │                  end │  │ take                  │   │
        │                      ▼  │        acknowledge    │   │
        │                     EXPIRED ────────────────────┘   │
        └─────────────────────────────────────────────────────┘
          acknowledge, if the store has lost the holder

A move that the table does not list is an error and changes nothing. There is no clock in here:
`now` is in seconds of the caller's clock.

Invariants: a trainer holds at most one batch; a batch is held by at most one trainer; a trainer
that has lost a batch to another cannot acknowledge it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from rollout_sched.core.errors import CallerError, IllegalMove

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

    def told(self, now: float) -> dict[str, Any]:
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

    def told(self, now: float) -> list[dict[str, Any]]:
        """For display: the leases of unacknowledged batches."""
        here: Iterable[Lease] = self._leases.values()
        return [lease.told(now) for lease in here if lease.state is not ACKNOWLEDGED]

    def _until(self, now: float) -> float | None:
        return now + self.term_s if self.term_s else None

    def _say(self, lease: Lease) -> None:
        facts = lease.facts
        if lease.state is ACKNOWLEDGED and facts is None:
            del self._leases[lease.batch]
        if self._changed is not None:
            self._changed(lease.batch, facts)
