"""A store: what was put into it is there at the next opening, and what is damaged is told."""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing

import pytest

from rollout_sched.store.disk import Disk
from rollout_sched.store.errors import (
    PieceDamaged,
    StoreDamaged,
    StoreError,
    StoreInUse,
    StoreOfOtherFormat,
)
from rollout_sched.store.store import ROWS, TOKENS, PieceBook, Store
from rollout_sched.store.token_files import TokenFiles
from rollout_sched.store.transaction import Transaction


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
def test_what_was_put_is_there_at_the_next_opening(tmp_path, durable):
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
        with pytest.raises(StoreDamaged, match="rollout-sched store salvage"):
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


def test_tokens_without_rows_are_told(tmp_path):
    filled(tmp_path).close()
    (tmp_path / ROWS).unlink()
    with pytest.raises(StoreDamaged, match="its token files exist, but its database is missing"):
        Store(tmp_path)


def test_lost_token_files_cost_their_owners_and_nobody_else(tmp_path):
    filled(tmp_path).close()
    shutil.rmtree(tmp_path / TOKENS)
    with closing(Store(tmp_path)) as store:
        assert store.losses.owners == ["x", "y"]
        assert store.facts("group") == {"a": b"1", "b": b"2"}
        assert store.owners() == []
    with closing(Store(tmp_path)) as store:
        assert not store.losses  # it was told once


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


def test_the_disk_holds_no_more_than_twice_of_what_lives(tmp_path):
    capacity = 10_000
    with closing(Store(tmp_path, capacity=capacity, durable="off")) as store:
        for number in range(300):
            changes = Transaction()
            changes.append(
                f"keeps{number % 50}" if number % 10 == 0 else f"{number}", 0, b"x" * 997
            )
            changes.clear(f"{number - 3}")
            store.apply(changes)
            store.tidy()
            tokens = sum(p.stat().st_size for p in (tmp_path / TOKENS).iterdir())
            assert tokens <= 2 * store.live_bytes + 8 * capacity
        assert sorted(store.owners()) == sorted(
            [*(f"keeps{n}" for n in range(0, 50, 10)), "297", "298", "299"]
        )


def test_the_log_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout_sched.store.store.LOG_BYTES", 100_000)
    with closing(Store(tmp_path)) as store:
        for number in range(200):
            changes = Transaction()
            changes.put("group", "a", b"x" * 3000)
            store.apply(changes, promised=number % 20 == 0)
            store.tidy()
        assert store.disk_bytes < 400_000


# -- Which pieces there are --


@pytest.fixture
def book(tmp_path):
    files = TokenFiles(tmp_path / "tokens", Disk(), capacity=100)
    yield PieceBook(files)
    files.close()


def appended(book, *pieces):
    changes = Transaction()
    for owner, ordinal, data in pieces:
        changes.append(owner, ordinal, data)
    added = book.append(changes)
    book.note(added, book.going(changes))
    return added


def test_pieces_are_read_by_ordinal(book):
    appended(book, ("x", 2, b"c"), ("x", 0, b"a"), ("y", 0, b"other"))
    assert book.read("x") == {0: b"a", 2: b"c"}
    assert list(book.read("x")) == [0, 2]
    assert book.read("nobody") == {}
    assert sorted(book.owners()) == ["x", "y"]


def test_what_goes_is_who_is_cleared_taken_back_or_written_anew(book):
    appended(book, ("x", 0, b"a"), ("x", 1, b"b"), ("y", 0, b"c"), ("z", 0, b"d"))
    changes = Transaction()
    changes.clear("x")
    changes.take_back("y", 0)
    changes.take_back("y", 7)
    changes.append("z", 0, b"new")
    assert {(p.owner, p.ordinal) for p in book.going(changes)} == {
        ("x", 0),
        ("x", 1),
        ("y", 0),
        ("z", 0),
    }
    book.note(book.append(changes), book.going(changes))
    assert book.owners() == ["z"]
    assert book.read("z") == {0: b"new"}


def test_loading_finds_what_is_damaged(tmp_path, book):
    added = appended(book, ("x", 0, b"aaaa"), ("y", 0, b"bbbb"), ("z", 0, b"c" * 200))
    file = tmp_path / "tokens" / "00000001.tokens"
    file.write_bytes(file.read_bytes().replace(b"bbbb", b"bbxb"))
    again = PieceBook(TokenFiles(tmp_path / "tokens", Disk(), capacity=100))
    damaged = again.load([*added, added[0]._replace(owner="w")])
    assert sorted(piece.owner for piece in damaged) == ["w", "y"]
    assert sorted(again.owners()) == ["x", "z"]


def test_a_disk_that_changes_its_mind_is_told(tmp_path, book):
    appended(book, ("x", 0, b"aaaa"))
    (tmp_path / "tokens" / "00000001.tokens").write_bytes(b"aaab")
    with pytest.raises(PieceDamaged, match="piece 0 of 'x'"):
        book.read("x")


def test_what_lies_in_a_file_of_which_most_is_gone_is_to_be_moved(book):
    appended(book, *((str(n), 0, b"x" * 20) for n in range(100)))
    assert book.sparse() == []
    changes = Transaction()
    for number in range(100):
        if number % 5:
            changes.clear(str(number))
    book.note([], book.going(changes))
    (piece,) = book.sparse()
    assert piece.place.offset == 0
