"""A disk that fails ends the journal, not the rollouts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollout_sched.core.events import Woke
from rollout_sched.journal import SCHEMA, Header
from rollout_sched.live.journal_keeper import JournalKeeper

HEADER = Header(SCHEMA, "p", 1)


def test_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        keeper = JournalKeeper(tmp_path / "journal", HEADER)
        keeper.observe(0.0, Woke(), [])

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(keeper._writer, "record", full)
            keeper.observe(1.0, Woke(), [])
        keeper.observe(2.0, Woke(), [])
        assert keeper.broken
        keeper.close()

    asyncio.run(scene())
    assert "No space left" in caplog.text
    assert len((tmp_path / "journal").read_text().splitlines()) == 2
