"""A store: what was put into it is there at the next opening, and what is damaged is told."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing

import pytest

from rollout_sched.store.database import LOG_PAGES, PAGE
from rollout_sched.store.errors import (
    StoreDamaged,
    StoreError,
    StoreInUse,
    StoreOfOtherFormat,
)
from rollout_sched.store.store import ROWS, Store
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
