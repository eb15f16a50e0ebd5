"""A run that outlives its process: what was promised is there, what was under way goes on."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest

from rollout_sched import journal, load_policy
from rollout_sched.inspection import recorded_trace
from rollout_sched.inspection.recording import Recording
from rollout_sched.live.durable import run as stored_run
from rollout_sched.live.live_scheduler import LiveScheduler
from rollout_sched.live.ports import Description, InstanceError, RequestRejected
from rollout_sched.live.settings import RunOptions, Settings
from rollout_sched.live.trainer import records as facts
from rollout_sched.live.trainer.delivery import LeaseEnded, NotReady
from rollout_sched.live.trainer.samples import Batch, Prompt
from rollout_sched.simulators.traces import Turn
from rollout_sched.store.errors import StoreBroken, StoreFull
from rollout_sched.store.store import ROWS, Store
from rollout_sched.store.transaction import Transaction
from tests.live.scripted import Scripted, until

SYNC = load_policy("round_robin_sync")
SETTINGS = Settings(poll_s=0.01, stream_s=0.001)
PROMPT = Prompt("a", [1, 2], 1, 9, {"logprobs": 0})


@asynccontextmanager
async def run(
    folder: Path, *instances: Scripted, policy=SYNC, **options
) -> AsyncIterator[LiveScheduler]:
    options = {"prompts_per_step": 1, "stream_every": 1, **options}
    tools, lease_s = options.pop("tools", None), options.pop("lease_s", 0.0)
    reward = options.pop("reward", None)
    settings = msgspec.structs.replace(SETTINGS, lease_s=lease_s)
    run = RunOptions(store=folder, **options)
    live = LiveScheduler(policy, run, settings=settings, tools=tools, reward=reward)
    try:
        for instance in instances:
            await live.driver.add_instance(instance)
        yield live
    finally:
        await live.close()


async def killed(live: LiveScheduler, to: Path) -> Path:
    """What a process leaves that is killed now."""
    await live.trainer.durable()
    shutil.copytree(live.records.stored.store.folder, to)
    return to


async def batch_of(live: LiveScheduler, acknowledged: int | None = None) -> Batch:
    async with asyncio.timeout(30):
        batch = await live.trainer.next_batch(acknowledged)
    assert batch is not None
    return batch


async def test_running_request_continues_from_its_last_piece(tmp_path):
    before, after = Scripted(), Scripted()
    async with run(tmp_path / "1", before) as live:
        live.trainer.submit([PROMPT])
        with pytest.raises(NotReady):
            await live.trainer.next_batch(timeout_s=0)
        now = live.driver.pump.now
        await before.stream(0, [5])
        await before.stream(0, [6])
        (running,) = live.driver.front.attempts.on("i0")
        await until(lambda: running.known_tokens == 2)
        left = await killed(live, tmp_path / "2")
    async with run(left, after) as live:
        assert live.state()["store"]["epoch"] == 2
        assert live.driver.pump.now >= now
        order = await after.order(0)
        assert order.token_ids == [1, 2, 5, 6]
        assert order.id not in before.orders
        await after.answer(0, [7])
        batch = await batch_of(live)
        (sample,) = batch.samples
        assert sample.response_ids == [5, 6, 7]
        assert sample.rollout_log_probs == [-0.5] * 3
        assert sample.num_interruptions == 1
        await until(lambda: ("abort", next(iter(before.orders))) in after.calls)
        assert not live.state()["anomalies"]


async def test_delivered_batch_is_repeated_until_acknowledged(tmp_path):
    before, after = Scripted(), Scripted()
    async with run(tmp_path / "1", before) as live:
        live.trainer.submit([PROMPT, Prompt("b", [3], 1, 9)])
        asking = asyncio.create_task(batch_of(live))
        await before.answer(0, [5, 6])
        first = await asking
        left = await killed(live, tmp_path / "2")
    async with run(left, after) as live:
        assert await batch_of(live) == first
        live.trainer.submit([PROMPT])  # by a trainer that does not know it has arrived
        assert live.trainer.submissions.open_samples == 1
        asking = asyncio.create_task(batch_of(live, first.number))
        await after.answer(0, [7])
        second = await asking
        assert (second.number, second.samples[0].uid) == (1, "b")
        left = await killed(live, tmp_path / "3")
    async with run(left) as live:
        assert live.state()["store"]["epoch"] == 3
        assert await batch_of(live, first.number) == second
        with pytest.raises(NotReady):
            await live.trainer.next_batch(second.number, timeout_s=0)
        left = await killed(live, tmp_path / "4")
    async with run(left) as live:
        with pytest.raises(NotReady):
            await live.trainer.next_batch(second.number, timeout_s=0)
        assert live.records.stored.store.live_bytes == 0


async def test_a_group_that_fails_again_is_reported_again_after_restarts(tmp_path):
    """The second restart forgot the later failure: nothing would have come of the group."""
    instance = Scripted()
    async with run(tmp_path / "1", instance) as live:
        live.trainer.submit([PROMPT, Prompt("b", [3], 1, 9)])
        asking = asyncio.create_task(batch_of(live))
        await instance.fail(0, RequestRejected("no"))
        await instance.answer(1, [6])
        assert [group.uid for group in (await asking).failed] == ["a"]
        live.trainer.submissions.fail("a", ValueError("not again"))
        left = await killed(live, tmp_path / "2")
    for restart in range(3, 5):
        async with run(left) as live:
            assert live.trainer.submissions.summary()["failed"] == {"a": "ValueError: not again"}
            left = await killed(live, tmp_path / f"{restart}")


async def test_finished_siblings_wait_for_their_group(tmp_path):
    before, after = Scripted(), Scripted()
    async with run(tmp_path / "1", before) as live:
        live.trainer.submit([Prompt("a", [1], 2, 9)])
        with pytest.raises(NotReady):
            await live.trainer.next_batch(timeout_s=0)
        await before.answer(0, [5])
        await until(lambda: live.driver.view.in_flight == 1)
        left = await killed(live, tmp_path / "2")
    async with run(left, after) as live:
        await after.answer(0, [6])
        batch = await batch_of(live)
        assert [sample.response_ids for sample in batch.samples] == [[5], [6]]
        assert len(after.orders) == 1


async def test_submissions_stay_closed_and_the_end_comes(tmp_path):
    before, after = Scripted(), Scripted()
    async with run(tmp_path / "1", before) as live:
        live.trainer.submit([PROMPT])
        live.trainer.close_submissions()
        left = await killed(live, tmp_path / "2")
    async with run(left, after) as live:
        asking = asyncio.create_task(batch_of(live))
        await after.answer(0, [5])
        batch = await asking
        assert await live.trainer.next_batch(batch.number) is None


async def test_weights_are_loaded_by_the_next_run(tmp_path):
    loaded = []

    async def load(client, version):
        loaded.append((client.name, version))

    before, after = Scripted(), Scripted()
    async with run(tmp_path / "1", before) as live:
        await live.trainer.weights.publish(3, load, encoded=b"how")
        await until(lambda: ("version", 3) in before.calls)
        left = await killed(live, tmp_path / "2")
    async with run(left) as live:
        assert live.trainer.weights.newest == 3
        assert live.records.stored.weights.version == 3
        assert live.records.stored.weights.loader == b"how"
        live.driver.restore_weights(load)
        await live.driver.add_instance(after)  # which has older ones
        await until(lambda: ("version", 3) in after.calls)
    assert loaded == [("i0", 3), ("i0", 3)]


async def test_an_instance_that_was_being_updated_is_not_left_paused(tmp_path):
    async def never(client, version):
        await asyncio.Event().wait()

    before, after = Scripted(), Scripted()
    async with run(tmp_path / "1", before, policy=load_policy("areal")) as live:
        live.trainer.submit([PROMPT])
        await before.order(0)
        await live.trainer.weights.publish(1, never, encoded=b"how")
        await until(lambda: any("pause" in call for call in before.calls))
        left = await killed(live, tmp_path / "2")
    after.description = Description(
        8, 10_000, 10_000, capabilities=frozenset({"pause"}), paused=True
    )
    async with run(left, policy=load_policy("areal")) as live:
        live.driver.restore_weights(never)
        assert await live.driver.add_instance(after, patient=True) is not None
        assert "resume" in after.calls


async def test_a_run_goes_on_with_the_model_that_it_began_with(tmp_path):
    """A restarted gateway took any, and a sample had tokens of two."""

    def serving(model):
        instance = Scripted()
        instance.describes(model=model)
        return instance

    async with run(tmp_path / "1", serving("m")) as live:
        unused = await killed(live, tmp_path / "2")
        live.trainer.submit([PROMPT])
        left = await killed(live, tmp_path / "3")
    async with run(left) as live:
        with pytest.raises(InstanceError, match="serves other, but the samples of this run"):
            await live.driver.add_instance(serving("other"))
        assert await live.driver.add_instance(serving("m")) is not None
    async with run(unused) as live:
        assert await live.driver.add_instance(serving("other")) is not None


async def test_an_instance_that_was_to_be_resumed_is_not_left_paused(tmp_path):
    """The process went between that order and its being carried out: the next one took the pause
    for somebody else's."""

    async def load(client, version): ...

    before, after = Scripted(), Scripted()
    resuming = asyncio.Event()

    async def never_resumes():
        resuming.set()
        await asyncio.Event().wait()

    before.resume = never_resumes
    async with run(tmp_path / "1", before, policy=load_policy("areal")) as live:
        live.trainer.submit([PROMPT])
        await before.order(0)
        await live.trainer.weights.publish(1, load, encoded=b"how")
        await resuming.wait()
        left = await killed(live, tmp_path / "2")
    after.description = Description(
        8, 10_000, 10_000, capabilities=frozenset({"pause"}), paused=True, version=1
    )
    async with run(left, policy=load_policy("areal")) as live:
        live.driver.restore_weights(load)
        assert await live.driver.add_instance(after, patient=True) is not None
        assert "resume" in after.calls
        rest = await killed(live, tmp_path / "3")
    async with run(rest, policy=load_policy("areal")) as live:
        with pytest.raises(InstanceError, match="not by us"):
            await live.driver.add_instance(after)


async def test_batch_of_failures_keeps_its_trainer_after_a_restart(tmp_path):
    """A batch that only tells of lost groups went to another trainer while the first one had it."""
    instance = Scripted()
    async with run(tmp_path / "1", instance, lease_s=1000.0) as live:
        live.trainer.submit([PROMPT])
        live.trainer.close_submissions()
        asking = asyncio.ensure_future(live.trainer.next_batch(trainer="one"))
        await instance.fail(0, RequestRejected("too long"))
        told = await asking
        assert [group.uid for group in told.failed] == ["a"]
        left = await killed(live, tmp_path / "2")
    async with run(left, Scripted(), lease_s=1000.0) as live:
        with pytest.raises(NotReady):
            await live.trainer.next_batch(timeout_s=0, trainer="other")
        assert await live.trainer.next_batch(trainer="one") == told
        assert await live.trainer.next_batch(told.number, trainer="one") is None
        assert await live.trainer.next_batch(trainer="other") is None
        rest = await killed(live, tmp_path / "3")
    async with run(rest) as live:
        assert await live.trainer.next_batch() is None


async def test_a_trajectory_without_its_tool_fails_with_the_reason(tmp_path):
    async def tool(trajectory):
        await asyncio.Event().wait()

    before, after = Scripted(), Scripted()
    async with run(tmp_path / "1", before) as live:
        live.trainer.submit([PROMPT], tool)
        with pytest.raises(NotReady):
            await live.trainer.next_batch(timeout_s=0)
        await before.answer(0, [5])
        await until(lambda: len(live.driver.front.tools) == 1)
        left = await killed(live, tmp_path / "2")
    for _ in range(2):  # until that is acknowledged
        async with run(left, after) as live:
            live.trainer.submit([Prompt("b", [3], 1, 9)])
            asking = asyncio.create_task(batch_of(live))
            await after.answer(0, [7])
            batch = await asking
            (failed,) = batch.failed
            assert failed.uid == "a"
            assert "its tool was lost with its process" in failed.reason
            left = await killed(live, tmp_path / f"{left.name}+")
        after = Scripted()
        break
    async with run(left, after) as live:
        again = await batch_of(live)
        assert again == batch


async def test_a_finished_trajectory_without_its_tool_does_not_start_over(tmp_path):
    """It is whole and needs no tool, until new weights come for which it is too old."""
    finished = asyncio.Event()

    async def tool(trajectory):
        finished.set()

    async def load(client, version): ...

    before, after = Scripted(), Scripted()
    async with run(tmp_path / "1", before, prompts_per_step=2) as live:
        live.trainer.submit([PROMPT], tool)
        live.trainer.submit([Prompt("b", [3], 1, 9)])
        with pytest.raises(NotReady):
            await live.trainer.next_batch(timeout_s=0)
        await before.answer(0, [5])
        await finished.wait()
        await until(lambda: not live.driver.front.tools)
        left = await killed(live, tmp_path / "2")
    async with run(left, after, prompts_per_step=2) as live:
        order = await after.order(0)
        assert order.token_ids == [3]
        await live.trainer.weights.publish(1, load, encoded=b"how")
        await after.fail(0, InstanceError("aborted"))
        live.trainer.close_submissions()
        asking = asyncio.create_task(batch_of(live))
        for number in (1, 2):
            await after.answer(number, [7])
        batch = await asking
        assert [sample.uid for sample in batch.samples] == ["b"]
        (failed,) = batch.failed
        assert failed.uid == "a"
        assert "its tool was lost with its process" in failed.reason


async def test_waiting_trainer_hears_that_only_a_failure_is_left(tmp_path):
    async def tool(trajectory):
        await asyncio.Event().wait()

    before = Scripted()
    async with run(tmp_path / "1", before) as live:
        live.trainer.submit([PROMPT], tool)
        live.trainer.close_submissions()
        with pytest.raises(NotReady):
            await live.trainer.next_batch(timeout_s=0)
        await before.answer(0, [5])
        await until(lambda: len(live.driver.front.tools) == 1)
        left = await killed(live, tmp_path / "2")
    async with run(left, Scripted()) as live:
        batch = await batch_of(live)
        assert [group.uid for group in batch.failed] == ["a"]
        assert await live.trainer.next_batch(batch.number) is None


@pytest.mark.parametrize("at_work", [True, False])
async def test_a_trajectory_whose_tool_is_given_again_goes_on_from_its_turns(tmp_path, at_work):
    """Killed while the tool works, or while the turn after it is made."""
    calls = []

    async def tool(trajectory):
        calls.append((trajectory.turn, trajectory.turn_ids, list(trajectory.response_ids)))
        if trajectory.turn == 1 and at_work and len(calls) == 1:
            await asyncio.Event().wait()
        return [100] if trajectory.turn == 1 else None

    before, after = Scripted(), Scripted()
    tools = {"search": tool}
    async with run(tmp_path / "1", before, tools=tools) as live:
        live.trainer.submit([PROMPT], tool)
        with pytest.raises(NotReady):
            await live.trainer.next_batch(timeout_s=0)
        await before.answer(0, [5])
        if at_work:
            await until(lambda: len(live.driver.front.tools) == 1)
        else:
            await before.stream(1, [6])
            (running,) = live.driver.front.attempts.on("i0")
            await until(lambda: running.known_tokens)
        left = await killed(live, tmp_path / "2")
    async with run(left, after, tools=tools) as live:
        order = await after.order(0)
        assert order.token_ids == [1, 2, 5, 100, *([] if at_work else [6])]
        await after.answer(0, [7])
        batch = await batch_of(live)
        assert not live.state()["anomalies"]
    (sample,) = batch.samples
    assert sample.response_ids == [5, 100, *([] if at_work else [6]), 7]
    assert sample.response_mask == [1, 0, *([] if at_work else [1]), 1]
    assert [turn for turn, *_ in calls] == ([1, 1, 2] if at_work else [1, 2])
    assert calls[-1][1:] == ([*order.token_ids[4:], 7], sample.response_ids)


async def test_a_batch_stays_its_trainers_over_a_restart(tmp_path):
    before = Scripted()
    async with run(tmp_path / "1", before, lease_s=600.0) as live:
        live.trainer.submit([PROMPT, Prompt("b", [3], 1, 9)])
        asking = [
            asyncio.create_task(live.trainer.next_batch(trainer=name)) for name in ("t1", "t2")
        ]
        for number in range(2):
            await before.answer(number, [7])
        first, second = await asyncio.gather(*asking)
        with pytest.raises(NotReady):  # acknowledged out of turn
            await live.trainer.next_batch(second.number, 0, trainer="t2")
        left = await killed(live, tmp_path / "2")
    async with run(left, lease_s=600.0) as live:
        assert [(one["batch"], one["trainer"]) for one in live.state()["leases"]] == [(0, "t1")]
        with pytest.raises(NotReady):
            await live.trainer.next_batch(second.number, 0, trainer="t2")
        assert await live.trainer.next_batch(timeout_s=0, trainer="t1") == first
        left = await killed(live, tmp_path / "3")
    async with run(left, lease_s=0.001) as live:
        await asyncio.sleep(0.002)  # t1 is not heard of any more
        assert await live.trainer.next_batch(trainer="t2") == first
        left = await killed(live, tmp_path / "4")
    async with run(left, lease_s=600.0) as live:
        with pytest.raises(LeaseEnded, match="trainer 't2' has it now"):
            await live.trainer.next_batch(first.number, 0, trainer="t1")
        with pytest.raises(NotReady):
            await live.trainer.next_batch(first.number, 0, trainer="t2")
        left = await killed(live, tmp_path / "5")
    async with run(left, lease_s=600.0) as live:
        with pytest.raises(LeaseEnded, match="trainer 't2' has acknowledged it"):
            await live.trainer.next_batch(first.number, 0, trainer="t1")
        assert live.records.stored.store.live_bytes == 0


def spoil(store: Path, token: int) -> None:
    """Damage the pieces that have this token."""
    held, gone = token.to_bytes(4, "little"), bytes(4)
    with closing(sqlite3.connect(store / ROWS)) as rows, rows:
        pieces = [row for row in rows.execute("SELECT data, id FROM pieces") if held in row[0]]
        assert pieces
        changed = [(data.replace(held, gone), id) for data, id in pieces]
        rows.executemany("UPDATE pieces SET data = ? WHERE id = ?", changed)


def assert_nothing_is_left(folder: Path) -> None:
    """Of the work of a run that is over."""
    store = Store(folder)
    try:
        for kind in (facts.GROUP, facts.PROMPT, facts.DELIVERED, facts.LOST, facts.REWARD):
            assert not store.facts(kind)
        assert not store.owners()
    finally:
        store.close()


async def test_damaged_tokens_cost_their_group_a_start_and_nobody_else(tmp_path):
    before, after = Scripted(slots=2), Scripted(slots=2)
    async with run(tmp_path / "1", before, prompts_per_step=2) as live:
        live.trainer.submit([PROMPT, Prompt("b", [3], 1, 9)])
        with pytest.raises(NotReady):
            await live.trainer.next_batch(timeout_s=0)
        await before.stream(0, [77])
        await before.stream(1, [88])
        attempts = live.driver.front.attempts.on("i0")
        await until(lambda: all(running.known_tokens for running in attempts))
        left = await killed(live, tmp_path / "2")
    spoil(left, 77)
    async with run(left, after, prompts_per_step=2) as live:
        assert live.state()["store"]["lost"] == ["damaged tokens of: r:a/0"]
        contexts = [(await after.order(n)).token_ids for n in range(2)]
        assert sorted(contexts) == [[1, 2], [3, 88]]
        for number, context in enumerate(contexts):
            await after.answer(number, [len(context)])
        batch = await batch_of(live)
        assert {s.uid: s.response_ids for s in batch.samples} == {"a": [2], "b": [88, 2]}


async def test_a_damaged_delivery_names_what_is_to_be_submitted_again(tmp_path):
    before, after = Scripted(), Scripted()
    async with run(tmp_path / "1", before) as live:
        live.trainer.submit([PROMPT])
        asking = asyncio.create_task(batch_of(live))
        await before.answer(0, [77])
        await asking
        left = await killed(live, tmp_path / "2")
    spoil(left, 77)
    async with run(left) as live:
        batch = await batch_of(live)
        assert batch.samples == []
        (failed,) = batch.failed
        assert failed.uid == "a"
        assert "submit it again" in failed.reason
        left = await killed(live, tmp_path / "3")
    async with run(left, after) as live:
        live.trainer.submit([PROMPT])
        asking = asyncio.create_task(batch_of(live, batch.number))
        await after.answer(0, [78])
        again = await asking
        assert [sample.response_ids for sample in again.samples] == [[78]]
        live.trainer.close_submissions()
        assert await live.trainer.next_batch(again.number) is None
    assert_nothing_is_left(left)


async def test_each_loss_of_a_group_is_told_with_its_batch_over_two_restarts(tmp_path):
    """It has failed, was submitted again, delivered, and damaged on the disk."""
    before = Scripted()
    async with run(tmp_path / "1", before) as live:
        asking = {
            name: asyncio.create_task(live.trainer.next_batch(trainer=name))
            for name in ("t1", "t2")
        }
        live.trainer.submit([PROMPT])
        await before.fail(0, RequestRejected("too long"))
        await until(lambda: live.trainer.submissions.lost)
        live.trainer.submit([Prompt("b", [3], 1, 9)])
        await before.answer(1, [66])
        live.trainer.submit([PROMPT])
        await before.answer(2, [77])
        batches = await asyncio.gather(*asking.values())
        assert [[s.uid for s in batch.samples] for batch in batches] == [["b"], ["a"]]
        assert [[g.uid for g in batch.failed] for batch in batches] == [["a"], []]
        left = await killed(live, tmp_path / "2")
    spoil(left, 77)
    for life in ("3", "4"):
        async with run(left) as live:
            asked = [await live.trainer.next_batch(trainer=name) for name in asking]
            assert [[g.uid for g in batch.failed] for batch in asked] == [["a"], ["a"]], life
            left = await killed(live, tmp_path / life)
    async with run(left) as live:
        live.trainer.close_submissions()
        for name, batch in zip(asking, asked, strict=True):
            with contextlib.suppress(NotReady):
                await live.trainer.next_batch(batch.number, timeout_s=0, trainer=name)
    assert_nothing_is_left(left)


async def test_damaged_delivery_is_reported_after_the_end(tmp_path):
    """Under a number that no batch had: who has acknowledged that one hears of this, too."""
    before = Scripted()
    async with run(tmp_path / "1", before) as live:
        live.trainer.submit([Prompt("b", [3], 1, 9), Prompt("c", [4], 1, 9), PROMPT])
        asking = asyncio.create_task(live.trainer.next_batch(trainer="t1"))
        await before.fail(0, RequestRejected("too long"))
        await before.fail(1, RequestRejected("too long"))
        await before.answer(2, [77])
        first = await asking
        assert [group.uid for group in first.failed] == ["b", "c"]
        live.trainer.submit([Prompt("d", [5], 1, 9)])
        live.trainer.close_submissions()
        asking = asyncio.create_task(live.trainer.next_batch(trainer="t2"))
        await before.fail(3, RequestRejected("too long"))
        second = await asking
        assert [group.uid for group in second.failed] == ["d"]
        assert await live.trainer.next_batch(second.number, trainer="t2") is None
        left = await killed(live, tmp_path / "2")
    store = Store(left)
    gone = Transaction()
    gone.drop(facts.DELIVERED, f"{first.number}.0")
    store.apply(gone)
    store.close()
    async with run(left) as live:
        third = await live.trainer.next_batch(second.number, trainer="t2")
        assert third.number > second.number
        assert sorted(group.uid for group in third.failed) == ["a", "b", "c"]
        assert await live.trainer.next_batch(third.number, trainer="t2") is None
    assert_nothing_is_left(left)


async def test_damaged_delivery_leaves_no_rows(tmp_path):
    """Its prompt, its tokens and its rewards: nobody acknowledges them any more."""

    async def worth(sample):
        return 1.0

    before = Scripted()
    async with run(tmp_path / "1", before, reward=worth) as live:
        live.trainer.submit([PROMPT])
        asking = asyncio.create_task(batch_of(live))
        await before.answer(0, [77])
        await asking
        left = await killed(live, tmp_path / "2")
    spoil(left, 77)
    async with run(left, reward=worth) as live:
        batch = await batch_of(live)
        live.trainer.close_submissions()
        assert await live.trainer.next_batch(batch.number) is None
    assert_nothing_is_left(left)


async def test_the_journal_of_an_epoch_replays_by_itself(tmp_path):
    before, after = Scripted(), Scripted()
    async with run(tmp_path / "1", before) as live:
        live.trainer.submit([PROMPT])
        with pytest.raises(NotReady):
            await live.trainer.next_batch(timeout_s=0)
        await before.stream(0, [5])
        (running,) = live.driver.front.attempts.on("i0")
        await until(lambda: running.known_tokens)
        left = await killed(live, tmp_path / "2")
    async with run(left, after) as live:
        await after.answer(0, [7])
        await batch_of(live)
    _, entries = journal.read(left / "journal" / "00000002.jsonl")
    again = SYNC.scheduler(1)
    for _ in journal.replay(again, entries):
        pass
    again.check_invariants()
    assert again.view.run.delivered == live.driver.view.run.delivered == 1
    trace, lacks = recorded_trace("run", [Recording(left / "journal" / "00000002.jsonl")])
    [sample] = trace.samples()
    assert (sample.turns, sample.finish, lacks) == ((Turn(2),), "stop", [])


async def test_journals_of_long_ago_go(tmp_path):
    for _ in range(stored_run.JOURNALS + 3):
        async with run(tmp_path) as live:
            live.trainer.close_submissions()
    kept = sorted(path.name for path in (tmp_path / "journal").iterdir())
    assert len(kept) == stored_run.JOURNALS + 1
    assert kept[-1] == f"{stored_run.JOURNALS + 3:08d}.jsonl"


async def test_a_full_disk_refuses_new_prompts_with_the_reason(tmp_path):
    async with run(tmp_path / "1") as live:
        live.records.stored.keeper.writer.full = "the disk is full"
        with pytest.raises(StoreFull, match="the disk is full"):
            live.trainer.submit([PROMPT])
        live.records.stored.keeper.writer.full = ""
        live.trainer.submit([PROMPT])


async def test_broken_disk_breaks_the_scheduler_and_its_waiters(tmp_path, monkeypatch):
    instance = Scripted()
    async with run(tmp_path / "1", instance) as live:

        def fail(database):
            raise OSError(5, "Input/output error")

        live.trainer.submit([PROMPT])
        asking = asyncio.create_task(live.trainer.next_batch())
        await instance.order(0)
        monkeypatch.setattr(live.records.stored.store.disk, "commit", fail)
        await instance.answer(0, [5])
        with pytest.raises(StoreBroken, match="restart on the same store"):
            await asyncio.wait_for(asking, 30)
        assert live.state()["broken"]
        monkeypatch.undo()
