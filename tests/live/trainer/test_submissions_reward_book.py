"""The rewards of a trainer's samples: from the function to the batch, over failures and deaths."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_sched import journal
from rollout_sched.config import load_policy, parse_policy
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.model import GroupState
from rollout_sched.live.live_scheduler import LiveScheduler
from rollout_sched.live.ports import InstanceError
from rollout_sched.live.settings import RunOptions, Settings
from rollout_sched.live.trainer import records as facts
from rollout_sched.live.trainer.samples import Batch, Prompt, Sample
from rollout_sched.store.store import Store
from tests.live.scripted import Scripted, until

SYNC = load_policy("round_robin_sync")
SETTINGS = Settings(poll_s=0.01)


def prompt(uid: str = "a", samples: int = 2, **other: Any) -> Prompt:
    return Prompt(uid, [1, 2], samples, 9, {"logprobs": 0}, **other)


class Grader:
    """A reward function that a test answers, or by the first token."""

    def __init__(self, worth: Callable[[Sample], Any] | None = None) -> None:
        self.worth = worth
        self.seen: list[Sample] = []
        self.waiting: dict[tuple[str, int], asyncio.Future[Any]] = {}

    async def __call__(self, sample: Sample) -> Any:
        self.seen.append(sample)
        if self.worth is not None:
            return self.worth(sample)
        answer = asyncio.get_running_loop().create_future()
        self.waiting[sample.uid, sample.index] = answer
        return await answer

    async def answer(self, uid: str, index: int, worth: Any) -> None:
        await until(lambda: (uid, index) in self.waiting)
        self.waiting[uid, index].set_result(worth)


def first_token(sample: Sample) -> float:
    return float(sample.response_ids[0])


@asynccontextmanager
async def run(
    instance: Scripted,
    grader: Any,
    *,
    keep: Any = None,
    policy: Any = SYNC,
    store: Path | None = None,
    **options: Any,
) -> AsyncIterator[LiveScheduler]:
    options = {"prompts_per_step": 1, "store": store, **options}
    live = LiveScheduler(policy, RunOptions(**options), settings=SETTINGS, reward=grader, keep=keep)
    try:
        await live.driver.add_instance(instance)
        yield live
    finally:
        await live.close()


async def batch_of(live: LiveScheduler, acknowledged: int | None = None) -> Batch:
    batch = await live.trainer.next_batch(acknowledged)
    assert batch is not None
    return batch


def rewards(batch: Batch) -> dict[tuple[str, int], float | None]:
    return {(sample.uid, sample.index): sample.reward for sample in batch.samples}


async def test_a_sample_brings_its_reward() -> None:
    instance = Scripted()
    grader = Grader(lambda sample: {"answer": sample.response_ids[0], "format": 0.5})
    async with run(instance, grader) as live:
        live.trainer.submit([prompt(extra={"solution": 42})])
        asking = asyncio.create_task(batch_of(live))
        await instance.answer(0, [7, 8])
        await instance.answer(1, [9], "length")
        batch = await asking
        assert rewards(batch) == {("a", 0): 7.5, ("a", 1): 9.5}
        assert batch.samples[0].rewards == {"answer": 7.0, "format": 0.5}
        seen = {sample.index: sample for sample in grader.seen}
        assert (seen[0].response_ids, seen[0].extra) == ([7, 8], {"solution": 42})
        assert (seen[1].status, seen[1].reward) == ("TRUNCATED", None)


async def test_sample_is_judged_before_its_group_is_complete_without_a_slot() -> None:
    instance, grader = Scripted(slots=1), Grader()
    async with run(instance, grader) as live:
        live.trainer.submit([prompt()])
        asking = asyncio.create_task(batch_of(live))
        await instance.answer(0, [7])
        await until(lambda: ("a", 0) in grader.waiting)
        await instance.answer(1, [8])  # has the slot
        await until(lambda: ("a", 1) in grader.waiting)
        assert live.state()["groups"]["judging"] == 1
        assert live.state()["waits_for"]["batch"] == "rewards of 1 groups are not computed yet"
        assert not asking.done()
        await grader.answer("a", 1, 2)
        await grader.answer("a", 0, 1)
        assert rewards(await asking) == {("a", 0): 1.0, ("a", 1): 2.0}


async def test_filtered_group_is_replaced_and_named() -> None:
    instance = Scripted()
    async with run(instance, Grader(first_token), keep="nonzero_variance") as live:
        live.trainer.submit([prompt(uid) for uid in "abc"])
        asking = asyncio.create_task(batch_of(live))
        for number, token in enumerate([5, 5, 1, 2]):
            await instance.answer(number, [token])
        batch = await asking
        assert rewards(batch) == {("b", 0): 1.0, ("b", 1): 2.0}
        assert (batch.filtered, batch.failed, batch.missing) == (["a"], [], 0)
        assert len(instance.orders) == 4, "by exactly one group"
        assert live.trainer.submissions.open_samples == 2


async def test_last_batch_is_short_with_a_note() -> None:
    instance = Scripted()
    options = {"keep": "nonzero_variance", "prompts_per_step": 2}
    async with run(instance, Grader(first_token), **options) as live:
        live.trainer.submit([prompt("a"), prompt("b")])
        live.trainer.close_submissions()
        asking = asyncio.create_task(batch_of(live))
        for number, token in enumerate([5, 5, 1, 2]):
            await instance.answer(number, [token])
        batch = await asking
        assert (list(batch.groups()), batch.filtered, batch.missing) == (["b"], ["a"], 1)
        assert await live.trainer.next_batch(batch.number) is None


async def test_end_names_the_filtered_groups() -> None:
    instance = Scripted()
    async with run(instance, Grader(first_token), keep="nonzero_variance") as live:
        live.trainer.submit([prompt("a")])
        live.trainer.close_submissions()
        asking = asyncio.create_task(batch_of(live))
        for number in range(2):
            await instance.answer(number, [5])
        batch = await asking
        assert (batch.samples, batch.filtered, batch.missing) == ([], ["a"], 1)
        assert await live.trainer.next_batch(batch.number) is None


@pytest.mark.parametrize(
    ("worth", "reason"),
    [
        (math.nan, "the reward of sample 1 of group 'a' is nan; return a finite number"),
        ("full marks", "is 'full marks'; return a finite number"),
        (ValueError("no answer"), "failed 1 times, last with ValueError: no answer"),
    ],
)
async def test_a_failure_fails_the_group_with_its_reason(worth: Any, reason: str) -> None:
    def worth_of(sample: Sample) -> Any:
        if (sample.uid, sample.index) != ("a", 1):
            return 1.0
        if isinstance(worth, Exception):
            raise worth
        return worth

    instance = Scripted()
    policy = parse_policy("once", {"rewards": {"tries": 1}})
    async with run(instance, Grader(worth_of), policy=policy) as live:
        live.trainer.submit([prompt("a"), prompt("b")])
        asking = asyncio.create_task(batch_of(live))
        for number in range(4):
            await instance.answer(number, [7])
        batch = await asking
        (failed,) = batch.failed
        assert failed.uid == "a"
        assert reason in failed.reason
        assert list(batch.groups()) == ["b"], "made up for"
        assert not batch.filtered


async def test_filter_sees_complete_groups_with_rewards() -> None:
    seen: list[Any] = []

    def keep(samples: Sequence[Sample]) -> bool:
        seen.append({sample.index: (sample.response_ids, sample.reward) for sample in samples})
        return True

    instance = Scripted()
    async with run(instance, Grader(first_token), keep=keep) as live:
        live.trainer.submit([prompt()])
        asking = asyncio.create_task(batch_of(live))
        for number in range(2):
            await instance.answer(number, [7 + number])
        await asking
        assert seen == [{0: ([7], 7.0), 1: ([8], 8.0)}]


async def test_a_journal_with_rewards_replays_by_itself(tmp_path: Path) -> None:
    path, told = tmp_path / "journal", []

    instance = Scripted()
    options = {"keep": "nonzero_variance", "journal": path}
    async with run(instance, Grader(first_token), **options) as live:
        live.driver.pump.observers.append(lambda now, event, actions: told.append(actions))
        live.trainer.submit([prompt("a"), prompt("b")])
        asking = asyncio.create_task(batch_of(live))
        for number, token in enumerate([5, 5, 1, 2]):
            await instance.answer(number, [token])
        await asking
    _, entries = journal.read(path)
    again = [actions for _, actions in journal.replay(SYNC.scheduler(1), entries)]
    assert again[-len(told) :] == told
    names = [type(action).__name__ for actions in again for action in actions]
    assert (names.count("Judge"), names.count("Deliver")) == (2, 1)


class TestRestarts:
    async def test_restart_keeps_rewards_and_judges_the_rest(self, tmp_path: Path) -> None:
        before, earlier = Scripted(), Grader()
        async with run(before, earlier, store=tmp_path / "1") as live:
            live.trainer.submit([prompt()])
            asking = asyncio.create_task(batch_of(live))
            await before.answer(0, [7])
            await before.answer(1, [8])
            await until(lambda: len(earlier.waiting) == 2)
            await earlier.answer("a", 0, 0.25)
            await until(lambda: known(live) == {"a/0"})
            left = await killed(live, tmp_path / "2")
            asking.cancel()
        after, grader = Scripted(), Grader()
        async with run(after, grader, store=left) as live:
            asking = asyncio.create_task(batch_of(live))
            await grader.answer("a", 1, 0.75)
            assert rewards(await asking) == {("a", 0): 0.25, ("a", 1): 0.75}
            assert [(s.index, s.response_ids) for s in grader.seen] == [(1, [8])]
            assert not after.orders

    async def test_restart_keeps_rewards_of_incomplete_groups(self, tmp_path: Path) -> None:
        before = Scripted()
        async with run(before, Grader(), store=tmp_path / "1") as live:
            live.trainer.submit([prompt()])
            asking = asyncio.create_task(batch_of(live))
            await before.answer(0, [7])
            await until(lambda: live.driver.view.to_judge("a/0") is not None)
            left = await killed(live, tmp_path / "2")
            asking.cancel()
        after, grader = Scripted(), Grader()
        async with run(after, grader, store=left) as live:
            asking = asyncio.create_task(batch_of(live))
            await grader.answer("a", 0, 1.0)  # at once
            await after.answer(0, [9])
            await grader.answer("a", 1, 2.0)
            assert rewards(await asking) == {("a", 0): 1.0, ("a", 1): 2.0}

    async def test_a_batch_that_comes_again_has_its_rewards(self, tmp_path: Path) -> None:
        before = Scripted()
        grading = {"keep": "nonzero_variance"}
        async with run(before, Grader(first_token), store=tmp_path / "1", **grading) as live:
            live.trainer.submit([prompt("a"), prompt("b"), prompt("c", samples=1)])
            asking = asyncio.create_task(batch_of(live))
            for number, token in enumerate([5, 5, 1, 2]):
                await before.answer(number, [token])
            first = await asking
            left = await killed(live, tmp_path / "2")
        after, grader = Scripted(), Grader(first_token)
        async with run(after, grader, store=left, **grading) as live:
            again = await batch_of(live)
            assert again == first
            assert (again.filtered, len(again.samples)) == (["a"], 2)
            assert not grader.seen
            asking = asyncio.create_task(batch_of(live, again.number))
            await after.answer(0, [6])
            assert rewards(await asking) == {("c", 0): 6.0}
            left = await killed(live, tmp_path / "3")
        store = Store(left, durable="off")
        assert set(store.facts(facts.REWARD)) == {"c/0"}, "what is acknowledged is forgotten"
        store.close()

    async def test_a_group_that_was_kept_waits_for_its_batch(self, tmp_path: Path) -> None:
        before = Scripted()
        async with run(
            before, Grader(first_token), store=tmp_path / "1", prompts_per_step=2
        ) as live:
            live.trainer.submit([prompt("a", samples=1), prompt("b", samples=1)])
            asking = asyncio.create_task(batch_of(live))
            await before.answer(0, [7])
            await until(lambda: live.driver.view.groups(GroupState.COMPLETE) == 1)
            left = await killed(live, tmp_path / "2")
            asking.cancel()
        after, grader = Scripted(), Grader(first_token)
        async with run(after, grader, store=left, prompts_per_step=2) as live:
            asking = asyncio.create_task(batch_of(live))
            await after.answer(0, [8])
            assert rewards(await asking) == {("a", 0): 7.0, ("b", 0): 8.0}
            assert [sample.uid for sample in grader.seen] == ["b"]

    async def test_regenerated_sample_is_judged_again(self, tmp_path: Path) -> None:
        async def load(client: Any, version: int) -> None: ...

        before, options = Scripted(), {"prompts_per_step": 2}
        async with run(before, Grader(first_token), store=tmp_path / "1", **options) as live:
            live.trainer.submit([prompt("a", samples=1), prompt("b", samples=1)])
            asking = asyncio.create_task(batch_of(live))
            await before.answer(0, [7])
            await until(lambda: live.driver.view.groups(GroupState.COMPLETE) == 1)
            left = await killed(live, tmp_path / "2")
            asking.cancel()
        after = Scripted()
        async with run(after, Grader(first_token), store=left, **options) as live:
            await after.order(0)
            await live.trainer.weights.publish(1, load, encoded=b"how")
            await after.fail(0, InstanceError("aborted"))
            asking = asyncio.create_task(batch_of(live))
            await after.answer(1, [8])
            await after.answer(2, [8])
            batch = await asking
            assert rewards(batch) == {("a", 0): 8.0, ("b", 0): 8.0}
            left = await killed(live, tmp_path / "3")
        async with run(Scripted(), Grader(first_token), store=left) as live:
            assert await batch_of(live) == batch

    async def test_restart_without_the_reward_function_is_refused(self, tmp_path: Path) -> None:
        instance = Scripted()
        async with run(instance, Grader(), store=tmp_path / "1") as live:
            live.trainer.submit([prompt()])
            await live.trainer.durable()
        with pytest.raises(CallerError, match="'a' waits for its rewards, but there is no rew"):
            async with run(instance, None, store=tmp_path / "1"):
                pass
        async with run(Scripted(), Grader(), store=tmp_path / "1") as live:
            assert live.state()["groups"]["fresh"] == 1, "nothing is lost by it"


def known(live: LiveScheduler) -> set[str]:
    """The requests whose rewards are known, and will be stored with the next write."""
    return set(live.records.stored.keeper.session._rewarded)


async def killed(live: LiveScheduler, to: Path) -> Path:
    """What a process leaves that is killed now."""
    await live.trainer.durable()
    shutil.copytree(live.records.stored.store.folder, to)
    return to


async def test_filtered_prompt_is_not_regenerated(tmp_path: Path) -> None:
    """By this process or the next one, before and after its batch is acknowledged."""
    before = Scripted()
    grading = {"keep": "nonzero_variance"}
    async with run(before, Grader(first_token), store=tmp_path / "1", **grading) as live:
        live.trainer.submit([prompt("a")])
        asking = asyncio.create_task(batch_of(live))
        for number in range(2):
            await before.answer(number, [5])
        await until(lambda: live.state()["filtered"] == ["a"])
        asking.cancel()
        left = await killed(live, tmp_path / "2")
    after = Scripted()
    async with run(after, Grader(first_token), store=left, **grading) as live:
        live.trainer.submit([prompt("a"), prompt("b")])
        live.trainer.close_submissions()
        live.trainer.submit([prompt("a")])
        asking = asyncio.create_task(batch_of(live))
        for number in range(2):
            await after.answer(number, [number])
        batch = await asking
        assert (list(batch.groups()), batch.filtered) == (["b"], ["a"])
        live.trainer.submit([prompt("a")])
        assert await live.trainer.next_batch(batch.number) is None
        left = await killed(live, tmp_path / "3")
    async with run(Scripted(), Grader(first_token), store=left, **grading) as live:
        assert live.trainer.submit([prompt("a"), prompt("b")]) == ["a", "b"]
        assert live.trainer.submissions.unknown("abc") == ["c"]
        assert await live.trainer.next_batch() is None
