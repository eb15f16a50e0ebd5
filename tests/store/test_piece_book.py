"""Which pieces there are."""

from __future__ import annotations

import pytest

from rollout_sched.store.disk import Disk
from rollout_sched.store.errors import PieceDamaged
from rollout_sched.store.store import PieceBook
from rollout_sched.store.token_files import TokenFiles
from rollout_sched.store.transaction import Transaction


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
