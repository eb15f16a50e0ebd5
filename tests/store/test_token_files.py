"""Files of tokens: written over where nothing lives, and bounded."""

from __future__ import annotations

import pytest

from rollout_sched.store.disk import Disk
from rollout_sched.store.errors import PieceDamaged
from rollout_sched.store.token_files import SPARE, TokenFiles


@pytest.fixture
def files(tmp_path):
    files = TokenFiles(tmp_path / "tokens", Disk(), capacity=100)
    yield files
    files.close()


def names(files):
    return sorted(path.name for path in files._folder.iterdir())


def test_pieces_are_read_where_they_were_put(files):
    pieces = [bytes([n]) * (n + 30) for n in range(20)]
    places = files.append(pieces)
    assert [files.read(place) for place in places] == pieces
    assert files.live_bytes == files.disk_bytes == sum(map(len, pieces))
    assert max(place.file for place in places) > 3


def test_a_file_in_which_nothing_lives_is_written_over_once_that_is_settled(files):
    first = files.append([b"a" * 100])
    second = files.append([b"b" * 100])
    files.forget(first)
    assert files.unsettled_bytes == 100
    assert files.append([b"c" * 100])[0].file == 3
    files.settled()
    assert files.unsettled_bytes == 0
    assert files.append([b"d" * 100])[0].file == first[0].file
    assert files.read(second[0]) == b"b" * 100


def test_the_disk_holds_twice_of_what_lives_and_some_spare(files):
    places = [files.append([b"x" * 100])[0] for _ in range(40)]
    files.forget(places[:39])
    files.settled()
    assert files.disk_bytes <= 2 * files.live_bytes + SPARE * 100
    assert len(names(files)) <= SPARE + 2


def test_the_sparsest_file_is_to_be_moved_where_little_lives_in_much(files):
    places = files.append([b"x" * 25] * 80)
    assert files.sparsest() is None
    files.forget(place for place in places if place.offset or place.file == 7)
    assert files.sparsest() is not None
    assert files.sparsest() != places[-1].file  # which is appended to


def test_what_is_not_there_is_damaged(files):
    (place,) = files.append([b"abc"])
    for wrong in (place._replace(length=4), place._replace(offset=1), place._replace(file=9)):
        with pytest.raises(PieceDamaged):
            files.read(wrong)
    assert len(names(files)) == 1


def test_what_was_there_is_taken_up(tmp_path, files):
    places = files.append([b"x" * 100, b"y" * 100, b"z" * 100])
    again = TokenFiles(tmp_path / "tokens", Disk(), capacity=100)
    again.take_up([places[1]])
    assert again.live_bytes == 100
    assert again.read(places[1]) == b"y" * 100
    assert again.append([b"n" * 100])[0].file == places[0].file
    again.close()


class FullOnce(Disk):
    full = True

    def write(self, file, buffers, offset):
        if self.full:
            raise OSError(28, "No space left on device")
        super().write(file, buffers, offset)


def test_after_an_error_nothing_of_it_lives(tmp_path):
    disk = FullOnce()
    files = TokenFiles(tmp_path / "tokens", disk, capacity=100)
    for _ in range(5):
        with pytest.raises(OSError, match="No space"):
            files.append([b"x" * 60, b"y" * 60])
    assert files.live_bytes == 0
    disk.full = False
    assert [place.offset for place in files.append([b"x" * 60, b"y" * 60])] == [0, 60]
    files.close()
