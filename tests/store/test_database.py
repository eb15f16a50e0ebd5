"""The rows of a store."""

from __future__ import annotations

import sqlite3

import pytest

from rollout_sched.store.database import FORMAT, Database, FactRow, PieceRow, Write
from rollout_sched.store.disk import Disk
from rollout_sched.store.token_files import PiecePlace

PIECE = PieceRow("x", 3, PiecePlace(1, 20, 300), 4000)


@pytest.fixture
def database(tmp_path):
    database = Database(tmp_path / "rows.sqlite", Disk())
    database.begin_anew()
    yield database
    database.close()


def wrote(database, *, facts=(), pieces=(), synced=True):
    write = Write()
    for fact in facts:
        write.put_fact(fact)
    write.put_pieces(pieces)
    database.write(write, synced=synced)


@pytest.mark.parametrize("synced", [True, False, None])
def test_rows_are_read_as_they_were_put(database, synced):
    wrote(database, facts=[FactRow("group", "a", b"1")], pieces=[PIECE], synced=synced)
    wrote(database, facts=[FactRow("group", "a", b"2")], pieces=[PIECE._replace(crc=1)])
    assert database.facts() == ([FactRow("group", "a", b"2")], {})
    assert database.pieces() == ([PIECE._replace(crc=1)], {})
    assert database.format == FORMAT
    assert database.problem() == ""


def test_rows_go(database):
    wrote(database, facts=[FactRow("group", "a", b"1")], pieces=[PIECE])
    write = Write()
    write.drop_fact("group", "a")
    write.drop_pieces([PIECE])
    database.write(write, synced=False)
    assert database.facts() == database.pieces() == ([], {})


def test_a_value_that_has_changed_is_damaged_and_can_be_dropped(database):
    wrote(
        database, facts=[FactRow("group", "a", b"1"), FactRow("group", "b", b"1")], pieces=[PIECE]
    )
    database._db.execute("UPDATE facts SET value = x'32' WHERE name = 'a'")
    database._db.execute("UPDATE pieces SET start = 'here'")
    facts, spoilt_facts = database.facts()
    pieces, spoilt_pieces = database.pieces()
    assert facts == [FactRow("group", "b", b"1")]
    assert list(spoilt_facts.values()) == ["group a"]
    assert pieces == []
    assert list(spoilt_pieces.values()) == ["x 3"]
    write = Write()
    write.drop_rows(spoilt_facts, spoilt_pieces)
    database.write(write, synced=True)
    assert database.facts() == (facts, {})
    assert database.pieces() == ([], {})


class NoCommit(Disk):
    def commit(self, database):
        raise OSError(28, "No space left on device")


def test_a_transaction_that_fails_changes_nothing(tmp_path, database):
    wrote(database, facts=[FactRow("group", "a", b"1")])
    database._disk = NoCommit()
    with pytest.raises(OSError, match="No space"):
        wrote(database, facts=[FactRow("group", "a", b"2")])
    assert database.facts() == ([FactRow("group", "a", b"1")], {})
    database._disk = Disk()
    wrote(database, facts=[FactRow("group", "a", b"3")])
    assert database.facts() == ([FactRow("group", "a", b"3")], {})


def test_a_checkpoint_lets_the_log_begin_anew(database):
    wrote(database, facts=[FactRow("group", str(n), b"x" * 1000) for n in range(100)])
    before = database.log_bytes()
    database.checkpoint()
    wrote(database, facts=[FactRow("group", str(n), b"y" * 1000) for n in range(50)])
    assert database.log_bytes() == before
    assert len(database.facts()[0]) == 100


def test_what_is_no_database_is_told(tmp_path):
    (tmp_path / "d").write_bytes(b"no database " * 100)
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        Database(tmp_path / "d", Disk())


def test_what_is_damaged_is_told_though_it_is_no_text(tmp_path, database):
    database.checkpoint()
    database.close()
    path = tmp_path / "rows.sqlite"
    data = path.read_bytes()
    assert b"CREATE TABLE facts" in data
    path.write_bytes(data.replace(b"CREATE TABLE facts", b"CREATE TABLE\xecfacts"))
    with pytest.raises(sqlite3.DatabaseError, match="malformed"):
        Database(path, Disk()).check_tables()
