"""What a run writes down: only what it was asked to, and where."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout_sched import load_policy
from rollout_sched.core.model.errors import CallerError
from rollout_sched.journal import SCHEMA, JournalHeader
from rollout_sched.live.live_scheduler import RunRecords
from rollout_sched.live.settings import RunOptions
from rollout_sched.live.trainer.samples import NamedTools
from tests.live.scripted import Scripted
from tests.live.test_stored_run import run

HEADER = JournalHeader(SCHEMA, "round_robin_sync", 1, 0, 0)


def records(**asked: Any) -> RunRecords:
    return RunRecords(RunOptions(**asked), HEADER, "off", NamedTools({}), judges=False)


def test_what_is_not_asked_for_is_not_kept() -> None:
    async def scene() -> None:
        kept = records()
        assert kept.state() == {"store": None, "journal": None, "length_history": None}
        assert (kept.run_id, kept.weights) == ("", None)
        await kept.close()

    asyncio.run(scene())


def test_each_says_where_it_is(tmp_path: Path) -> None:
    async def scene() -> None:
        kept = records(journal=tmp_path / "j", length_history=tmp_path / "l")
        assert kept.state() == {
            "store": None,
            "journal": {"path": str(tmp_path / "j"), "broken": ""},
            "length_history": {"path": str(tmp_path / "l"), "prompts": 0, "broken": ""},
        }
        await kept.close()
        with pytest.raises(CallerError, match="cannot be read"):
            records(length_history=tmp_path)

    asyncio.run(scene())


@pytest.mark.parametrize("named", [True, False])
def test_a_run_in_a_store_has_a_journal_there_unless_another_is_named(
    tmp_path: Path, named: bool
) -> None:
    folder, path = tmp_path / "store", tmp_path / "j"

    async def scene() -> None:
        async with run(folder, Scripted(), journal=path if named else None) as live:
            assert live.records.run_id == live.driver.epoch
            assert live.records.run_id.endswith("e1")
            journal = live.state()["journal"]["path"]
            assert journal == str(path if named else folder / "journal" / "00000001.jsonl")
            assert live.state()["store"]["epoch"] == 1

    asyncio.run(scene())


def test_what_was_recorded_is_read_by_the_policy_that_made_it(tmp_path: Path) -> None:
    path = tmp_path / "j"

    async def scene() -> None:
        async with run(tmp_path / "store", Scripted(), journal=path):
            pass

    asyncio.run(scene())
    assert load_policy("round_robin_sync").name.encode() in path.read_bytes().splitlines()[0]
