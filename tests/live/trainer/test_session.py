"""The trainer session: batches come when asked for, whole, once, with tokens and versions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.live.driver import Driver
from rollout_sched.live.ports import RequestRejected
from rollout_sched.live.settings import Settings
from rollout_sched.live.trainer import session as weight_publisher
from rollout_sched.live.trainer.delivery import NotReady
from rollout_sched.live.trainer.samples import Batch, FailedGroup, Prompt, Span
from rollout_sched.live.trainer.session import TrainerSession, WeightPublisher
from tests.core.told import make_scheduler
from tests.live.scripted import Scripted, until

LOGPROBS = {"logprobs": 0}


class Stage:
    def __init__(self, prompts_per_step: int = 1, **roles: Any) -> None:
        self.instance = Scripted()
        self.driver = Driver(
            make_scheduler(prompts_per_step, **roles), settings=Settings(poll_s=1000.0)
        )
        self.trainer = TrainerSession(self.driver)

    async def __aenter__(self) -> Stage:
        await self.driver.add_instance(self.instance)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.driver.close()

    def ask(self, acknowledged: int | None = None) -> asyncio.Task[Batch | None]:
        return asyncio.create_task(self.trainer.next_batch(acknowledged))


def prompt(uid: str = "a", samples: int = 1, **other: Any) -> Prompt:
    return Prompt(uid, [1, 2], samples, 10, LOGPROBS, **other)


async def load(client: Any, version: int) -> None:
    """Loaded at once."""


async def test_a_batch_of_samples() -> None:
    async with Stage() as stage:
        stage.trainer.submit([prompt(samples=2, extra={"answer": "42"})])
        asking = stage.ask()
        await stage.instance.answer(0, [7, 8], "length")
        await stage.instance.answer(1, [9])
        batch = await asking
        assert (batch.number, batch.version, batch.failed) == (0, 0, [])
        assert list(batch.groups()) == ["a"]
        first = next(s for s in batch.samples if s.index == 0)
        assert first.prompt_ids == [1, 2]
        assert first.response_ids == [7, 8]
        assert first.response_mask == [1, 1]
        assert first.rollout_log_probs == [-0.5, -0.5]
        assert first.versions == [0, 0]
        assert first.segments == [Span(0, "i0", 0, 2)]
        assert (first.finish_reason, first.status) == ("length", "TRUNCATED")
        assert (first.oldest_version, first.newest_version) == (0, 0)
        assert first.extra == {"answer": "42"}
        assert first.num_interruptions == 0


async def test_samples_may_differ_in_how_they_are_drawn() -> None:
    async with Stage() as stage:
        stage.trainer.submit([prompt(samples=3, each=[{"seed": 1}, {"seed": 2}])])
        asking = stage.ask()
        seeds = [(await stage.instance.order(k)).sampling["seed"] for k in range(3)]
        assert seeds == [1, 2, 1]
        asking.cancel()


async def test_end_of_the_run_is_reported() -> None:
    async with Stage() as stage:
        stage.trainer.submit([prompt()])
        stage.trainer.close_submissions()
        asking = stage.ask()
        await stage.instance.answer(0, [7])
        assert await asking is not None
        assert await stage.trainer.next_batch(0) is None
        assert await stage.trainer.next_batch(0) is None
        with pytest.raises(CallerError):
            stage.trainer.submit([prompt("b")])


async def test_waiting_trainer_hears_of_the_end() -> None:
    async with Stage() as stage:
        asking = stage.ask()
        await asyncio.sleep(0)
        stage.trainer.close_submissions()
        assert await asking is None


async def test_a_batch_that_is_complete_survives_the_end_of_the_scheduler() -> None:
    async with Stage() as stage:
        stage.trainer.submit([prompt()])
        asking = stage.ask()
        await stage.instance.answer(0, [7])
        batch = await asking
        stage.driver.pump.broken = RuntimeError("no more")
        assert await stage.trainer.next_batch() is batch
        with pytest.raises(RuntimeError, match="no more"):
            await stage.trainer.next_batch(0)


async def test_a_failed_group_comes_with_the_next_batch_or_at_the_end() -> None:
    async with Stage() as stage:
        stage.trainer.submit([prompt("bad"), prompt("good"), prompt("worse")])
        stage.trainer.close_submissions()
        asking = stage.ask()
        await stage.instance.fail(0, RequestRejected("out of vocabulary"))
        await stage.instance.answer(1, [7])
        batch = await asking
        assert batch.failed == [FailedGroup("bad", "out of vocabulary")]
        asking = stage.ask(batch.number)
        await stage.instance.fail(2, RequestRejected("too long"))
        last = await asking
        assert (last.samples, last.failed) == ([], [FailedGroup("worse", "too long")])
        assert await stage.trainer.next_batch(last.number) is None


STREAMED = {"batching": {"use": "sync", "part_prompts": 1}}


def uids(batch: Batch | None) -> list[str]:
    return [sample.uid for sample in batch.samples]


async def test_parts_of_a_batch() -> None:
    async with Stage(3, **STREAMED) as stage:
        trainer = stage.trainer
        trainer.submit([prompt(uid) for uid in "abc"])
        asking = asyncio.create_task(trainer.next_batch(parts=True))
        await stage.instance.answer(1, [7])
        part = await asking
        assert (part.number, part.part, part.last, uids(part)) == (0, 0, False, ["b"])
        with pytest.raises(CallerError, match="take its parts up to the last"):
            await trainer.weights.publish(1, load)
        asking = asyncio.create_task(trainer.next_batch(0, part=0, parts=True))
        await stage.instance.answer(0, [7])
        part = await asking
        assert (part.part, part.last, uids(part)) == (1, False, ["a"])
        # One that starts anew has none of the gradients.
        assert uids(await trainer.next_batch(parts=True)) == ["b", "a"]
        asking = asyncio.create_task(trainer.next_batch(0, part=1, parts=True))
        await stage.instance.answer(2, [7])
        part = await asking
        assert (part.part, part.last, uids(part)) == (2, True, ["c"])
        await trainer.weights.publish(1, load)
        with pytest.raises(NotReady):
            await trainer.next_batch(0, 0.01, part=2, parts=True)


async def test_full_batches_come_under_any_policy() -> None:
    """And may publish meanwhile: nothing has gone."""
    async with Stage(2, **STREAMED, freshness="unbounded") as stage:
        stage.trainer.submit([prompt("a"), prompt("b")])
        asking = stage.ask()
        await stage.instance.answer(0, [7])
        await until(lambda: stage.driver.view.run.complete)
        assert not asking.done()
        await stage.trainer.weights.publish(1, load)
        await stage.instance.answer(1, [7])
        batch = await asking
        assert (uids(batch), batch.part, batch.last) == (["a", "b"], 0, True)


async def test_a_batch_in_parts_whose_rest_fails_is_closed() -> None:
    async with Stage(2, **STREAMED) as stage:
        trainer = stage.trainer
        trainer.submit([prompt("a"), prompt("b")])
        trainer.close_submissions()
        asking = asyncio.create_task(trainer.next_batch(parts=True))
        await stage.instance.answer(0, [7])
        assert uids(await asking) == ["a"]
        asking = asyncio.create_task(trainer.next_batch(0, part=0, parts=True))
        await stage.instance.fail(1, RequestRejected("too long"))
        last = await asking
        assert (last.number, last.part, last.last) == (0, 1, True)
        assert (last.samples, last.failed) == ([], [FailedGroup("b", "too long")])
        assert await trainer.next_batch(0, part=1, parts=True) is None


async def test_a_uid_is_one_prompt_that_is_generated_once() -> None:
    async with Stage() as stage:
        stage.trainer.submit([prompt(), prompt()])
        assert stage.trainer.submissions.open_samples == 1
        with pytest.raises(
            CallerError, match="'a' was already submitted with other values of extra"
        ):
            stage.trainer.submit([prompt(extra={"answer": 2})])
        asking = stage.ask()
        await stage.instance.answer(0, [7])
        await asking
        stage.trainer.submit([prompt()])
        assert stage.trainer.submissions.open_samples == 0, "it has been delivered"
        with pytest.raises(CallerError, match="with other values of samples"):
            stage.trainer.submit([prompt(samples=2)])
        with pytest.raises(NotReady):
            await stage.trainer.next_batch(0, 0)
        assert stage.trainer.submit([prompt(), prompt("b")]) == ["a"]
        assert stage.trainer.submissions.open_samples == 1, "a is acknowledged"
        with pytest.raises(CallerError, match="'a' was already delivered with other values"):
            stage.trainer.submit([prompt(samples=2)])


async def test_unreported_failure_may_be_resubmitted_after_the_end() -> None:
    """A trainer that starts anew submits everything, though it has closed submissions before."""
    async with Stage() as stage:
        stage.trainer.submit([prompt("bad"), prompt("good")])
        stage.trainer.close_submissions()
        asking = stage.ask()
        await stage.instance.fail(0, RequestRejected("too long"))
        await until(lambda: stage.trainer.submissions.lost)
        stage.trainer.submit([prompt("bad"), prompt("good")])
        with pytest.raises(CallerError, match="came after submissions were closed"):
            stage.trainer.submit([prompt("new")])
        await stage.instance.answer(1, [7])
        batch = await asking
        assert batch.failed == [FailedGroup("bad", "too long")]
        stage.trainer.submit([prompt("bad")])
        assert await stage.trainer.next_batch(batch.number) is None
        with pytest.raises(CallerError, match="came after submissions were closed"):
            stage.trainer.submit([prompt("bad")])


async def test_failed_prompt_is_accepted_again_until_the_end() -> None:
    async with Stage() as stage:
        stage.trainer.submit([prompt("bad")])
        asking = stage.ask()
        await stage.instance.fail(0, RequestRejected("too long"))
        await until(lambda: stage.trainer.submissions.lost)
        stage.trainer.submit([prompt("bad"), prompt("bad")])
        await stage.instance.answer(1, [7])
        batch = await asking
        assert (uids(batch), [group.uid for group in batch.failed]) == (["bad"], ["bad"])


async def test_oversized_prompt_is_refused() -> None:
    async with Stage() as stage:
        with pytest.raises(CallerError, match="max_tokens can be"):
            stage.trainer.submit([Prompt("a", [1], 1, 1_000_000)])
        stage.trainer.submit([prompt()])


async def test_publishing_waits_for_the_fleet() -> None:
    async with Stage() as stage:
        await stage.trainer.weights.publish(1, load, wait=True)
        assert stage.trainer.weights.newest == 1
        assert stage.driver.pump.scheduler.state.fleet.version == 1
        with pytest.raises(CallerError, match="versions must increase"):
            await stage.trainer.weights.publish(1, load)


async def test_versions_are_those_that_made_the_tokens() -> None:
    roles = {
        "batching": "fully_async",
        "freshness": {"use": "bounded", "max_staleness": 2},
        "interruption": {"use": "partial", "at_update": "resubmit"},
    }
    async with Stage(**roles) as stage:
        stage.trainer.submit([prompt()])
        asking = stage.ask()
        await stage.instance.order()
        await stage.trainer.weights.publish(1, load)
        await until(lambda: stage.instance.calls)
        await stage.instance.answer(0, [7, 8], "abort")
        await stage.instance.answer(1, [9])
        batch = await asking
        sample = batch.samples[0]
        assert sample.versions == [0, 0, 1]
        assert sample.staleness == 1
        assert sample.num_interruptions == 1
        assert sample.rollout_log_probs == [-0.5] * 3


async def test_broken_scheduler_fails_every_call() -> None:
    async with Stage() as stage:
        stage.trainer.submit([prompt(samples=2)])
        asking = stage.ask()
        await stage.instance.order()

        class Exploding:
            def estimate(self, siblings: Any) -> Any:
                raise RuntimeError("a policy of the user's own")

        stage.driver.pump.scheduler.parts.requests.expectations._prediction = Exploding()
        await stage.instance.answer(0, [7])
        with pytest.raises(RuntimeError, match="of the user's own"):
            await asking


async def test_waiting_for_weights_ends_when_they_are_loaded() -> None:
    """An idle instance counts as new once its update has begun, before its weights are there."""
    async with Stage() as stage:
        loading = asyncio.Event()

        async def slowly(client: Any, version: int) -> None:
            await loading.wait()

        publishing = asyncio.create_task(stage.trainer.weights.publish(1, slowly, wait=True))
        await until(lambda: stage.driver.pump.scheduler.state.progress.fleet_version == 1)
        await asyncio.sleep(0.01)
        assert not publishing.done()
        assert not stage.trainer.weights.has_loaded(1)
        loading.set()
        await publishing
        assert stage.trainer.weights.has_loaded(1)


async def test_weights_are_not_loaded_without_instances() -> None:
    """Else a trainer would take weights away that nobody has had."""
    async with Stage() as stage:
        await stage.driver.remove_instance("i0")
        assert not stage.trainer.weights.has_loaded(0)
        waiting = asyncio.create_task(stage.trainer.weights.publish(1, load, wait=True))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await stage.driver.add_instance(Scripted("i1"))
        await waiting
        assert stage.trainer.weights.has_loaded(1)


async def test_broken_scheduler_ends_a_wait_for_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_publisher, "_POLL_S", 0.01)
    async with Stage() as stage:
        await stage.driver.remove_instance("i0")
        waiting = asyncio.create_task(stage.trainer.weights.publish(1, load, wait=True))
        await asyncio.sleep(0.03)
        stage.driver.pump.broken = RuntimeError("no more")
        with pytest.raises(RuntimeError, match="no more"):
            await waiting


async def test_a_failed_group_says_why() -> None:
    async def tool(trajectory: Any) -> None:
        raise KeyError("answer")

    async with Stage(prompts_per_step=2) as stage:
        stage.trainer.submit([prompt("raises")], tool)
        asking = stage.ask()
        stage.trainer.close_submissions()
        told = stage.driver.front.endings.on_group_failed
        assert told is not None
        told("aborted", None)  # as for one whose attempts somebody else aborts
        await stage.instance.answer(0, [7])
        batch = await asking
        why = {failed.uid: failed.reason for failed in batch.failed}
        assert why["raises"] == "KeyError: 'answer'"
        assert "aborted it repeatedly" in why["aborted"]


async def test_a_group_is_delivered_without_the_samples_that_failed() -> None:
    async def tool(trajectory: Any) -> None:
        if trajectory.index < 2:
            raise KeyError("answer")

    async with Stage() as stage:
        given = {"samples": 3, "max_tokens": 9, "prompt_ids": [1]}
        stage.trainer.submit([Prompt("two", min_samples=2, **given)], tool)
        stage.trainer.submit([Prompt("one", min_samples=1, **given)], tool)
        asking = stage.ask()
        stage.trainer.close_submissions()
        for number in range(6):
            await stage.instance.answer(number, [7])
        batch = await asking
        assert [sample.index for sample in batch.samples] == [2]
        assert batch.failed_samples == {"one": 2}
        assert [failed.uid for failed in batch.failed] == ["two"]
        assert stage.trainer.submissions.open_samples == 0
        with pytest.raises(CallerError, match="min_samples, 4, is more than samples, 3"):
            stage.trainer.submit([Prompt("four", min_samples=4, **given)], None)


class Stored:
    def __init__(self):
        self.published_ = []
        self.promised = asyncio.Event()

    def published(self, version, loader):
        self.published_.append((version, loader))

    async def promise(self):
        await self.promised.wait()


async def load_weight_publisher(client, version):
    """Loaded at once."""


async def test_published_version_is_stored_before_the_answer():
    driver, stored = Driver(make_scheduler(1)), Stored()
    weights = WeightPublisher(driver, stored)
    with pytest.raises(CallerError, match="a coroutine cannot be stored"):
        await weights.publish(1, load_weight_publisher, None, wait=False)
    assert weights.newest == 0

    async def publish(how):
        await weights.publish(1, load_weight_publisher, how, wait=False)

    publishing = [asyncio.create_task(publish(b"how")) for _ in range(2)]
    await until(lambda: stored.published_ == [(1, b"how")])
    await asyncio.sleep(0)
    assert not any(call.done() for call in publishing), "the repeated call is promised as much"
    stored.promised.set()
    await asyncio.gather(*publishing)
    assert stored.published_ == [(1, b"how")]
    with pytest.raises(CallerError, match="versions must increase"):
        await publish(b"otherwise")
    await driver.close()
