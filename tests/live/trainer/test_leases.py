"""Whose a batch is: the whole table, what is not in it, and what is told to whom."""

from __future__ import annotations

from itertools import product

import pytest

from rollout_sched.core.errors import IllegalMove
from rollout_sched.live.trainer.delivery import (
    ACKNOWLEDGED,
    DELIVERED,
    MOVES,
    Lease,
    LeaseEnded,
    LeaseFacts,
    LeaseMove,
    Leases,
    LeaseState,
)

#: The table as prose, written a second time: from, verb, to.
LEGAL = """
delivered  take         leased
delivered  acknowledge  acknowledged
leased     take         leased
leased     end          expired
leased     acknowledge  acknowledged
expired    take         leased
expired    acknowledge  acknowledged
"""
TABLE = {
    (LeaseState(before), LeaseMove[verb.upper()]): LeaseState(after)
    for before, verb, after in map(str.split, LEGAL.strip().splitlines())
}

DO = {
    LeaseMove.TAKE: lambda lease: lease.take("b", 9.0),
    LeaseMove.END: lambda lease: lease.end(),
    LeaseMove.ACKNOWLEDGE: lambda lease: lease.acknowledge("b"),
}


@pytest.mark.parametrize(("before", "verb"), list(product(LeaseState, LeaseMove)))
def test_every_move_is_in_the_table_or_changes_nothing(before: LeaseState, verb: LeaseMove) -> None:
    lease = Lease(5)
    lease.state, lease.holder, lease.until = before, "a", 3.0
    after = TABLE.get((before, verb))
    if after is not None:
        DO[verb](lease)
        assert lease.state is after
        return
    with pytest.raises(IllegalMove, match=f"batch 5 is {before}: it cannot {verb}"):
        DO[verb](lease)
    assert (lease.state, lease.holder, lease.until, lease.former) == (before, "a", 3.0, set())


def test_the_table_names_every_state() -> None:
    assert set(MOVES) == set(LeaseState)


class Book:
    """Leases, and what is to be kept in mind of them."""

    def __init__(self, term_s: float = 10.0) -> None:
        self.kept: dict[int, LeaseFacts] = {}
        self.leases = Leases(term_s, self.changed)

    def changed(self, batch: int, facts: LeaseFacts | None) -> None:
        if facts is None:
            self.kept.pop(batch, None)
        else:
            self.kept[batch] = facts

    def restarted(self, now: float) -> Book:
        other = Book(self.leases.term_s)
        other.kept = dict(self.kept)
        other.leases.restore(self.kept, now)
        return other


def test_a_batch_is_one_trainers_until_its_lease_ends() -> None:
    leases = Book().leases
    leases.deliver(0)
    assert leases.free == [0]
    leases.take(0, "a", now=0.0)
    assert (leases.free, leases.held_by("a"), leases.held_by("b")) == ([], 0, None)
    leases.end(9.9)
    assert leases.free == []
    leases.end(10.0)
    assert (leases.free, leases.next_end) == ([0], None)
    leases.take(0, "b", now=12.0)
    assert (leases.held_by("a"), leases.held_by("b"), leases.next_end) == (None, 0, 22.0)


def test_renewing_keeps_a_lease() -> None:
    leases = Book().leases
    leases.deliver(0)
    leases.take(0, "a", now=0.0)
    assert leases.renew("a", now=9.0) == 0
    assert leases.renew("b", now=9.0) is None
    leases.end(18.0)
    assert leases.free == []
    leases.end(19.0)
    assert leases.renew("a", now=30.0) == 0, "nobody has taken it meanwhile"
    assert leases.free == []


def test_without_a_term_a_lease_has_no_end() -> None:
    leases = Book(0.0).leases
    leases.deliver(0)
    leases.take(0, "a", now=0.0)
    leases.end(1e9)
    assert (leases.free, leases.next_end) == ([], None)
    assert not leases.may_come_to("b")


def test_acknowledgement_after_loss_is_refused_with_the_new_owner() -> None:
    book = Book()
    leases = book.leases
    leases.deliver(0)
    leases.take(0, "a", now=0.0)
    leases.end(10.0)
    leases.take(0, "b", now=10.0)
    with pytest.raises(LeaseEnded, match=r"lease of trainer 'a' ended, and trainer 'b' has it now"):
        leases.acknowledge(0, "a")
    leases.acknowledge(0, "b")
    assert book.kept == {0: LeaseFacts("b", ("a",), acknowledged=True)}
    for now in (11.0, 12.0):
        with pytest.raises(LeaseEnded, match="trainer 'b' has acknowledged it"):
            book.restarted(now).leases.check(0, "a")
    leases.check(0, "b")
    leases.check(0, "c")
    leases.deliver(1)
    leases.take(1, "a", now=13.0)
    assert book.kept == {1: LeaseFacts("a")}, "a has begun another: nobody has to be told any more"


def test_acknowledgement_by_another_trainer_is_refused() -> None:
    leases = Book().leases
    leases.deliver(0)
    leases.take(0, "a", now=0.0)
    with pytest.raises(LeaseEnded, match="was handed to trainer 'a', not to 'b'"):
        leases.check(0, "b")
    leases.end(10.0)
    with pytest.raises(LeaseEnded, match="acknowledge it under that name"):
        leases.acknowledge(0, "b")
    leases.acknowledge(0, "a")


def test_a_late_acknowledgement_counts_while_nobody_else_has_it() -> None:
    book = Book()
    book.leases.deliver(0)
    book.leases.take(0, "a", now=0.0)
    book.leases.end(10.0)
    book.leases.acknowledge(0, "a")
    assert book.kept == {}
    assert book.leases.summary(10.0) == []


def test_restart_renews_every_lease() -> None:
    book = Book()
    for batch in range(2):
        book.leases.deliver(batch)
    book.leases.take(1, "a", now=0.0)
    again = book.restarted(100.0).leases
    again.deliver(0)
    again.deliver(1)
    again.end(109.0)
    assert (again.free, again.held_by("a"), again.next_end) == ([0], 1, 110.0)


def test_unrecorded_lease_may_be_acknowledged() -> None:
    lease = Lease(0)
    assert (lease.state, lease.facts) == (DELIVERED, None)
    lease.acknowledge("a")
    assert lease.state is ACKNOWLEDGED


def test_batches_that_may_come_to_a_trainer() -> None:
    leases = Book().leases
    assert not leases.may_come_to("a")
    leases.deliver(0)
    assert leases.may_come_to("a")
    leases.take(0, "b", now=0.0)
    assert leases.may_come_to("a")
    assert not leases.may_come_to("b")
    leases.acknowledge(0, "b")
    assert not leases.may_come_to("a")


def test_status_lists_the_owner_of_each_batch() -> None:
    leases = Book().leases
    leases.deliver(3)
    assert leases.summary(0.0) == [
        {"batch": 3, "state": "delivered", "trainer": None, "ends_in_s": None}
    ]
    leases.take(3, "a", now=0.0)
    assert leases.summary(4.0) == [
        {"batch": 3, "state": "leased", "trainer": "a", "ends_in_s": 6.0}
    ]
