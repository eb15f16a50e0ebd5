"""A store that dies between any two writes: promised data is present, and all data is intact."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import closing, suppress
from copy import deepcopy
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollout_sched.store.store import Store
from rollout_sched.store.transaction import Transaction
from tests.store.simulated_disk import Crash, Power, SimulatedDisk

NAMES = st.sampled_from("abcd")
OWNERS = st.sampled_from("xyz")
ORDINALS = st.integers(0, 3)
DATA = st.binary(min_size=1, max_size=400)

#: Small, so that files are often filled, emptied and overwritten.
CAPACITY = 300

POWER = st.sampled_from([None, "rows", "tokens"]) | st.randoms(use_true_random=False)

CHANGE = st.one_of(
    st.tuples(st.just("put"), NAMES, DATA),
    st.tuples(st.just("drop"), NAMES),
    st.tuples(st.just("append"), OWNERS, ORDINALS, DATA),
    st.tuples(st.just("take_back"), OWNERS, ORDINALS),
    st.tuples(st.just("clear"), OWNERS),
)


class State:
    """The expected contents of a store."""

    def __init__(self):
        self.facts = {}
        self.pieces = {}

    def after(self, change):
        new = deepcopy(self)
        new._apply(*change)
        return new

    def _apply(self, what, name, *rest):
        if what == "put":
            self.facts[name] = rest[0]
        elif what == "drop":
            self.facts.pop(name, None)
        elif what == "append":
            self.pieces[name, rest[0]] = rest[1]
        elif what == "take_back":
            self.pieces.pop((name, rest[0]), None)
        else:
            self.pieces = {key: data for key, data in self.pieces.items() if key[0] != name}


class StoreUnderCrashes(RuleBasedStateMachine):
    """`states`: the possible contents after a crash, oldest first: the last promised state, and the
    state after each transaction since then."""

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.runs = 0
        self.states = [State()]
        self.epoch = 0

    @initialize()
    def first(self):
        self._open(self.root / "0")

    @rule(changes=st.lists(CHANGE, max_size=6), promised=st.booleans())
    def apply(self, changes, promised):
        self._apply(changes, promised)

    @rule(
        changes=st.lists(CHANGE, min_size=1, max_size=6),
        promised=st.booleans(),
        writes=st.integers(0, 8),
        power=POWER,
    )
    def crash_within(self, changes, promised, writes, power):
        self.disk.crash_in = writes
        with suppress(Crash):
            self._apply(changes, promised)
        self._come_back(power)

    @rule(power=POWER)
    def crash_between(self, power):
        self._come_back(power)

    @rule()
    def close_and_open(self):
        self.store.close()
        self._come_back(None, closed=True)

    @rule(changes=st.lists(CHANGE, min_size=1, max_size=4), room=st.integers(0, 200))
    def full_disk(self, changes, room):
        self.disk.free = room
        try:
            self._apply(changes, promised=True)
        except OSError:
            self.states.pop()  # nothing has changed
        finally:
            self.disk.free = None

    @invariant()
    def holds_what_it_should(self):
        held = {
            (owner, ordinal): data
            for owner in self.store.owners()
            for ordinal, data in self.store.pieces(owner).items()
        }
        assert held == self.states[-1].pieces

    @invariant()
    def the_disk_is_bounded(self):
        slack = 8 * CAPACITY + sum(map(len, self.states[-1].pieces.values()))
        assert self.store._files.disk_bytes <= 2 * self.store.live_bytes + slack + 40 * CAPACITY

    def teardown(self):
        if hasattr(self, "store"):
            self.disk.crash_in = None
            self.store.close()
        shutil.rmtree(self.root)

    def _apply(self, changes, promised):
        wanted, state = Transaction(), self.states[-1]
        for what, *rest in changes:
            state = state.after((what, *rest))
            getattr(wanted, what)(*(("kind", *rest) if what in ("put", "drop") else rest))
        self.states.append(state)
        self.store.apply(wanted, promised=promised)
        if promised:
            self.states = [state]
        self.store.tidy()

    def _come_back(self, power: Power | None, *, closed: bool = False):
        self.runs += 1
        left = self.disk.left_by_a_crash(self.root / str(self.runs), power)
        if not closed:
            self.disk.crash_in = None
            self.store.close()
        self._open(left)
        facts = self.store.facts("kind")
        may_be = [state for state in self.states if state.facts == facts]
        if power is None:
            # Everything written is there, except for unfinished writes.
            may_be = [state for state in may_be if state in self.states[-2:]]
            assert not self.store.losses
        self._check_pieces(may_be)

    def _check_pieces(self, may_be):
        assert may_be
        losses = self.store.losses
        assert not losses.facts
        assert not losses.rows
        held = {
            (owner, ordinal): data
            for owner in self.store.owners()
            for ordinal, data in self.store.pieces(owner).items()
        }
        promised = self.states[0].pieces
        for state in may_be:
            sound = all(state.pieces.get(key) == data for key, data in held.items())
            lost = {key for key in state.pieces if key not in held}
            told = all(owner in losses.owners for owner, _ in lost)
            kept = not any(promised.get(key) == state.pieces[key] for key in lost)
            if sound and told and kept:
                self.states = [State()]
                self.states[0].facts = state.facts
                self.states[0].pieces = held
                return
        raise AssertionError(f"{held} is none of {[state.pieces for state in may_be]}")

    def _open(self, folder):
        self.disk = SimulatedDisk(folder)
        self.store = Store(folder, disk=self.disk, capacity=CAPACITY)
        assert self.store.epoch == self.epoch + 1
        self.epoch += 1


StoreUnderCrashes.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None
)
TestStoreUnderCrashes = StoreUnderCrashes.TestCase


def change(store, *, promised=False, **pieces):
    changes = Transaction()
    for owner, data in pieces.items():
        if data is None:
            changes.clear(owner)
        else:
            changes.append(owner, 0, data)
    store.apply(changes, promised=promised)


def test_promised_data_is_not_overwritten_before_its_deletion_is_durable(tmp_path):
    """A row that is deleted without a sync may come back after a power failure."""
    disk = SimulatedDisk(tmp_path / "s")
    store = Store(tmp_path / "s", disk=disk, capacity=CAPACITY)
    change(store, x=b"x" * CAPACITY, promised=True)
    change(store, x=None)
    for number in range(5):
        change(store, **{f"y{number}": b"y" * CAPACITY})
    left = disk.left_by_a_crash(tmp_path / "left", "rows")
    store.close()
    with closing(Store(left)) as store:
        assert store.owners() == ["x"]
        assert store.pieces("x") == {0: b"x" * CAPACITY}


@pytest.mark.parametrize("gone", [None, "z"])
def test_a_promise_that_writes_nothing_itself_is_about_what_came_before(tmp_path, gone):
    disk = SimulatedDisk(tmp_path / "s")
    store = Store(tmp_path / "s", disk=disk, capacity=CAPACITY)
    change(store, x=b"x")
    change(store, promised=True, **({gone: None} if gone else {}))
    left = disk.left_by_a_crash(tmp_path / "left", "rows")
    store.close()
    with closing(Store(left)) as store:
        assert store.owners() == ["x"]


def test_promised_data_is_moved_unchanged(tmp_path):
    disk = SimulatedDisk(tmp_path / "s")
    store = Store(tmp_path / "s", disk=disk, capacity=CAPACITY)
    for number in range(12):
        change(store, **{f"x{number}": b"x", f"y{number}": b"y" * CAPACITY}, promised=True)
    change(store, **{f"y{number}": None for number in range(12)}, promised=True)
    before = {store._book._pieces[f"x{n}"][0].place for n in range(12)}
    store.tidy()
    assert before != {store._book._pieces[f"x{n}"][0].place for n in range(12)}
    left = disk.left_by_a_crash(tmp_path / "left", "tokens")
    store.close()
    with closing(Store(left)) as store:
        assert sorted(store.owners()) == sorted(f"x{n}" for n in range(12))
