"""A store that dies between any two writes: promised data is present, and all data is intact."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollout_sched.store.errors import StoreBehind, StoreDamaged
from rollout_sched.store.store import _SETTINGS, PAGE, Store
from rollout_sched.store.transaction import Transaction
from tests.store.simulated_disk import Crash, Power, SimulatedDisk, damage_log

NAMES = st.sampled_from("abcd")
OWNERS = st.sampled_from("xyz")
ORDINALS = st.integers(0, 3)
DATA = st.binary(min_size=1, max_size=400)

#: So few that the log is often copied into the database and begun again.
LOG_PAGES = 16

RNG = st.integers(0, 2**32).map(Random)
POWER = st.sampled_from([None, "all"]) | RNG

#: Bytes of that log: it grows by one more transaction before it is begun again.
LOG_BYTES = 2 * LOG_PAGES * PAGE

#: Bytes of the tables and indices of the few rows of these tests.
MAX_ROWS = 32 * PAGE

CHANGE = st.one_of(
    st.tuples(st.just("put"), NAMES, DATA),
    st.tuples(st.just("drop"), NAMES),
    st.tuples(st.just("append"), OWNERS, ORDINALS, DATA),
    st.tuples(st.just("take_back"), OWNERS, ORDINALS),
    st.tuples(st.just("clear"), OWNERS),
)


@dataclass
class State:
    """The expected contents of a store."""

    facts: dict = field(default_factory=dict)
    pieces: dict = field(default_factory=dict)

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
    state after each transaction since then. `ever`: after each transaction."""

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.runs = 0
        self.states = [State()]
        self.ever = [State()]
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
        writes=st.integers(0, 2),
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

    @rule(rng=RNG)
    def damaged_log(self, rng):
        """Nothing of it is lost in silence: each row that is salvaged was there at some time."""
        self.runs += 1
        left = self.disk.left_by_a_crash(self.root / str(self.runs))
        damage_log(left, rng)
        try:
            with closing(Store(left, disk=SimulatedDisk(left, self.disk.run))) as store:
                assert State(store.facts("kind"), held(store)) == self.states[-1]
                assert not store.losses
        except StoreDamaged:
            pass
        except StoreBehind:
            with pytest.raises(StoreBehind):
                Store(left, disk=SimulatedDisk(left, self.disk.run))
            with closing(Store(left, salvage=True)) as store:
                facts, pieces = store.facts("kind").items(), held(store).items()
                assert facts <= {fact for state in self.ever for fact in state.facts.items()}
                assert pieces <= {piece for state in self.ever for piece in state.pieces.items()}
                assert store.losses.transactions
            Store(left).close()

    @rule()
    def close_and_open(self):
        self.store.close()
        self._come_back(None, closed=True)

    @rule(changes=st.lists(CHANGE, min_size=1, max_size=4), room=st.integers(0, 200))
    def full_disk(self, changes, room):
        self.disk.free = room
        try:
            self._apply(changes, promised=True)
        except sqlite3.OperationalError:
            self.states.pop()  # nothing has changed
        finally:
            self.disk.free = None

    @invariant()
    def holds_what_it_should(self):
        assert held(self.store) == self.states[-1].pieces

    @invariant()
    def the_disk_is_bounded(self):
        assert self.store.disk_bytes <= 2 * LOG_BYTES + MAX_ROWS

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
        self.ever.append(state)
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
        self._open(left, self.disk.run if power is None else str(self.runs))
        found = State(self.store.facts("kind"), held(self.store))
        # Without a loss of power everything written is there, except for an unfinished write.
        assert found in (self.states[-2:] if power is None else self.states)
        assert not self.store.losses or power is not None
        self.states = [found]

    def _open(self, folder, run="0"):
        self.disk = SimulatedDisk(folder, run)
        often = (*_SETTINGS, f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
        with patch(
            "rollout_sched.store.store._SETTINGS", often
        ):  # also of what the opening itself writes
            self.store = Store(folder, disk=self.disk)
        assert self.store.epoch == self.epoch + 1
        self.epoch += 1


def test_a_checkpoint_syncs_the_log_that_it_copies():
    """Otherwise the log would be older than the pages of the database, which no disk leaves."""
    for crashes in range(5, 9):
        store = StoreUnderCrashes()
        store.first()
        store.close_and_open()
        for _ in range(crashes):
            store.crash_between(None)
        store.crash_within([("put", "a", b"x")], promised=False, writes=1, power="all")
        store.teardown()


StoreUnderCrashes.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None
)
TestStoreUnderCrashes = StoreUnderCrashes.TestCase


def held(store):
    return {
        (owner, ordinal): data
        for owner in store.owners()
        for ordinal, data in store.pieces(owner).items()
    }


def change(store, *, promised=False, **pieces):
    changes = Transaction()
    for owner, data in pieces.items():
        if data is None:
            changes.clear(owner)
        else:
            changes.append(owner, 0, data)
    store.apply(changes, promised=promised)


@pytest.mark.parametrize("gone", [None, "z"])
def test_a_promise_that_writes_nothing_itself_is_about_earlier_changes(tmp_path, gone):
    disk = SimulatedDisk(tmp_path / "s")
    store = Store(tmp_path / "s", disk=disk)
    change(store, x=b"x")
    change(store, promised=True, **({gone: None} if gone else {}))
    left = disk.left_by_a_crash(tmp_path / "left", "all")
    store.close()
    with closing(Store(left)) as store:
        assert store.owners() == ["x"]


def test_a_change_that_was_not_promised_is_lost_with_the_power(tmp_path):
    """So the disk of these tests does lose something."""
    disk = SimulatedDisk(tmp_path / "s")
    store = Store(tmp_path / "s", disk=disk)
    change(store, promised=True, x=b"x")
    change(store, y=b"y")
    left = disk.left_by_a_crash(tmp_path / "left", "all")
    store.close()
    with closing(Store(left)) as store:
        assert store.owners() == ["x"]


def test_promised_data_survives_wherever_the_log_ends(tmp_path):
    """Cut at any byte behind the promised part, or changed there."""
    disk = SimulatedDisk(tmp_path / "s")
    store = Store(tmp_path / "s", disk=disk)
    change(store, promised=True, x=b"x" * 50_000)
    change(store, x=None, y=b"y" * 50_000)
    change(store, z=b"z" * 50_000)
    whole = {"x"}, {"y"}, {"y", "z"}
    seen = []
    for number in range(40):
        left = disk.left_by_a_crash(tmp_path / f"{number}", Random(number))
        with closing(Store(left)) as after:
            assert not after.losses.facts + after.losses.owners
            seen.append(set(after.owners()))
            assert all(data == owner.encode() * 50_000 for (owner, _), data in held(after).items())
    store.close()
    assert all(owners in whole for owners in seen)
    assert {"x"} in seen


#: Promises one piece after the other for ever, and says so.
WRITER = """
import sys
from pathlib import Path
from rollout_sched.store import Store, StoreWriter
from rollout_sched.store.transaction import Transaction

writer = StoreWriter(Store(Path(sys.argv[1])), print)
for number in range(10**9):
    changes = Transaction()
    changes.append(f"{number}", 0, b"%d," % number * 10_000)
    if number >= 10:
        changes.clear(f"{number - 10}")
    writer.promise(changes).result()
    print(number, flush=True)
"""


def test_promised_data_survives_the_death_of_its_process(tmp_path):
    """Or its damage is told."""
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(50):
            process.stdout.readline()
        process.kill()
        last = max(map(int, ["49", *process.stdout.read().split()]))
    for number in range(20):
        left = shutil.copytree(tmp_path, tmp_path.with_name(f"damaged-{number}"))
        damage_log(left, Random(number))
        with suppress(StoreBehind), closing(Store(left)) as store:
            assert store.pieces(f"{last}") == {0: b"%d," % last * 10_000}
    with closing(Store(tmp_path)) as store:
        assert not store.losses
        numbers = sorted(int(owner) for owner in store.owners())
        assert numbers in [list(range(end - 9, end + 1)) for end in (last, last + 1)]
        assert store.pieces(f"{last}") == {0: b"%d," % last * 10_000}
