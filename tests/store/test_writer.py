"""The thread that writes to a store."""

from __future__ import annotations

import errno
import threading
import time

import pytest

from rollout_sched.store import writer as writer_module
from rollout_sched.store.disk import Disk
from rollout_sched.store.errors import StoreBroken, StoreFull
from rollout_sched.store.store import Store
from rollout_sched.store.transaction import Transaction
from rollout_sched.store.writer import HEADROOM, StoreWriter
from tests.store.rows import facts_in
from tests.store.simulated_disk import full

#: Seconds that nothing here comes near to.
LONG_S = 60


def wait_for(condition):
    give_up = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def put(name, value=b"1"):
    changes = Transaction()
    changes.put("group", name, value)
    return changes


class TroubledDisk(Disk):
    """Fails with `error` while there is one, and says how much room there is."""

    def __init__(self):
        self.error = None
        self.free = 2**40
        self.failures = 0
        self.tried = threading.Event()

    def commit(self, database):
        if self.error is not None:
            self.failures += 1
            self.tried.set()
            raise self.error
        super().commit(database)

    def room(self, folder):
        self.tried.set()
        return self.free


@pytest.fixture
def disk():
    return TroubledDisk()


@pytest.fixture
def broken():
    return []


@pytest.fixture
def writer(tmp_path, disk, broken):
    writer = StoreWriter(Store(tmp_path / "s", disk=disk), broken.append)
    yield writer
    disk.error, disk.free = None, 2**40
    writer.close()


def reopened(writer):
    writer.close()
    return Store(writer.store.folder).facts("group")


def test_a_promise_is_kept_with_all_that_came_before(writer):
    for number in range(100):
        writer.write(put(str(number)))
    writer.promise(put("last")).result(LONG_S)
    rows = facts_in(writer.store)
    assert {fact.name for fact in rows if fact.kind == "group"} == {*map(str, range(100)), "last"}


def test_an_empty_promise_is_about_what_came_before(writer):
    writer.write(put("a"))
    writer.promise().result(LONG_S)
    assert "a" in {fact.name for fact in facts_in(writer.store)}


def test_unawaited_changes_are_written_too(tmp_path, disk):
    writer = StoreWriter(Store(tmp_path, disk=disk), print)
    writer.write(put("a"))
    assert reopened(writer) == {"a": b"1"}


def test_a_full_disk_takes_no_new_work_and_finishes_the_old(writer, disk, monkeypatch):
    monkeypatch.setattr(writer_module, "AGAIN_S", 0.01)
    disk.error = full()
    promise = writer.promise(put("a"))
    assert disk.tried.wait(LONG_S)
    wait_for(lambda: writer.full)
    with pytest.raises(StoreFull, match=r"disk is full \(.*is full.*no new prompts"):
        writer.check_room()
    assert not promise.done()
    writer.write(put("b"))
    disk.error = None
    promise.result(LONG_S)
    writer.promise().result(LONG_S)
    wait_for(lambda: not writer.full)
    writer.check_room()
    assert reopened(writer) == {"a": b"1", "b": b"1"}


def test_a_promise_that_a_full_disk_has_not_kept_is_not_kept_by_the_next_try(
    writer, disk, monkeypatch
):
    """There is nothing to write then, but to have on the disk what was written before."""
    monkeypatch.setattr(writer_module, "AGAIN_S", 0.01)
    writer.write(put("a"))
    wait_for(disk.tried.is_set)  # it looks for room when all is written
    disk.error = full()
    promise = writer.promise()
    wait_for(lambda: disk.failures > 1 or promise.done())
    assert not promise.done()
    disk.error = None
    promise.result(LONG_S)


def test_little_room_is_as_none_for_new_work_only(writer, disk, monkeypatch):
    monkeypatch.setattr(writer_module, "AGAIN_S", 0.01)
    disk.free = HEADROOM - 1
    writer.promise(put("a")).result(LONG_S)
    wait_for(lambda: writer.full)
    with pytest.raises(StoreFull, match=f"{HEADROOM - 1} bytes are free"):
        writer.check_room()
    writer.promise(put("b")).result(LONG_S)
    disk.free = HEADROOM
    wait_for(lambda: not writer.full)
    writer.check_room()


def test_work_that_the_disk_does_not_keep_up_with_is_not_added_to(writer, monkeypatch):
    monkeypatch.setattr(writer_module, "MAX_WAITING", -1)
    with pytest.raises(StoreFull, match="does not keep up"):
        writer.check_room()


def test_a_broken_disk_is_told_to_all_who_were_promised_something(writer, disk, broken):
    disk.error = OSError(errno.EIO, "Input/output error")
    promise = writer.promise(put("a"))
    with pytest.raises(StoreBroken, match=r"Input/output error.*restart on the same store"):
        promise.result(LONG_S)
    with pytest.raises(StoreBroken):
        writer.promise(put("b")).result(LONG_S)
    with pytest.raises(StoreBroken):
        writer.check_room()
    writer.write(put("c"))  # goes nowhere
    writer._thread.join(LONG_S)
    assert broken == [writer.broken]


def test_changes_lost_to_a_full_disk_at_the_end_are_reported(tmp_path, disk):
    writer = StoreWriter(Store(tmp_path, disk=disk), print)
    disk.error = full()
    promise = writer.promise(put("a"))
    assert disk.tried.wait(LONG_S)
    writer.close()
    with pytest.raises(StoreBroken, match="the disk is full"):
        promise.result(LONG_S)


def test_a_disk_that_breaks_at_the_end_is_told_once(tmp_path, monkeypatch, broken):
    """Who was promised something was told twice, which ended the thread with an error."""
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    at_work, go_on = threading.Event(), threading.Event()

    class BreaksLater(TroubledDisk):
        armed = False

        def commit(self, database):
            super().commit(database)
            if self.armed:
                at_work.set()
                assert go_on.wait(LONG_S)
                self.error = OSError(errno.EIO, "broken")

    disk = BreaksLater()
    writer = StoreWriter(Store(tmp_path / "s", disk=disk), broken.append)
    disk.armed = True
    first = writer.promise(put("a"))
    assert at_work.wait(LONG_S)
    second = writer.promise(put("b"))
    closing = threading.Thread(target=writer.close)
    closing.start()
    wait_for(lambda: writer._closing)
    go_on.set()
    closing.join(LONG_S)
    assert first.exception(LONG_S) is None
    with pytest.raises(StoreBroken, match="cannot be written"):
        second.result(LONG_S)
    assert not raised
    assert broken == [writer.broken]


def test_a_promise_that_was_cancelled_hurts_nobody(writer):
    gone, kept = writer.promise(put("a")), writer.promise(put("b"))
    gone.cancel()
    kept.result(LONG_S)
    assert writer.broken is None


def test_a_closed_store_answers_every_promise(tmp_path):
    """Whoever is cancelled while it closes may still ask, and must not wait for ever."""
    writer = StoreWriter(Store(tmp_path), print)
    writer.close()
    with pytest.raises(StoreBroken, match="was closed"):
        writer.promise().result(LONG_S)
