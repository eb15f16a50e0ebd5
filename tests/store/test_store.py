"""A store: what was put into it is there at the next opening, and what is damaged is told."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from contextlib import closing

import pytest

from rollout_sched.store.disk import Disk
from rollout_sched.store.errors import (
    PieceDamaged,
    StoreBehind,
    StoreDamaged,
    StoreError,
    StoreInUse,
    StoreOfOtherFormat,
)
from rollout_sched.store.store import LOG_PAGES, PAGE, ROWS, Store
from rollout_sched.store.transaction import Transaction
from tests.store.rows import facts_in
from tests.store.simulated_disk import full


def filled(folder, **given):
    store = Store(folder, **given)
    changes = Transaction()
    changes.put("group", "a", b"1")
    changes.put("group", "b", b"2")
    changes.append("x", 0, b"one")
    changes.append("x", 1, b"two")
    changes.append("y", 0, b"three" * 100)
    store.apply(changes, promised=True)
    return store


@pytest.mark.parametrize("durable", ["batch", "event", "off"])
def test_rows_are_there_at_the_next_opening(tmp_path, durable):
    filled(tmp_path / "s", durable=durable).close()
    with closing(Store(tmp_path / "s", durable=durable)) as store:
        assert store.epoch == 2
        assert not store.losses
        assert store.facts("group") == {"a": b"1", "b": b"2"}
        assert store.facts("group") == {}  # nobody needs to remember them
        assert sorted(store.owners()) == ["x", "y"]
        assert store.pieces("x") == {0: b"one", 1: b"two"}
        assert store.pieces("y") == {0: b"three" * 100}


def test_every_opening_is_an_epoch(tmp_path):
    for epoch in (1, 2, 3):
        with closing(Store(tmp_path)) as store:
            assert store.epoch == epoch


def test_one_process_at_a_time(tmp_path):
    with closing(Store(tmp_path)), pytest.raises(StoreInUse):
        Store(tmp_path)


def test_a_store_that_cannot_be_opened_is_not_held(tmp_path):
    filled(tmp_path).close()
    (tmp_path / ROWS).write_bytes(b"no database " * 1000)
    for _ in range(2):
        with pytest.raises(StoreDamaged, match="put a copy of the folder in its place"):
            Store(tmp_path)


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="choose a writable folder"):
        Store(tmp_path / "file")


def test_another_format_is_refused_with_what_to_do(tmp_path):
    Store(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / ROWS)) as rows:
        rows.execute("PRAGMA user_version = 7")
    with pytest.raises(StoreOfOtherFormat, match=r"has format 7.*with the version that wrote it"):
        Store(tmp_path)


def test_tokens_that_have_changed_cost_their_owner_and_nobody_else(tmp_path):
    filled(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / ROWS)) as rows:
        rows.execute("UPDATE pieces SET data = x'00' WHERE owner = 'x' AND ordinal = 1")
        rows.commit()
    with closing(Store(tmp_path)) as store:
        assert store.losses.owners == ["x"]
        assert store.losses.summary() == ["damaged tokens of: x"]
        assert store.facts("group") == {"a": b"1", "b": b"2"}
        assert store.pieces("x") == {0: b"one"}
        assert store.pieces("y") == {0: b"three" * 100}
    with closing(Store(tmp_path)) as store:
        assert not store.losses  # they were reported once


@pytest.mark.parametrize("which", [0, 1])
def test_a_key_that_has_changed_is_damage(tmp_path, which):
    """So lost tokens are never reported as those of another owner."""
    with closing(Store(tmp_path)) as store:
        changes = Transaction()
        changes.append("an owner", 0, b"tokens")
        store.apply(changes, promised=True)
    parts = (tmp_path / ROWS).read_bytes().split(b"an owner")
    assert len(parts) == 3, "in the table and in its index"
    keys = [b"an owner", b"an owner"]
    keys[which] = b"no owner"
    (tmp_path / ROWS).write_bytes(parts[0] + keys[0] + parts[1] + keys[1] + parts[2])
    with pytest.raises(StoreDamaged, match="index"):
        Store(tmp_path)


def test_a_fact_that_has_changed_is_lost_and_named(tmp_path):
    filled(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / ROWS)) as rows:
        rows.execute("UPDATE facts SET value = x'00' WHERE name = 'a'")
        rows.commit()
    with closing(Store(tmp_path)) as store:
        assert store.losses.facts == ["group a"]
        assert store.facts("group") == {"b": b"2"}


def test_a_lost_epoch_is_followed_by_one_that_was_never_there(tmp_path):
    filled(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / ROWS)) as rows:
        rows.execute("UPDATE facts SET value = x'00' WHERE kind = 'store'")
        rows.commit()
    before = int(time.time())
    with closing(Store(tmp_path)) as store:
        epoch = store.epoch
    assert epoch > before
    with closing(Store(tmp_path)) as store:
        assert store.epoch == epoch + 1


class AfterPower(Disk):
    """Of a machine that has started again."""

    def boot(self):
        return "the next"


def without_its_log(folder, to, **given):
    """What is left of a store after its process was killed and its log was removed."""
    filled(folder, **given).close()
    with closing(Store(folder, **given)) as store:
        written(store, facts=[("group", "c", b"3")])
        shutil.copytree(folder, to)
    (to / f"{ROWS}-wal").unlink()
    return to


def test_a_store_without_transactions_that_it_had_is_refused_until_it_is_salvaged(tmp_path):
    left = without_its_log(tmp_path / "s", tmp_path / "left")
    for _ in range(2):
        with pytest.raises(
            StoreBehind, match=r"transactions 3 to 4, written after .*`rollout-sched salvage"
        ):
            Store(left)
    with closing(Store(left, salvage=True)) as store:
        (line,) = store.losses.summary()
        assert line.startswith("lost transactions: lacks transactions 3 to 4")
    with closing(Store(left)) as store:
        assert not store.losses
        assert store.epoch == 3, "no number comes twice, though the second one was lost"
        assert store.facts("group") == {"a": b"1", "b": b"2"}


@pytest.mark.parametrize("durable", ["batch", "off"])
def test_a_loss_of_power_may_cost_what_was_not_synced_and_no_more(tmp_path, durable):
    left = without_its_log(tmp_path / "s", tmp_path / "left", durable=durable)
    if durable == "batch":
        with pytest.raises(StoreBehind):
            Store(left, disk=AfterPower())
        return
    with pytest.raises(StoreBehind):  # the machine has not stopped
        Store(left, durable="off")
    with closing(Store(left, durable="off", disk=AfterPower())) as store:
        assert store.losses.summary()[0].startswith("lost transactions: transactions 3 to 4")
        assert store.epoch == 3


def test_a_store_that_never_synced_may_lack_more_than_its_mark_knows(tmp_path):
    with closing(Store(tmp_path / "s", durable="off")):
        shutil.copytree(tmp_path / "s", tmp_path / "left")
    with closing(Store(tmp_path / "left", disk=AfterPower())) as store:
        assert "durable off" in store.losses.summary()[0]
    with closing(Store(tmp_path / "s", disk=AfterPower())) as store:
        assert not store.losses, "it was closed, which syncs it"


@pytest.mark.parametrize("mark", [None, b"", b"x" * 100, b"0" * 256])
def test_a_store_without_its_mark_is_refused_until_it_is_salvaged(tmp_path, mark):
    filled(tmp_path).close()
    (tmp_path / "mark").unlink()
    if mark is not None:
        (tmp_path / "mark").write_bytes(mark)
    with pytest.raises(StoreBehind, match="has lost its mark"):
        Store(tmp_path)
    Store(tmp_path, salvage=True).close()
    with closing(Store(tmp_path)) as store:
        assert store.epoch == 2


@pytest.mark.parametrize("damaged", ["nobody", "b"])
def test_rows_of_several_transactions_are_refused_until_they_are_salvaged(tmp_path, damaged):
    """As a checkpoint leaves them that was interrupted, if its log is gone."""
    filled(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / ROWS)) as rows, rows:
        rows.execute("UPDATE facts SET value = x'00' WHERE name = ?", (damaged,))
        rows.execute("DROP TRIGGER facts_DEL")
        rows.execute("DELETE FROM facts WHERE name = 'a'")
    for _ in range(2):
        with pytest.raises(StoreBehind, match="mixes rows"):
            Store(tmp_path)
    with closing(Store(tmp_path, salvage=True)) as store:
        assert store.losses.facts == ["group b"] * (damaged == "b")
    with closing(Store(tmp_path)) as store:
        assert store.facts("group") == ({} if damaged == "b" else {"b": b"2"})


@pytest.mark.parametrize(
    "number", ["'three'", "-1", "NULL", str(2**62), "2, at = 1e308", "2, at = 9e999"]
)
def test_a_store_whose_number_cannot_be_read_is_refused_until_it_is_salvaged(tmp_path, number):
    filled(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / ROWS)) as rows, rows:
        rows.execute(f"UPDATE content SET number = {number}")
    with pytest.raises(StoreBehind):
        Store(tmp_path)
    Store(tmp_path, salvage=True).close()
    with closing(Store(tmp_path)) as store:
        assert store.facts("group") == {"a": b"1", "b": b"2"}


def test_the_file_shrinks_when_most_of_it_is_unused(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout_sched.store.store.SPARE", 10 * PAGE)
    monkeypatch.setattr("rollout_sched.store.store.SHRUNK_AT_ONCE", 50 * PAGE)
    store = Store(tmp_path, durable="off")
    changes = Transaction()
    for number in range(400):
        changes.append(f"{number}", 0, b"%d" % number * PAGE)
    store.apply(changes)
    gone = Transaction()
    for number in set(range(400)) - set(range(0, 400, 10)):
        gone.clear(f"{number}")
    store.apply(gone)
    for _ in range(100):
        store.tidy()
    store.close()
    assert (tmp_path / ROWS).stat().st_size <= 2 * store.live_bytes + 50 * PAGE
    with closing(Store(tmp_path)) as store:
        assert sorted(store.owners()) == sorted(f"{n}" for n in range(0, 400, 10))
        assert store.pieces("390") == {0: b"390" * PAGE}


def test_the_log_is_bounded(tmp_path):
    with closing(Store(tmp_path, durable="off")) as store:
        for _ in range(12):
            changes = Transaction()
            changes.append("x", 0, bytes(LOG_PAGES * PAGE // 4))
            store.apply(changes)
        assert store.disk_bytes < 2.5 * LOG_PAGES * PAGE


def written(store, *, facts=(), pieces=()):
    changes = Transaction()
    for fact in facts:
        changes.put(*fact)
    for piece in pieces:
        changes.append(*piece)
    store.apply(changes, promised=True)


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    yield store
    store.close()


def test_pieces_are_read_by_ordinal(store):
    written(store, pieces=[("x", 2, b"c"), ("x", 0, b"a"), ("y", 0, b"other")])
    assert list(store.pieces("x").items()) == [(0, b"a"), (2, b"c")]
    assert store.heads("y", 2) == {0: b"ot"}
    assert store.pieces("nobody") == {}
    assert store.live_bytes == 7


def test_what_is_cleared_taken_back_or_written_anew_is_gone(tmp_path):
    store = Store(tmp_path)
    written(
        store,
        facts=[("group", "a", b"1"), ("group", "b", b"1")],
        pieces=[("x", 0, b"a"), ("x", 1, b"b"), ("y", 0, b"c"), ("z", 0, b"d"), ("v", 0, b"e")],
    )
    changes = Transaction()
    changes.drop("group", "a")
    changes.put("group", "b", b"2")
    changes.clear("x")
    changes.clear("nobody")
    changes.take_back("y", 0)
    changes.take_back("y", 7)
    changes.append("z", 0, b"new")
    changes.clear("v")
    changes.append("v", 1, b"also new")
    store.apply(changes)
    assert sorted(store.owners()) == ["v", "z"]
    assert store.pieces("x") == store.pieces("y") == {}
    assert (store.pieces("z"), store.pieces("v")) == ({0: b"new"}, {1: b"also new"})
    assert store.live_bytes == 11
    store.close()
    with closing(Store(tmp_path)) as again:
        assert again.facts("group") == {"b": b"2"}
        assert sorted(again.owners()) == ["v", "z"]
        assert again.live_bytes == 11


@pytest.mark.parametrize(
    "change", ["SET data = 'text' WHERE ordinal = 3", "SET crc = 1 WHERE owner = 'x'"]
)
def test_a_piece_of_another_type_or_checksum_is_damaged(tmp_path, change):
    store = Store(tmp_path)
    written(store, pieces=[("x", 3, b"1")])
    store._db.execute(f"UPDATE pieces {change}")
    store.close()
    with closing(Store(tmp_path)) as again:
        assert again.losses.owners == ["x"]
        assert again.owners() == []


def test_a_piece_that_changes_while_the_store_is_open_is_told(store):
    written(store, pieces=[("x", 0, b"aaaa")])
    store._db.execute("UPDATE pieces SET data = x'00'")
    with pytest.raises(PieceDamaged, match="piece 0 of 'x'"):
        store.pieces("x")


class NoCommit(Disk):
    def commit(self, database):
        raise full()


def test_a_transaction_that_fails_changes_nothing(store):
    written(store, facts=[("group", "a", b"1")], pieces=[("x", 0, b"1")])
    store.disk = NoCommit()
    with pytest.raises(sqlite3.OperationalError, match="full"):
        written(store, facts=[("group", "a", b"2")], pieces=[("x", 0, b"22")])
    assert store.pieces("x") == {0: b"1"}
    assert store.live_bytes == 1
    store.disk = Disk()
    written(store, facts=[("group", "a", b"3")])
    assert ("group", "a", b"3") in facts_in(store)


class SlowCommit(Disk):
    """Takes until `resume` for a commit."""

    def __init__(self):
        self.at_work, self.resume = threading.Event(), threading.Event()

    def commit(self, database):
        self.at_work.set()
        assert self.resume.wait(60)
        super().commit(database)


def test_reading_does_not_wait_for_a_write(store):
    written(store, pieces=[("x", 0, b"old")])
    store.disk = disk = SlowCommit()
    thread = threading.Thread(target=written, args=[store], kwargs={"pieces": [("x", 0, b"new")]})
    thread.start()
    assert disk.at_work.wait(60)
    assert store.pieces("x") == {0: b"old"}
    disk.resume.set()
    thread.join()
    assert store.pieces("x") == {0: b"new"}


def test_damage_is_reported_even_in_bytes_that_are_no_text(tmp_path):
    Store(tmp_path).close()
    path = tmp_path / ROWS
    data = path.read_bytes()
    assert b"CREATE TABLE facts" in data
    path.write_bytes(data.replace(b"CREATE TABLE facts", b"CREATE TABLE\xecfacts"))
    with pytest.raises(StoreDamaged, match="malformed"):
        Store(tmp_path)
