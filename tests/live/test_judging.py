"""Samples judged as they finish, and groups once they are whole: on time, once, and for what they
still are."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from rollout_sched.core.model.events import (
    BatchRequested,
    GroupJudged,
    GroupSubmitted,
    WeightsPublished,
)
from rollout_sched.core.model.model import DeliveredSample, GroupState
from rollout_sched.live.driver import Driver
from rollout_sched.live.ports import PayloadOf, RequestRejected
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.settings import Settings
from tests.core.told import make_scheduler
from tests.live.scripted import Scripted, until


class Judge:
    """Answers when a test says so; keeps what it says."""

    def __init__(self) -> None:
        self.asked: dict[str, asyncio.Future[Any]] = {}
        self.cancelled: list[str] = []
        self.known: dict[str, Any] = {}
        self.keep: Any = True
        self.stubborn = False
        self.seen: list[list[int]] = []

    async def judge(self, sample: DeliveredSample, payload_of: PayloadOf) -> Any:
        payload: Any = payload_of(sample)
        self.seen.append(payload.response_ids)
        answer = self.asked[sample.request] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancelled.append(sample.request)
            if self.stubborn:
                return "too late"
            raise

    def note(self, sample: DeliveredSample, worth: Any) -> None:
        self.known[sample.request] = worth

    def forget(self, request: str) -> None:
        self.known.pop(request, None)

    async def keeps(self, samples: Sequence[DeliveredSample], payload_of: PayloadOf) -> bool:
        if isinstance(self.keep, Exception):
            raise self.keep
        return bool(self.keep)

    async def answer(self, request: str, worth: Any) -> None:
        await until(lambda: request in self.asked)
        answer = self.asked[request]
        if isinstance(worth, Exception):
            answer.set_exception(worth)
        else:
            answer.set_result(worth)


class Stage:
    """A driver with groups of two samples that are judged."""

    def __init__(self, **roles: Any) -> None:
        self.instance, self.judge = Scripted(), Judge()
        self.delivered: list[str] = []
        self.failed: dict[str, Exception | None] = {}
        self.filtered: list[str] = []
        self.told: list[Any] = []
        self.driver = Driver(
            make_scheduler(**roles),
            settings=Settings(poll_s=1000.0),
            observers=[lambda now, event, actions: self.told.append(event)],
            on_deliver=lambda action, _: self.delivered.extend(s.request for s in action.samples),
            on_group_failed=self.failed.__setitem__,
        )
        self.driver.front.endings.on_group_filtered = self.filtered.append
        self.driver.judge_by(self.judge)

    async def __aenter__(self) -> Stage:
        await self.driver.add_instance(self.instance)
        self.driver.tell(BatchRequested())
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.driver.close()
        await asyncio.sleep(0)

    def submit(self, group: str = "a") -> None:
        def payload(index: int) -> TokenPayload:
            return TokenPayload([1], {})

        self.driver.submit_group(GroupSubmitted(group, 2, 1, 9, judged=True), payload)

    @property
    def judgements(self) -> list[GroupJudged]:
        return [event for event in self.told if isinstance(event, GroupJudged)]

    @property
    def at_work(self) -> int:
        assert self.driver.judging is not None
        return len(self.driver.judging)


def run(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 30))


def test_a_sample_is_judged_as_it_finishes_and_the_group_when_all_are() -> None:
    async def scene() -> None:
        async with Stage() as stage:
            stage.submit()
            await stage.instance.answer(1, [7, 8])
            await stage.judge.answer("a/1", 1.0)
            await until(lambda: stage.judge.known == {"a/1": 1.0})
            assert stage.judge.seen == [[7, 8]]
            await stage.instance.answer(0, [9])
            await until(lambda: "a/0" in stage.judge.asked)
            assert not stage.driver.view.in_flight, "it holds no slot"
            assert stage.driver.view.groups(GroupState.JUDGING) == 1
            assert not stage.delivered
            await stage.judge.answer("a/0", 2.0)
            await until(lambda: len(stage.delivered) == 2)
            assert [event.verdict for event in stage.judgements] == ["kept"]
            assert not stage.at_work

    run(scene())


def test_what_is_not_kept_is_filtered() -> None:
    async def scene() -> None:
        async with Stage() as stage:
            stage.judge.keep = False
            stage.submit()
            for number in range(2):
                await stage.instance.answer(number, [7])
                await stage.judge.answer(f"a/{number}", 0.0)
            await until(lambda: stage.filtered == ["a"])
            assert not stage.failed
            assert not stage.judge.known

    run(scene())


def test_what_cannot_be_told_fails_the_group_with_the_reason() -> None:
    """At once when it is whole: what the siblings are worth is not waited for."""

    async def scene() -> None:
        async with Stage() as stage:
            stage.submit()
            await stage.instance.answer(0, [7])
            await stage.instance.answer(1, [8])
            why = OSError("the grader is down")
            await stage.judge.answer("a/1", why)
            await until(lambda: stage.failed == {"a": why})
            await until(lambda: stage.judge.cancelled == ["a/0"])
            assert not stage.filtered
            assert not stage.at_work

    run(scene())


def test_a_filter_that_raises_fails_the_group() -> None:
    async def scene() -> None:
        async with Stage() as stage:
            stage.judge.keep = why = ValueError("no rewards")
            stage.submit()
            for number in range(2):
                await stage.instance.answer(number, [7])
                await stage.judge.answer(f"a/{number}", 0.0)
            await until(lambda: stage.failed == {"a": why})

    run(scene())


def test_a_group_that_fails_takes_its_judgements_with_it() -> None:
    """Even those that go on although they are cancelled: what they say is heard by nobody."""

    async def scene() -> None:
        async with Stage() as stage:
            stage.judge.stubborn = True
            stage.submit()
            await stage.instance.answer(0, [7])
            await until(lambda: "a/0" in stage.judge.asked)
            await stage.instance.fail(1, RequestRejected("out of vocabulary"))
            await until(lambda: stage.judge.cancelled == ["a/0"])
            await asyncio.sleep(0)
            assert list(stage.failed) == ["a"]
            assert not stage.judge.known
            assert not stage.judgements

    run(scene())


def test_one_that_starts_over_is_judged_anew() -> None:
    async def scene() -> None:
        roles = {
            "batching": "fully_async",
            "freshness": {"max_staleness": 0, "when_stale": "drop"},
        }
        async with Stage(**roles) as stage:
            stage.submit()
            await stage.instance.answer(0, [7])
            await stage.instance.answer(1, [8])
            await stage.judge.answer("a/0", 1.0)
            await until(lambda: set(stage.judge.asked) == {"a/0", "a/1"} and stage.judge.known)
            stage.driver.fleet.loader = _load
            stage.driver.tell(WeightsPublished(1))
            await until(lambda: stage.judge.cancelled == ["a/1"])
            assert not stage.judge.known
            stage.judge.asked.clear()
            for number in (2, 3):
                await stage.instance.answer(number, [9])
            await stage.judge.answer("a/0", 3.0)
            await stage.judge.answer("a/1", 4.0)
            await until(lambda: len(stage.delivered) == 2)
            assert stage.judge.known == {"a/0": 3.0, "a/1": 4.0}
            assert len(stage.judgements) == 1
            assert not stage.driver.view.anomalies

    run(scene())


async def _load(client: Any, version: int) -> None:
    """Loaded at once."""


def test_a_driver_that_is_closed_cancels_all() -> None:
    async def scene() -> None:
        async with Stage() as stage:
            stage.submit()
            for number in range(2):
                await stage.instance.answer(number, [7])
            await until(lambda: len(stage.judge.asked) == 2)
            assert stage.at_work == 3
        await until(lambda: sorted(stage.judge.cancelled) == ["a/0", "a/1"])
        assert not stage.at_work
        assert not stage.judgements
        assert not stage.failed

    run(scene())


def test_a_scheduler_that_breaks_fails_what_is_judged() -> None:
    async def scene() -> None:
        async with Stage() as stage:
            stage.submit()
            for number in range(2):
                await stage.instance.answer(number, [7])
            await until(lambda: len(stage.judge.asked) == 2)
            why = RuntimeError("no more")
            stage.driver.pump.fail(why)
            stage.driver.tell(BatchRequested())  # what is told afterwards is told now
            assert stage.failed == {"a": why}
            await until(lambda: sorted(stage.judge.cancelled) == ["a/0", "a/1"])

    run(scene())


def test_where_nobody_judges_a_group_fails_and_says_so() -> None:
    failed: dict[str, Exception | None] = {}

    async def scene() -> None:
        instance = Scripted()
        driver = Driver(make_scheduler(), on_group_failed=failed.__setitem__)
        await driver.add_instance(instance)
        driver.tell(BatchRequested())
        submitted = GroupSubmitted("a", 1, 1, 9, judged=True)
        driver.submit_group(submitted, lambda index: TokenPayload([1], {}))
        await instance.answer(0, [7])
        await until(lambda: "a" in failed)
        assert driver.broken is None
        await driver.close()

    run(scene())
    assert str(failed["a"]) == "no reward function is set"
