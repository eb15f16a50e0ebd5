"""Whose a delivered batch is, as a table.

                    take                acknowledge
    DELIVERED ──────────────▶ LEASED ─────────────────▶ ACKNOWLEDGED
        │                      │  ▲                       ▲   ▲
        │                  end │  │ take                  │   │
        │                      ▼  │        acknowledge    │   │
        │                     EXPIRED ────────────────────┘   │
        └─────────────────────────────────────────────────────┘
          acknowledge, where a store has lost who took it

A move that the table does not list is an error and changes nothing. There is no clock in here:
`now` is in seconds of whoever asks.

Invariants: a trainer holds one batch at most; a batch is held by one trainer at most; who has lost
one to another cannot acknowledge it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from rollout_sched.core.errors import CallerError, IllegalMove

#: Names a trainer; the same after its restart.
TrainerName = Annotated[
    str, msgspec.Meta(min_length=1, max_length=256, pattern=r"\A[^\x00-\x1f\x7f]*\Z")
]

#: Who asks for batches without a name.
TRAINER = "trainer"


class LeaseEnded(CallerError):
    """A trainer speaks of a batch that is another's: what it has made of it is not to count."""


class LeaseState(StrEnum):
    """Of a batch that has been delivered."""

    DELIVERED = "delivered"  # nobody has it yet
    LEASED = "leased"
    EXPIRED = "expired"  # its trainer may still acknowledge it, until another takes it
    ACKNOWLEDGED = "acknowledged"


DELIVERED, LEASED, EXPIRED, ACKNOWLEDGED = LeaseState


class LeaseMove(StrEnum):
    """The verbs of the table."""

    TAKE = "be taken"  # by a trainer, or once more by the one that has it
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
    """What of a lease must outlive its scheduler; its end does not, for nobody could renew it.

    holder        who has the batch, or had it last
    former        who had it before, and may not have noticed that it is another's
    acknowledged  the batch is over, and kept in mind for those
    """

    holder: str
    former: tuple[str, ...] = ()
    acknowledged: bool = False


class Lease:
    """One batch's. `until`: when it ends; None: never."""

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
        """None: there is nothing to be kept in mind."""
        over = self.state is ACKNOWLEDGED
        if self.holder is None or (over and not self.former):
            return None
        return LeaseFacts(self.holder, tuple(sorted(self.former)), over)

    def restore(self, facts: LeaseFacts, until: float | None) -> None:
        self.state = ACKNOWLEDGED if facts.acknowledged else LEASED
        self.holder, self.former = facts.holder, set(facts.former)
        self.until = None if facts.acknowledged else until

    def told(self, now: float) -> dict[str, Any]:
        """For people."""
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
    """Of the batches that are not acknowledged, and of those that somebody may believe to have.

    `term_s`: how long a trainer has a batch without being heard of; 0: for ever. `changed` is
    called with a batch and what is to be kept in mind of its lease; None: nothing more.
    """

    def __init__(
        self, term_s: float, changed: Callable[[int, LeaseFacts | None], None] | None = None
    ) -> None:
        self.term_s = term_s
        self._changed = changed
        self._leases: dict[int, Lease] = {}

    def restore(self, facts: dict[int, LeaseFacts], now: float) -> None:
        """What an earlier run left: each has its whole term again, for nobody could renew it."""
        for batch, known in facts.items():
            lease = self._leases[batch] = Lease(batch)
            lease.restore(known, self._until(now))

    def deliver(self, batch: int) -> None:
        """Somebody may take it from now on."""
        self._leases.setdefault(batch, Lease(batch))

    def held_by(self, trainer: str) -> int | None:
        """The batch that a trainer has, or had last and nobody has taken since."""
        for lease in self._leases.values():
            if lease.holder == trainer and lease.state in (LEASED, EXPIRED):
                return lease.batch
        return None

    @property
    def free(self) -> list[int]:
        """Batches that anybody may take, in order."""
        return sorted(n for n, one in self._leases.items() if one.state in (DELIVERED, EXPIRED))

    def may_come_to(self, trainer: str) -> bool:
        """Whether a batch that is here may yet be this trainer's."""
        return any(
            lease.state in (DELIVERED, EXPIRED) or lease.until is not None
            for lease in self._leases.values()
            if lease.state is not ACKNOWLEDGED and lease.holder != trainer
        )

    def take(self, batch: int, trainer: str, now: float) -> None:
        """The trainer has it from now on, and nothing that it may have lost before."""
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
        """Something was heard of a trainer: what it has it keeps. Returns the batch."""
        held = self.held_by(trainer)
        if held is not None:
            self._leases[held].take(trainer, self._until(now))
        return held

    def end(self, now: float) -> None:
        """Those whose time is over."""
        for lease in self._leases.values():
            if lease.until is not None and lease.until <= now:
                lease.end()

    @property
    def next_end(self) -> float | None:
        return min(
            (one.until for one in self._leases.values() if one.until is not None), default=None
        )

    def check(self, batch: int, trainer: str) -> None:
        """Raises LeaseEnded if the batch that a trainer says it has is another's."""
        lease = self._leases.get(batch)
        if lease is None or lease.holder in (None, trainer):
            return
        if trainer in lease.former:
            what = "has acknowledged it" if lease.state is ACKNOWLEDGED else "has it now"
            raise LeaseEnded(
                f"batch {batch}: the lease of trainer {trainer!r} ended, and trainer "
                f"{lease.holder!r} {what}; throw away what was trained of it, and ask for the next "
                f"one; a longer [live] lease_s ({self.term_s:g} now) leaves more time"
            )
        if lease.state is not ACKNOWLEDGED:
            raise LeaseEnded(
                f"batch {batch} was handed to trainer {lease.holder!r}, not to {trainer!r}; "
                "acknowledge it under that name, or ask for the next one"
            )

    def acknowledge(self, batch: int, trainer: str) -> None:
        """It is over. Raises LeaseEnded if it is another's."""
        self.check(batch, trainer)
        lease = self._leases[batch]
        lease.acknowledge(trainer)
        self._say(lease)

    def told(self, now: float) -> list[dict[str, Any]]:
        """For people: those that are not over."""
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
