"""A damaged store, made usable again with what is sound of it."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing

import pytest

from rollout_sched.cli import main
from rollout_sched.store.errors import StoreDamaged, StoreError
from rollout_sched.store.salvage import salvage
from rollout_sched.store.store import ROWS, TOKENS, Store
from rollout_sched.store.transaction import Transaction

PAGE = 4096


def filled(folder, facts=400):
    with closing(Store(folder)) as store:
        changes = Transaction()
        for number in range(facts):
            changes.put("group", f"{number}", b"x" * 500)
        for number in range(20):
            changes.append(f"owner{number}", 0, b"y" * 100)
        store.apply(changes, promised=True)


def spoil(path, at, length=PAGE):
    data = bytearray(path.read_bytes())
    data[at : at + length] = b"\xff" * length
    path.write_bytes(data)


def test_what_is_sound_is_kept(tmp_path):
    filled(tmp_path)
    size = (tmp_path / ROWS).stat().st_size
    spoil(tmp_path / ROWS, size // 2 // PAGE * PAGE)
    with pytest.raises(StoreDamaged):
        Store(tmp_path)
    found = salvage(tmp_path)
    assert 380 <= found.facts < 402
    assert found.kept_as.stat().st_size == size
    with closing(Store(tmp_path)) as store:
        facts = store.facts("group")
        assert len(facts) >= 380
        assert set(facts.values()) == {b"x" * 500}
        assert len(store.owners()) == found.pieces


def test_a_page_that_leads_back_to_one_before_is_read_once(tmp_path):
    filled(tmp_path)
    path = tmp_path / ROWS
    with closing(sqlite3.connect(path)) as rows:
        select = "SELECT rootpage FROM sqlite_master WHERE name = 'facts'"
        ((root,),) = rows.execute(select)
    data = bytearray(path.read_bytes())
    tree = (root - 1) * PAGE
    assert data[tree] == 5, "the root of a table of several pages"
    first, second = (
        tree + int.from_bytes(data[at : at + 2], "big") for at in (tree + 12, tree + 14)
    )
    data[second : second + 4] = data[first : first + 4]
    path.write_bytes(data)
    found = salvage(tmp_path)
    assert 0 < found.facts < 400
    assert found.pieces == 20


def test_where_nothing_can_be_read_that_is_said(tmp_path):
    filled(tmp_path)
    spoil(tmp_path / ROWS, 0)
    with pytest.raises(StoreError, match=r"nothing of it can be read.*move the folder away"):
        salvage(tmp_path)


def test_a_folder_that_is_no_store_is_told(tmp_path):
    with pytest.raises(StoreError, match="is this a store"):
        salvage(tmp_path)


def test_a_sound_store_loses_nothing(tmp_path):
    filled(tmp_path, facts=10)
    found = salvage(tmp_path)
    assert (found.facts, found.pieces) == (11, 20)  # and its epoch
    assert not found.losses
    with closing(Store(tmp_path)) as store:
        assert store.epoch == 3
    assert salvage(tmp_path).kept_as != found.kept_as


# -- `rollout-sched store` --


def test_salvage_says_what_is_sound_and_what_is_lost(tmp_path, capsys):
    filled(tmp_path, facts=3)
    shutil.rmtree(tmp_path / TOKENS)
    assert main(["store", "salvage", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert f"{tmp_path}: 4 facts and 20 pieces of tokens are intact" in told
    assert "damaged or missing tokens of: owner0, owner1, " in told
    assert f"kept as {tmp_path / ROWS}.damaged-1" in told


def test_what_is_no_store_is_told(tmp_path, capsys):
    assert main(["store", "salvage", str(tmp_path)]) == 2
    assert "is this a store?" in capsys.readouterr().err
