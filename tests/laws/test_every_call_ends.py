"""Whatever callback raises: its request still ends exactly once, and other requests are unaffected.

Each test lets one callback of one request raise, next to another request on the same instances.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_sched.core.model.actions import Action
from rollout_sched.core.model.events import (
    BatchRequested,
    Event,
    GroupSubmitted,
    InstanceJoined,
    RequestSubmitted,
)
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.live.driver import Driver
from rollout_sched.live.ports import InstanceError, RequestRejected
from rollout_sched.live.requests.token_payload import TokenPayload, TokenTranscript
from rollout_sched.live.settings import Settings
from tests.core.told import make_scheduler
from tests.live.scripted import Scripted, until

PROMPT = [1, 2, 3]
SETTINGS = Settings(poll_s=1000.0, abort_timeout_s=0.2, stream_s=0.01)


class Boom(Exception):
    """An error that no code expects."""


class Transcript(TokenTranscript):
    """The callback named `bad` raises."""

    def __init__(self, bad: str) -> None:
        super().__init__()
        self.bad = bad

    def _may_raise(self, callback: str) -> None:
        if callback == self.bad:
            raise Boom(callback)

    def streamed(self, attempt: int) -> int:
        self._may_raise("streamed")
        return super().streamed(attempt)

    def partial(self, attempt: int, tokens: int) -> Any:
        self._may_raise("partial")
        return super().partial(attempt, tokens)

    def append(self, attempt: int, tokens: int, piece: Any) -> None:
        self._may_raise("append")
        super().append(attempt, tokens, piece)

    def drop(self, attempt: int) -> None:
        self._may_raise("drop")
        super().drop(attempt)


class Client(TokenPayload):
    """Counts its ends; the callback named `bad` raises."""

    def __init__(self, bad: str = "") -> None:
        super().__init__(PROMPT, {}, stream_every=2, responder=self)
        self.bad = bad
        self.transcript = Transcript(bad)
        self.request = ""
        self.ends: list[Any] = []

    def _may_raise(self, callback: str) -> None:
        if callback == self.bad:
            raise Boom(callback)

    def begin(self, *args: Any) -> Any:
        self._may_raise("begin")
        return super().begin(*args)

    def answer(self, sample: DeliveredSample) -> None:
        self._may_raise("answer")
        self.ends.append(sample)

    def fail(self, reason: str, error: Exception | None) -> None:
        self.ends.append((reason, error))
        self._may_raise("fail")


class Stage:
    """Two instances; the first may break off its stream."""

    def __init__(self, **other: Any) -> None:
        self.instances = [Scripted("i0"), Scripted("i1")]
        self.scheduler = make_scheduler(batching="sync")
        self.scheduler.parts.backoff.first_s = 0.01
        self.driver = Driver(self.scheduler, settings=SETTINGS, **other)

    async def __aenter__(self) -> Stage:
        for instance in self.instances:
            await self.driver.add_instance(instance)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.driver.close()
        self.scheduler.check_invariants()
        assert not len(self.driver.front.payloads)
        assert not len(self.driver.front.attempts)
        assert not self.scheduler.state.fleet.attempts

    def ask(self, client: Client) -> Client:
        client.request = self.driver.submit(client, len(PROMPT), 100)
        return client

    async def serve(self, breaks: bool) -> None:
        """Answer every order; with `breaks`, the first one fails after half of its stream."""
        done: set[str] = set()
        while True:
            for instance in self.instances:
                for number, order_id in enumerate(list(instance.orders)):
                    answer = instance._answers[order_id]
                    if order_id in done or answer.done():
                        continue
                    done.add(order_id)
                    await instance.stream(number, [5, 6])
                    await asyncio.sleep(0.02)
                    if breaks and instance is self.instances[0]:
                        answer.set_exception(InstanceError("it broke off"))
                    elif not answer.done():
                        await instance.answer(number, [5, 6, 7])
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize(
    "bad", ["begin", "streamed", "partial", "append", "drop", "answer", "fail", ""]
)
async def test_a_payload_that_raises_ends_alone(bad: str, breaks: bool) -> None:
    async with Stage() as stage:
        serving = asyncio.create_task(stage.serve(breaks))
        guilty, innocent = stage.ask(Client(bad)), stage.ask(Client())
        await until(lambda: guilty.ends and innocent.ends)
        serving.cancel()
        await asyncio.sleep(0.05)
        assert stage.driver.broken is None
        assert isinstance(innocent.ends[0], DeliveredSample)
        assert len(guilty.ends) == len(innocent.ends) == 1
        if bad in ("begin", "answer"):
            assert guilty.ends[0][0] == "failed"
        assert not any(i.rests_until for i in stage.scheduler.state.fleet.instances.values())


async def test_unsendable_request_is_not_retried() -> None:
    seen: list[Event] = []
    observe = [lambda now, event, actions: seen.append(event)]
    async with Stage(observers=observe) as stage:
        guilty = stage.ask(Client("begin"))
        assert [reason for reason, _ in guilty.ends] == ["failed"]
        (error,) = [error for _, error in guilty.ends]
        assert isinstance(error, RequestRejected)
        assert error.status == 500
        kinds = [type(event).__name__ for event in seen]
        assert kinds.count("RequestFailed") == 1


@pytest.mark.parametrize("bad", ["begin", "streamed", "partial", "append"])
async def test_a_lost_instance_is_survived_by_a_payload_that_raises(bad: str) -> None:
    async with Stage() as stage:
        guilty, innocent = stage.ask(Client(bad)), stage.ask(Client())
        await asyncio.sleep(0.01)
        stage.driver.fleet.lose("i0", "it died")
        serving = asyncio.create_task(stage.serve(False))
        await until(lambda: guilty.ends and innocent.ends)
        serving.cancel()
        assert isinstance(innocent.ends[0], DeliveredSample)


async def test_an_observer_that_raises_is_heard_of_once_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[Event] = []

    def bad(now: float, event: Event, actions: list[Action]) -> None:
        raise Boom("observer")

    def good(now: float, event: Event, actions: list[Action]) -> None:
        seen.append(event)

    async with Stage(observers=[bad, good]) as stage:
        serving = asyncio.create_task(stage.serve(False))
        client = stage.ask(Client())
        await until(lambda: client.ends)
        serving.cancel()
        assert isinstance(client.ends[0], DeliveredSample)
        assert sum(isinstance(event, InstanceJoined) for event in seen) == 2
    assert sum("gets no more events" in record.message for record in caplog.records) == 1


async def test_a_watcher_that_raises_changes_nothing() -> None:
    async with Stage() as stage:
        serving = asyncio.create_task(stage.serve(False))
        stage.driver.pump.watch(_boom, RequestSubmitted)
        client = stage.ask(Client())
        await until(lambda: client.ends)
        serving.cancel()
        assert isinstance(client.ends[0], DeliveredSample)


async def test_a_batch_that_cannot_be_handed_over_is_not_lost_in_silence() -> None:
    broken: list[bool] = []
    failed: list[str] = []
    async with Stage(
        on_deliver=lambda deliver, payloads: _boom(deliver),
        on_group_failed=lambda group, error: failed.append(group),
    ) as stage:
        stage.driver.on_broken = lambda: broken.append(True)
        serving = asyncio.create_task(stage.serve(False))
        for group in ("a", "b"):
            stage.driver.submit_group(GroupSubmitted(group, 1, 3, 50), lambda index: Client())
        stage.driver.tell(BatchRequested())
        await until(lambda: broken)
        serving.cancel()
        assert isinstance(stage.driver.broken, Boom)
        assert failed == ["b"]
        with pytest.raises(Boom):
            stage.ask(Client())


async def test_a_payload_that_cannot_be_made_fails_its_group() -> None:
    failed: list[tuple[str, Exception | None]] = []
    async with Stage(on_group_failed=lambda *told: failed.append(told)) as stage:
        stage.driver.submit_group(GroupSubmitted("a", 1, 3, 50), _boom)
        stage.driver.tell(BatchRequested())
        await until(lambda: failed)
        assert failed[0][0] == "a"
        assert isinstance(failed[0][1], Boom)


async def test_an_abort_that_raises_anything_is_given_up_in_time() -> None:
    async with Stage() as stage:
        client = stage.ask(Client())
        instance = stage.instances[0]
        await instance.order()
        instance.obey = _boom
        stage.driver.withdraw(client.request)
        await until(lambda: instance.cancelled)


def _boom(_: Any) -> Any:
    raise Boom
