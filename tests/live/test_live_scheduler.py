"""A policy at work, with its journal."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollout_sched import journal, load_policy, parse_policy
from rollout_sched.core.model.errors import CallerError
from rollout_sched.live.durable import journal as journal_keeper
from rollout_sched.live.live_scheduler import LiveScheduler
from rollout_sched.live.settings import RunOptions
from rollout_sched.live.trainer.samples import Prompt
from tests.live.scripted import Scripted, until

POLICY = load_policy("round_robin_sync")


def test_a_policy_that_lends_to_nobody_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Borrower:
        def lent(self, instance: str) -> None: ...

        def reclaimed(self, instance: str) -> None: ...

    policy = parse_policy("mine", {"lending": {"use": "stage_fusion"}})

    async def scene() -> None:
        await LiveScheduler(policy, borrower=Borrower()).close()
        assert not caplog.records
        await LiveScheduler(policy).close()

    asyncio.run(scene())
    assert "policy mine lends instances" in caplog.text


def test_the_journal_tells_the_run_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    async def scene() -> LiveScheduler:
        live = LiveScheduler(
            POLICY, RunOptions(prompts_per_step=1, start_version=3, seed=5, journal=path)
        )
        instance = Scripted()
        await live.driver.add_instance(instance)
        live.trainer.submit([Prompt("a", [1], 2, 9)])
        asking = asyncio.create_task(live.trainer.next_batch())
        await instance.answer(0, [5])
        await instance.answer(1, [6])
        batch = await asking
        assert batch is not None
        assert batch.version == 3
        await live.close()
        return live

    live = asyncio.run(scene())
    header, entries = journal.read(path)
    assert (header.policy, header.prompts_per_step, header.version) == ("round_robin_sync", 1, 3)
    again = POLICY.scheduler(1, version=3, seed=5)
    delivered = [
        action
        for _, actions in journal.replay(again, entries)
        for action in actions
        if type(action).__name__ == "Deliver"
    ]
    assert len(delivered) == 1
    assert again.view.run.delivered == live.driver.pump.scheduler.books.progress.delivered == 1


def test_what_happened_is_on_disk_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_keeper, "SYNC_S", 0.001)
    path = tmp_path / "journal"

    async def scene() -> None:
        live = LiveScheduler(POLICY, RunOptions(prompts_per_step=1, journal=path))
        await live.driver.add_instance(Scripted())
        await until(lambda: b"InstanceJoined" in path.read_bytes())
        await live.close()

    asyncio.run(scene())


def test_a_journal_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text("what is left of a crash")

    async def scene() -> None:
        with pytest.raises(CallerError, match="exists; move it away"):
            LiveScheduler(POLICY, RunOptions(prompts_per_step=1, journal=path))

    asyncio.run(scene())
    assert path.read_text() == "what is left of a crash"


def test_a_journal_of_nothing_does_not_stay(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    async def scene() -> None:
        await LiveScheduler(POLICY, RunOptions(prompts_per_step=1, journal=path)).close()

    asyncio.run(scene())
    assert not path.exists()


def test_state() -> None:
    async def scene() -> None:
        live = LiveScheduler(POLICY, RunOptions(prompts_per_step=1))
        live.trainer.submit([Prompt("a", [1], 2, 9)])
        state = live.state()
        assert state["groups"]["fresh"] == 1
        assert (state["instances"], state["joined"], state["broken"]) == (0, 0, None)
        await live.close()

    asyncio.run(scene())
