"""A disk that fails ends the journal, not the rollouts, and leaves whole lines."""

from __future__ import annotations

import asyncio
import gzip
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from rollout_sched import journal
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.events import RequestWithdrawn, Woke
from rollout_sched.journal import SCHEMA, JournalHeader
from rollout_sched.live.durable import journal as journal_keeper
from rollout_sched.live.durable.journal import JournalRecorder
from tests import virtual_net
from tests.live.scripted import until

HEADER = JournalHeader(SCHEMA, "p", 1)


class FullDisk:
    """Takes so many bytes more of a file, and then none."""

    def __init__(self, file: Any, room: int) -> None:
        self._file = file
        self._room = room

    def write(self, data: memoryview) -> int:
        if not self._room:
            raise OSError(28, "No space left on device")
        written: int = self._file.write(data[: self._room])
        self._room -= written
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_keeper, "SYNC_S", 0.001)


def fill_up(keeper: JournalRecorder, room: int) -> None:
    file: Any = keeper._file
    file._file = FullDisk(file._file, room)


async def test_full_disk_leaves_a_readable_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"

    keeper = JournalRecorder(path, HEADER)
    keeper.observe(0.0, Woke(), [])
    await until(lambda: path.stat().st_size)
    fill_up(keeper, 60)  # a line and a half
    for now in (1.0, 2.0, 3.0):
        keeper.observe(now, Woke(), [])
    await until(lambda: keeper.broken)
    keeper.observe(4.0, Woke(), [])
    await keeper.close()
    assert "No space left" in keeper.broken
    assert "No space left" in caplog.text
    assert str(path) in caplog.text
    assert path.read_bytes().endswith(b"}\n")
    _, entries = journal.read(path)
    assert [entry.now for entry in entries] == [0.0, 1.0]


async def test_an_event_after_a_quiet_time_reaches_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    keeper = JournalRecorder(path, HEADER)
    await until(lambda: path.stat().st_size)
    await asyncio.sleep(1.0)
    keeper.observe(1.0, Woke(), [])
    await until(lambda: b"Woke" in path.read_bytes())
    await keeper.close()


def test_a_disk_that_is_full_at_the_end(tmp_path: Path) -> None:
    async def scene() -> JournalRecorder:
        keeper = JournalRecorder(tmp_path / "journal", HEADER)
        fill_up(keeper, 0)
        keeper.observe(0.0, Woke(), [])
        await keeper.close()
        return keeper

    assert "No space left" in virtual_net.run(scene()).broken


def test_a_slow_disk_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    awake = threading.Event()
    sync = os.fsync

    def slow(number: int) -> None:
        assert awake.wait(10)
        sync(number)

    async def scene() -> None:
        keeper = JournalRecorder(path, HEADER)
        monkeypatch.setattr(os, "fsync", slow)
        keeper.observe(0.0, Woke(), [])
        await until(lambda: keeper._writing)
        keeper.observe(1.0, Woke(), [])
        closing = asyncio.create_task(keeper.close())
        await asyncio.sleep(0.05)  # the loop turns
        assert not closing.done()
        awake.set()
        await closing
        assert not keeper.broken

    asyncio.run(scene())
    _, entries = journal.read(path)
    assert [entry.now for entry in entries] == [0.0, 1.0]


def test_a_disk_that_hangs_ends_the_journal_but_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_keeper, "CLOSE_S", 0.05)
    awake = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: awake.wait(10))

    async def scene() -> None:
        keeper = JournalRecorder(tmp_path / "journal", HEADER)
        keeper.observe(0.0, Woke(), [])
        await keeper.close()
        assert "within 0.05 s" in keeper.broken
        awake.set()

    asyncio.run(scene())
    assert "ends here" in caplog.text


async def test_unwritten_entries_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_keeper, "MAX_WAITING_BYTES", 1000)
    keeper = JournalRecorder(tmp_path / "journal", HEADER)
    for now in range(100):
        keeper.observe(float(now), Woke(), [])
    assert "does not keep up" in keeper.broken
    await keeper.close()


async def test_an_event_that_cannot_be_written_ends_it_too(tmp_path: Path) -> None:
    """What comes after a hole cannot be told again."""
    path = tmp_path / "journal"

    keeper = JournalRecorder(path, HEADER)
    keeper.observe(0.0, Woke(), [])
    await until(lambda: path.stat().st_size)
    keeper.observe(1.0, RequestWithdrawn("\ud800"), [])
    keeper.observe(2.0, Woke(), [])
    assert keeper.broken
    await keeper.close()
    _, entries = journal.read(path)
    assert [entry.now for entry in entries] == [0.0]


async def test_nothing_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text("precious")

    with pytest.raises(CallerError, match="exists; move it away"):
        JournalRecorder(path, HEADER)
    assert path.read_text() == "precious"


def bounded(path: Path, bound: int) -> Path:
    """Two hundred events."""

    async def scene() -> None:
        keeper = JournalRecorder(path, HEADER, bound=bound)
        for number in range(200):
            keeper.observe(float(number), RequestWithdrawn("x" * 50), [])
            await until(lambda: not keeper._pending, 60)
        await keeper.close()
        assert not keeper.broken

    virtual_net.run(scene())
    return path


def test_a_bounded_journal_goes_on_in_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_keeper, "SYNC_S", 0.001)
    path = bounded(tmp_path / "journal", bound=12_000)
    full = gzip.decompress((tmp_path / "journal.1.gz").read_bytes())
    assert len(full) > 12_000
    header, entries = journal.read(path)
    assert header == HEADER
    assert [entry.now for entry in entries] == [float(number) for number in range(200)]
    (tmp_path / "journal.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert len(list(journal.read(tmp_path / "journal.gz")[1])) == 200
    (tmp_path / "journal.1").write_bytes(full)  # as while it is compressed
    assert len(list(journal.read(path)[1])) == 200


def test_bounded_journal_keeps_two_files_and_marks_a_late_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_keeper, "SYNC_S", 0.001)
    path = bounded(tmp_path / "journal", bound=1000)
    assert sum(part.stat().st_size for part in tmp_path.iterdir()) < 4000
    header, entries = journal.read(path)
    assert header.part == journal.read(tmp_path / "journal.1.gz")[0].part > 0
    times = [entry.now for entry in entries]
    assert times == [float(number) for number in range(200 - len(times), 200)]


def test_a_full_file_that_cannot_be_compressed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_keeper, "SYNC_S", 0.001)
    (tmp_path / "journal.1.gz.part").mkdir()  # in the way
    path = bounded(tmp_path / "journal", bound=12_000)
    assert "compressing it failed" in caplog.text
    assert len(list(journal.read(path)[1])) == 200
