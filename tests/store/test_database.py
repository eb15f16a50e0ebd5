"""The tables of a store."""

from __future__ import annotations

import sqlite3
import threading

import pytest

from rollout_sched.store.database import FORMAT, Damaged, Database, FactRow
from rollout_sched.store.disk import Disk
from rollout_sched.store.errors import PieceDamaged
from rollout_sched.store.transaction import Transaction
from tests.store.simulated_disk import full

INTACT = Damaged({}, {})


@pytest.fixture
def database(tmp_path):
    database = Database(tmp_path / "rows.sqlite", Disk())
    database.begin_anew()
    yield database
    database.close(synced=False)


def written(database, *, facts=(), pieces=(), synced=True):
    changes = Transaction()
    for fact in facts:
        changes.put(*fact)
    for piece in pieces:
        changes.append(*piece)
    database.write(changes, synced=synced)


@pytest.mark.parametrize("synced", [True, False, None])
def test_facts_are_read_as_they_were_last_put(database, synced):
    written(database, facts=[("group", "a", b"1")], synced=synced)
    written(database, facts=[("group", "a", b"2")], synced=synced)
    assert database.load() == ([FactRow("group", "a", b"2")], INTACT)
    assert database.format == FORMAT
    assert database.problem() == ""


def test_pieces_are_read_by_ordinal(database):
    written(database, pieces=[("x", 2, b"c"), ("x", 0, b"a"), ("y", 0, b"other")])
    assert list(database.pieces("x").items()) == [(0, b"a"), (2, b"c")]
    assert database.heads("y", 2) == {0: b"ot"}
    assert database.pieces("nobody") == {}
    assert sorted(database.owners()) == ["x", "y"]
    assert database.live_bytes == 7


def test_pieces_that_are_cleared_taken_back_or_written_anew_are_gone(database):
    written(
        database,
        facts=[("group", "a", b"1")],
        pieces=[("x", 0, b"a"), ("x", 1, b"b"), ("y", 0, b"c"), ("z", 0, b"d")],
    )
    changes = Transaction()
    changes.drop("group", "a")
    changes.clear("x")
    changes.clear("nobody")
    changes.take_back("y", 0)
    changes.take_back("y", 7)
    changes.append("z", 0, b"new")
    database.write(changes, synced=False)
    assert database.owners() == ["z"]
    assert database.pieces("x") == database.pieces("y") == {}
    assert database.pieces("z") == {0: b"new"}
    assert database.live_bytes == 3
    assert database.load() == ([], INTACT)


def test_an_owner_that_is_cleared_and_written_again_has_the_new_pieces(database):
    written(database, pieces=[("x", 0, b"a"), ("x", 1, b"b")])
    changes = Transaction()
    changes.clear("x")
    changes.append("x", 1, b"new")
    database.write(changes, synced=False)
    assert database.pieces("x") == {1: b"new"}
    assert database.live_bytes == 3


def test_sizes_are_known_after_a_restart(tmp_path, database):
    written(database, pieces=[("x", 0, b"a"), ("x", 1, b"bcd")])
    database.close()
    again = Database(tmp_path / "rows.sqlite", Disk())
    again.load()
    assert again.owners() == ["x"]
    assert again.live_bytes == 4
    again.close()


def test_a_value_that_has_changed_is_damaged_and_can_be_dropped(tmp_path, database):
    written(
        database,
        facts=[("group", "a", b"1"), ("group", "b", b"1")],
        pieces=[("x", 0, b"1"), ("x", 3, b"1"), ("y", 0, b"1")],
    )
    database._db.execute("UPDATE facts SET value = x'32' WHERE name = 'a'")
    database._db.execute("UPDATE pieces SET data = 'text' WHERE ordinal = 3")
    database._db.execute("UPDATE pieces SET crc = 1 WHERE owner = 'y'")
    database.close()
    database = Database(tmp_path / "rows.sqlite", Disk())
    facts, damaged = database.load()
    assert facts == [FactRow("group", "b", b"1")]
    assert list(damaged.facts.values()) == ["group a"]
    assert list(damaged.pieces.values()) == ["x", "y"]
    database.drop(damaged)
    assert database.load() == (facts, INTACT)
    assert database.owners() == ["x"]
    database.close()


def test_a_piece_that_changes_while_the_store_is_open_is_told(database):
    written(database, pieces=[("x", 0, b"aaaa")])
    database._db.execute("UPDATE pieces SET data = x'00'")
    with pytest.raises(PieceDamaged, match="piece 0 of 'x'"):
        database.pieces("x")


class NoCommit(Disk):
    def commit(self, database):
        raise full()


def test_a_transaction_that_fails_changes_nothing(database):
    written(database, facts=[("group", "a", b"1")], pieces=[("x", 0, b"1")])
    database._disk = NoCommit()
    with pytest.raises(sqlite3.OperationalError, match="full"):
        written(database, facts=[("group", "a", b"2")], pieces=[("x", 0, b"22")])
    assert database.pieces("x") == {0: b"1"}
    assert database.live_bytes == 1
    database._disk = Disk()
    written(database, facts=[("group", "a", b"3")])
    assert database.load()[0] == [FactRow("group", "a", b"3")]


class SlowCommit(Disk):
    """Takes until `go_on` for a commit."""

    def __init__(self):
        self.at_work, self.resume = threading.Event(), threading.Event()

    def commit(self, database):
        self.at_work.set()
        assert self.resume.wait(60)
        super().commit(database)


def test_reading_does_not_wait_for_a_write(database):
    written(database, pieces=[("x", 0, b"old")])
    database._disk = disk = SlowCommit()
    thread = threading.Thread(
        target=written, args=[database], kwargs={"pieces": [("x", 0, b"new")]}
    )
    thread.start()
    assert disk.at_work.wait(60)
    assert database.pieces("x") == {0: b"old"}
    disk.resume.set()
    thread.join()
    assert database.pieces("x") == {0: b"new"}


def test_what_is_no_database_is_told(tmp_path):
    (tmp_path / "d").write_bytes(b"no database " * 100)
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        Database(tmp_path / "d", Disk())


def test_what_is_damaged_is_told_though_it_is_no_text(tmp_path, database):
    database.close()
    path = tmp_path / "rows.sqlite"
    data = path.read_bytes()
    assert b"CREATE TABLE facts" in data
    path.write_bytes(data.replace(b"CREATE TABLE facts", b"CREATE TABLE\xecfacts"))
    with pytest.raises(sqlite3.DatabaseError, match="malformed"):
        Database(path, Disk()).load()
