"""`rollout-sched store`."""

from __future__ import annotations

import shutil

from rollout_sched.cli import main
from rollout_sched.store.store import ROWS, TOKENS
from tests.store.test_salvage import filled


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
