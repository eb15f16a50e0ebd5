"""A front: each order about requests has who carries it out, and all of them end together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollout_sched.core.model.actions import Answer, Deliver, Discard, Dispatch, Interrupt
from rollout_sched.core.model.events import Event, RequestFinished
from rollout_sched.core.model.model import DeliveredSample, Segment
from rollout_sched.live.driver import Front
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.settings import Settings
from tests.live.scripted import Scripted, until


class Client:
    """Who waits for a request (`ports.Responder`)."""

    def __init__(self) -> None:
        self.answers: list[DeliveredSample] = []
        self.failures: list[str] = []

    def answer(self, sample: DeliveredSample) -> None:
        self.answers.append(sample)

    def fail(self, reason: str, error: Exception | None) -> None:
        self.failures.append(str(error or reason))


class Link:
    """To a scheduler that only listens."""

    broken = None

    def __init__(self) -> None:
        self.told: list[Event] = []
        self.instance = Scripted()

    def tell(self, event: Event) -> None:
        self.told.append(event)

    def afterwards(self, call: Callable[..., object], *arguments: Any) -> None:
        call(*arguments)

    def client(self, instance: str) -> Scripted:
        return self.instance

    def unverified(self, instance: str) -> None:
        return None

    def restart_suspected(self, instance: str) -> None: ...

    def judge(self, *arguments: Any, **more: Any) -> None:
        return None


class Stage:
    """A front with one request, `r`, that runs. Make it inside a running event loop."""

    def __init__(self) -> None:
        self.link: Any = Link()
        self.client = Client()
        self.front = Front(self.link, Settings(), "run")
        self.payload = TokenPayload([1, 2, 3], {}, responder=self.client)
        self.front.payloads.add("r", self.payload)
        self.order(Dispatch("r", 1, "i0", 3, 9, 0))

    def order(self, action: Any) -> None:
        self.front.orders[type(action)](action)


def test_it_carries_out_what_is_ordered_of_requests_and_nothing_else() -> None:
    async def scene() -> None:
        front = Front(Link(), Settings(), "run")  # type: ignore[arg-type]
        assert set(front.orders) == {Dispatch, Interrupt, Deliver, Answer, Discard}

    asyncio.run(scene())


def test_a_request_from_its_dispatch_to_its_answer() -> None:
    async def scene() -> None:
        stage = Stage()
        await stage.link.instance.order()
        assert len(stage.front.attempts.on("i0")) == 1
        await stage.link.instance.answer(0, [7, 8])
        await until(lambda: stage.link.told)
        assert stage.link.told == [RequestFinished("r", 1, 2, (), "stop")]
        sample = DeliveredSample("r", "", 0, 3, 2, (Segment(0, 2, "i0"),), 0, "stop")
        stage.order(Answer(sample))
        assert stage.client.answers == [sample]
        assert "r" not in stage.front.payloads

    asyncio.run(scene())


def test_one_that_is_interrupted_is_stopped_at_its_instance() -> None:
    async def scene() -> None:
        stage = Stage()
        await stage.link.instance.order()
        stage.order(Interrupt("r", 1, "i0"))
        await until(lambda: ("abort", "run-1") in stage.link.instance.calls)
        await stage.front.close()

    asyncio.run(scene())


def test_one_that_is_discarded_for_good_has_failed() -> None:
    async def scene() -> None:
        stage = Stage()
        stage.order(Discard("r", 0, "failed", ends=True))
        await until(lambda: stage.client.failures)
        assert "r" not in stage.front.payloads
        await stage.front.close()

    asyncio.run(scene())


def test_when_nothing_will_ever_be_made_whoever_waits_is_told_why() -> None:
    async def scene() -> None:
        stage = Stage()
        stage.front.fail_all(RuntimeError("the scheduler is gone"))
        await until(lambda: stage.client.failures)
        assert "the scheduler is gone" in stage.client.failures[0]
        await stage.front.close()

    asyncio.run(scene())


def test_closing_ends_what_is_under_way_and_tells_nobody() -> None:
    async def scene() -> None:
        stage = Stage()
        await stage.link.instance.order()
        await stage.front.close()
        assert stage.link.instance.cancelled == ["run-1"]
        assert stage.link.told == []
        assert stage.client.failures == []

    asyncio.run(scene())
