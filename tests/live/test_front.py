"""A front: each order about requests has who carries it out, and all of them end together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model import actions as act
from rollout_sched.core.model.actions import Answer, Deliver, Discard, Dispatch, Interrupt
from rollout_sched.core.model.events import Event, RequestFinished, Woke
from rollout_sched.core.model.model import DeliveredSample, Segment
from rollout_sched.live.driver import Driver, Front
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.settings import Settings
from tests import virtual_net
from tests.core.told import make_scheduler
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

    def defer(self, call: Callable[..., object], *arguments: Any) -> None:
        call(*arguments)

    def client(self, instance: str) -> Scripted:
        return self.instance

    def unverified(self, instance: str) -> None:
        return None

    def suspect(self, instance: str, of: str) -> None: ...

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


async def test_front_carries_out_request_actions_only() -> None:
    front = Front(Link(), Settings(), "run")  # type: ignore[arg-type]
    assert set(front.orders) == {Dispatch, Interrupt, Deliver, Answer, Discard}


async def test_a_request_from_its_dispatch_to_its_answer() -> None:
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


async def test_interrupted_request_is_aborted_at_its_instance() -> None:
    stage = Stage()
    await stage.link.instance.order()
    stage.order(Interrupt("r", 1, "i0"))
    await until(lambda: ("abort", "run-1") in stage.link.instance.calls)
    await stage.front.close()


async def test_final_discard_fails_the_request() -> None:
    stage = Stage()
    stage.order(Discard("r", 0, "failed", ends=True))
    await until(lambda: stage.client.failures)
    assert "r" not in stage.front.payloads
    await stage.front.close()


async def test_breakdown_fails_all_waiting_requests() -> None:
    stage = Stage()
    stage.front.fail_all(RuntimeError("the scheduler is gone"))
    await until(lambda: stage.client.failures)
    assert "the scheduler is gone" in stage.client.failures[0]
    await stage.front.close()


async def test_closing_cancels_attempts_silently() -> None:
    stage = Stage()
    await stage.link.instance.order()
    await stage.front.close()
    assert stage.link.instance.cancelled == ["run-1"]
    assert stage.link.told == []
    assert stage.client.failures == []


def play(scene: Callable[[Driver, Scripted], Any]) -> None:
    async def run() -> None:
        driver, instance = Driver(make_scheduler(), settings=Settings(poll_s=1000.0)), Scripted()
        await driver.add_instance(instance)
        instance.calls.clear()
        try:
            async with asyncio.timeout(10):
                await scene(driver, instance)
        finally:
            await driver.close()

    virtual_net.run(run())


def test_instance_actions_go_to_their_supervisor() -> None:
    async def scene(driver: Driver, instance: Scripted) -> None:
        async def load(client: Any, version: int) -> None:
            instance.calls.append(f"load {version}")

        driver.fleet.loader = load
        orders = driver.fleet.orders
        orders[act.Pause](act.Pause("i0", "keep", True))
        orders[act.UpdateWeights](act.UpdateWeights("i0", 0))
        orders[act.Resume](act.Resume("i0"))
        await until(lambda: "resume" in instance.calls)
        assert instance.calls == [("pause", "keep", True), "load 0", ("version", 0), "resume"]
        orders[act.Release](act.Release("i0"))
        assert driver.supervisors["i0"].membership.drained.is_set()

    play(scene)


def test_failing_trainer_callback_delays_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene(driver: Driver, instance: Scripted) -> None:
        heard: list[str] = []

        def lent(name: str) -> None:
            heard.append(name)
            raise RuntimeError("no memory")

        driver.fleet.borrower = SimpleNamespace(lent=lent, reclaimed=heard.append)
        driver.fleet.orders[act.Lend](act.Lend("i0"))
        await until(lambda: heard)
        driver.fleet.orders[act.Reclaim](act.Reclaim("i0"))
        driver.pump.tell(Woke())
        assert heard == ["i0", "i0"]
        driver.supervisors["i0"].control.take_back()
        await until(lambda: "resume" in instance.calls)

    play(scene)
    assert "was lent to the trainer, whose callback failed" in caplog.text


def test_no_orders_to_an_absent_instance() -> None:
    async def scene(driver: Driver, instance: Scripted) -> None:
        with pytest.raises(CallerError, match="no instance 'i9' here; there are i0"):
            driver.fleet.orders[act.Resume](act.Resume("i9"))

    play(scene)
