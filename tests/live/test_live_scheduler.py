"""A policy at work, with its journal."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout_sched import journal
from rollout_sched.config import load_policy, parse_policy
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.events import (
    BatchRequested,
    InstanceLost,
    RequestFinished,
    SubmissionsClosed,
    WeightsPublished,
)
from rollout_sched.core.state.groups import HERE
from rollout_sched.journal import SCHEMA, JournalHeader
from rollout_sched.live import live_scheduler as wait_reasons
from rollout_sched.live.live_scheduler import LiveScheduler, RunRecords, scheduler_state
from rollout_sched.live.settings import RunOptions
from rollout_sched.live.trainer.samples import NamedTools, Prompt
from tests.core.told import Told
from tests.live.durable.test_run import run
from tests.live.scripted import Scripted, until
from tests.live.trainer.test_session import Stage, load, prompt

POLICY = load_policy("round_robin_sync")


async def test_a_policy_that_lends_to_nobody_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Borrower:
        def lent(self, instance: str) -> None: ...

        def reclaimed(self, instance: str) -> None: ...

    policy = parse_policy("mine", {"lending": {"use": "stage_fusion"}})

    await LiveScheduler(policy, borrower=Borrower()).close()
    assert not caplog.records
    await LiveScheduler(policy).close()
    assert "policy mine lends instances" in caplog.text


async def test_the_journal_tells_the_run_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"

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
    assert batch.version == 3
    await live.close()
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
    assert again.view.run.delivered == live.driver.pump.scheduler.state.progress.delivered == 1


async def test_a_journal_of_nothing_does_not_stay(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    await LiveScheduler(POLICY, RunOptions(prompts_per_step=1, journal=path)).close()
    assert not path.exists()


async def test_state() -> None:
    live = LiveScheduler(POLICY, RunOptions(prompts_per_step=1))
    live.trainer.submit([Prompt("a", [1], 2, 9)])
    state = live.state()
    assert state["groups"]["fresh"] == 1
    assert (state["instances"], state["joined"], state["broken"]) == (0, 0, None)
    await live.close()


def test_queues_and_groups() -> None:
    told = Told(2, slots=1)
    told.submit("a", "b", "c")
    told(BatchRequested())
    state = scheduler_state(told.scheduler.view)
    assert state["requests"] == {"in_flight": 1, "waiting": 1, "parked": 0}
    assert set(state["groups"]) == {*map(str, HERE), "delivered"}
    assert (state["groups"]["active"], state["groups"]["fresh"]) == (2, 1)
    assert (state["prompts_per_step"], state["trainer_waiting"], state["joined"]) == (2, True, 1)


def test_progress_of_a_run() -> None:
    told = Told()
    told.submit("a")
    told(BatchRequested(), RequestFinished("a/0", 1, 5))
    told(WeightsPublished(1), SubmissionsClosed(), InstanceLost("nobody"))
    state = scheduler_state(told.scheduler.view)
    assert (state["batches"], state["in_batch"], state["groups"]["delivered"]) == (1, 0, 1)
    assert (state["version"], state["closed"]) == (1, True)
    assert state["anomalies"] == {"unknown_instance": 1}


HEADER = JournalHeader(SCHEMA, "round_robin_sync", 1, 0, 0)


def records(**asked: Any) -> RunRecords:
    return RunRecords(RunOptions(**asked), HEADER, "off", NamedTools({}), judges=False)


async def test_no_records_by_default() -> None:
    kept = records()
    assert kept.state() == {"store": None, "journal": None, "length_history": None}
    assert (kept.run_id, kept.weights) == ("", None)
    await kept.close()


async def test_records_say_where_they_are(tmp_path: Path) -> None:
    kept = records(journal=tmp_path / "j", length_history=tmp_path / "l")
    assert kept.state() == {
        "store": None,
        "journal": {"path": str(tmp_path / "j"), "broken": ""},
        "length_history": {"path": str(tmp_path / "l"), "prompts": 0, "broken": ""},
    }
    await kept.close()
    with pytest.raises(CallerError, match="cannot be read"):
        records(length_history=tmp_path)


@pytest.mark.parametrize("named", [True, False])
async def test_a_run_in_a_store_has_a_journal_there_unless_another_is_named(
    tmp_path: Path, named: bool
) -> None:
    folder, path = tmp_path / "store", tmp_path / "j"
    async with run(folder, Scripted(), journal=path if named else None) as live:
        assert live.records.run_id == live.driver.epoch
        assert live.records.run_id.endswith("e1")
        written = live.state()["journal"]["path"]
        assert written == str(path if named else folder / "journal" / "00000001.jsonl")
        assert live.state()["store"]["epoch"] == 1
        live.trainer.submit([Prompt("a", [1], 2, 9)])
    async with run(folder, Scripted(), journal=path if named else None) as live:
        assert live.state()["store"]["epoch"] == 2
    if named:
        for epoch in (path, tmp_path / "j.1"):
            assert list(journal.read(epoch)[1]), "each can be read by itself"


async def test_wait_reason_names_instances_that_have_not_joined() -> None:
    async with Stage() as stage:
        assert wait_reasons.weights(stage.driver) == ""
        stage.driver.fleet.lose("i0", "it was restarted")
        assert wait_reasons.batch(stage.driver).startswith("no instance has joined: i0")
        assert wait_reasons.weights(stage.driver) == wait_reasons.batch(stage.driver)
        await stage.driver.remove_instance("i0")
        assert "add_instance" in wait_reasons.batch(stage.driver)


async def test_wait_reason_names_missing_prompts() -> None:
    async with Stage(prompts_per_step=2) as stage:
        stage.trainer.submit([prompt("a")])
        asking = stage.ask()
        await asyncio.sleep(0)
        said = wait_reasons.batch(stage.driver)
        assert said.startswith("a batch needs 2 groups, 1 are here")
        assert said.endswith("more prompts, or close_submissions()")
        stage.trainer.submit([prompt("b")])
        await stage.instance.order(1)
        assert wait_reasons.batch(stage.driver) == "", "it is being made"
        await stage.instance.answer(0, [7])
        await stage.instance.answer(1, [7])
        await asking
        stage.trainer.close_submissions()
        assert wait_reasons.batch(stage.driver) == "", "nothing is left"


async def test_wait_reason_names_missing_weights() -> None:
    async with Stage() as stage:
        stage.trainer.submit([prompt("a")])
        asking = stage.ask()
        await stage.instance.answer(0, [7])
        await asking
        assert "weights after version 0" in wait_reasons.batch(stage.driver)
        await stage.trainer.weights.publish(1, load, wait=True)
        assert wait_reasons.weights(stage.driver) == ""


async def test_wait_reason_names_a_hanging_tool() -> None:
    async def tool(trajectory: Any) -> None:
        await asyncio.Event().wait()

    async with Stage() as stage:
        stage.trainer.submit([prompt("a")], tool)
        asking = stage.ask()
        await stage.instance.answer(0, [7])
        await until(lambda: len(stage.driver.front.tools) == 1)
        assert wait_reasons.batch(stage.driver) == "tools of 1 trajectories have not returned"
        asking.cancel()
