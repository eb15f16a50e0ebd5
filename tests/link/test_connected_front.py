"""The supervisors judge what fronts report, and orders can wait."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from rollout_sched.core.model.actions import Interrupt
from rollout_sched.core.model.events import RequestFinished, RequestSubmitted, RequestWithdrawn
from rollout_sched.link.protocol import (
    ConnectInstance,
    Dispatch,
    FrameMissing,
    InstanceVersion,
    Reports,
    encode,
)
from rollout_sched.live.ports import ConnectionBroken
from rollout_sched.live.settings import Settings
from tests.link.fixtures import PROMPT, Stage
from tests.live.scripted import until


async def test_reports_of_another_epoch_are_refused() -> None:
    async with Stage(1) as stage:
        front = stage.fronts[0].connected
        front.receive(encode(Reports("old", 1, [])))
        assert front.refused == 1
        stage.ask()
        await stage.instance.order()
        (running,) = front.attempts.every()
        request, number = running.dispatch.request, running.dispatch.attempt
        front.receive(encode(Reports("old", 1, [RequestFinished(request, number, 3)])))
        assert front.refused == 2
        assert len(front.attempts) == 1


async def test_repeated_frame_is_refused_and_missing_frame_ends_the_connection() -> None:
    async with Stage(1) as stage:
        front, epoch = stage.fronts[0].connected, stage.host.epoch
        frame = encode(Reports(epoch, 1, [RequestSubmitted("f0.x", "", 3, 9)]))
        front.receive(frame)
        front.receive(frame)
        assert front.refused == 1
        assert len(front.attempts) == 1
        taken = encode(Reports(epoch, 2, [RequestSubmitted("f0.x", "", 3, 9)]))
        front.receive(taken)
        assert front.refused == 2
        await asyncio.sleep(0)
        assert len(front.attempts) == 1, "the running attempt continues"
        with pytest.raises(FrameMissing):
            front.receive(encode(Reports(epoch, 4, [RequestWithdrawn("f0.x")])))
        front.receive(encode(Reports(epoch, 3, [RequestWithdrawn("f0.x")])))
        await until(lambda: not stage.host.owned)


async def test_contradictory_answer_is_discarded_and_retried() -> None:
    async with Stage(1) as stage:
        caller = stage.ask()
        await stage.instance.answer(0, [7, 8], spans=((3, 1), (1, 1)))
        await stage.instance.answer(1, [9])
        await until(lambda: caller.heard)
        assert caller.response_ids == [9]
        assert stage.driver.versions.contradictions == {"disordered": 1}


async def test_an_abort_that_nobody_asked_for_lets_the_instance_be_looked_at() -> None:
    async with Stage(1, settings=Settings(poll_s=1000.0)) as stage:
        polls = []
        usual = stage.instance.gauges

        async def gauges() -> object:
            polls.append(1)
            return await usual()

        stage.instance.gauges = gauges  # type: ignore[method-assign,assignment]
        caller = stage.ask()
        await stage.instance.answer(0, [7, 8], "abort")
        await until(lambda: polls)
        await stage.instance.answer(1, [9])
        await until(lambda: caller.heard)
        assert caller.response_ids == [7, 8, 9]


async def test_nothing_is_sent_before_an_instance_has_answered_a_poll_after_a_failure() -> None:
    async with Stage(1, settings=Settings(poll_s=0.01, misses=10**6)) as stage:
        first = stage.ask()
        await stage.instance.order()
        stage.instance.mute = True
        await stage.instance.fail(0, ConnectionBroken("reset"))
        attempts = stage.fronts[0].connected.attempts
        await until(lambda: any(not one.reads for one in attempts.every()))
        await asyncio.sleep(0.02)
        assert len(stage.instance.orders) == 1
        gone = stage.ask()
        await until(lambda: len(attempts) == 2)
        stage.fronts[0].remote.calls.withdraw(stage.request)
        await until(lambda: gone.heard)
        stage.instance.mute = False
        await stage.instance.answer(1, [5])
        await until(lambda: first.heard)
        assert first.response_ids == [5]
        assert len(stage.instance.orders) == 2, "the withdrawn one was never sent"


async def test_client_hears_of_a_refusal() -> None:
    async with Stage(1) as stage:
        caller = stage.ask()
        refused = type(caller)()
        stage.fronts[0].remote.calls.submit(refused, 0, 9)
        await until(lambda: refused.heard)
        assert refused.heard[0][0] == "failed"
        await stage.instance.answer(0, [7])
        await until(lambda: caller.heard)


async def test_answer_to_a_gone_client_is_dropped() -> None:
    async with Stage(1) as stage:
        caller = stage.ask()
        await stage.instance.answer(0, [7])
        await until(lambda: caller.heard)
        stage.fronts[0].remote.calls.withdraw(stage.request)
        await asyncio.sleep(0.01)
        assert not stage.scheduler.state.anomalies


async def test_an_order_waits_until_its_instance_is_verified() -> None:
    async with Stage(1) as stage:
        verified = stage.driver.supervisors["i0"].health.verified
        verified.clear()
        caller = stage.ask()
        await until(lambda: len(stage.fronts[0].connected.attempts) == 1)
        await asyncio.sleep(0.01)
        assert not stage.instance.orders
        verified.set()
        await stage.instance.answer(0, [7])
        await until(lambda: caller.heard)


async def test_unsent_order_is_interrupted_at_the_host() -> None:
    async with Stage(1) as stage:
        stage.driver.supervisors["i0"].health.verified.clear()
        stage.ask()
        connected = stage.fronts[0].connected
        await until(lambda: len(connected.attempts) == 1)
        (before,) = connected.attempts.every()
        connected.interrupt(Interrupt(stage.request, before.dispatch.attempt, "i0"))
        assert connected.attempts.get(before.dispatch.attempt) is None
        assert not stage.scheduler.state.anomalies
        await asyncio.sleep(0.01)
        assert not stage.instance.orders


async def test_a_front_hears_of_an_instance_and_its_version_once() -> None:
    async with Stage(1) as stage:
        connected = stage.fronts[0].connected
        said: list[object] = []
        connected.order = said.append  # type: ignore[method-assign,assignment]
        for _ in range(2):
            stage.ask()
        await until(lambda: len(said) == 4)
        assert said[:2] == [ConnectInstance("i0", ""), InstanceVersion("i0", 0)]
        assert [type(one) for one in said[2:]] == [Dispatch, Dispatch]


async def test_a_front_hears_of_a_rejoined_instance_and_its_key() -> None:
    async with Stage(1) as stage:
        reached = stage.fronts[0].clients.reached
        stage.ask()
        await until(lambda: reached == [("i0", "")])
        stage.instance.api_key = "k"  # type: ignore[attr-defined]
        await stage.driver.remove_instance("i0")
        await stage.driver.add_instance(stage.instance)
        await until(lambda: reached == [("i0", ""), ("i0", "k")])


async def test_a_front_leaves_an_instance_that_is_gone_once_and_reaches_it_anew() -> None:
    async with Stage(1) as stage:
        clients = stage.fronts[0].clients

        async def stay(number: int) -> None:
            stage.ask()
            await until(lambda: len(clients.reached) == number)
            await stage.driver.remove_instance("i0")
            await until(lambda: len(clients.left) == number)
            assert not stage.fronts[0].remote.calls._versions
            await stage.driver.add_instance(stage.instance)

        await stay(1)
        await stay(2)
        await until(lambda: len(clients.reached) == 3)
        await stage.fronts[0].remote.close()
        assert clients.left == ["i0"] * 3


async def test_an_answer_that_nobody_could_ask_about_is_not_gone_on_from() -> None:
    """Its front dies while the instance, whose versions the answer contradicts, is asked."""
    async with Stage(2, batching={"use": "sync"}) as stage:
        supervisor = stage.driver.supervisors["i0"]
        assert supervisor.description is not None
        supervisor.description = replace(
            supervisor.description, capabilities=frozenset({"weight_info"})
        )
        asked = asyncio.Event()

        async def never() -> int:
            asked.set()
            return await asyncio.Future()

        stage.instance.weight_version = never  # type: ignore[method-assign]
        stage.group()
        await stage.instance.answer(0, [7, 8], spans=((5, 2),))
        await asked.wait()
        stage.host.disconnect(stage.fronts[0].connected)
        order = await stage.instance.order(1)
        assert order.token_ids == PROMPT
        await stage.instance.answer(1, [9])
        await until(lambda: stage.batches)
        ((_, payloads),) = stage.batches
        assert [payload.response_ids for payload in payloads] == [[9]]
