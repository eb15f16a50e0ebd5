"""The supervisors judge what fronts report, and orders can wait."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.core.model.events import RequestFinished, RequestSubmitted, RequestWithdrawn
from rollout_sched.link.protocol import FrameMissing, Reports, encode
from rollout_sched.live.ports import ConnectionBroken
from rollout_sched.live.settings import Settings
from tests.link.stage import Stage, run
from tests.live.scripted import until


def test_reports_of_another_epoch_are_refused() -> None:
    async def scene() -> None:
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

    run(scene)


def test_a_frame_that_comes_twice_is_refused_and_one_that_is_missing_ends_the_connection() -> None:
    async def scene() -> None:
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

    run(scene)


def test_what_contradicts_itself_is_thrown_away_at_the_front_and_made_again() -> None:
    async def scene() -> None:
        async with Stage(1) as stage:
            caller = stage.ask()
            await stage.instance.answer(0, [7, 8], spans=((3, 1), (1, 1)))
            await stage.instance.answer(1, [9])
            await until(lambda: caller.heard)
            assert caller.response_ids == [9]
            assert stage.driver.versions.contradictions == {"disordered": 1}

    run(scene)


def test_an_abort_that_nobody_asked_for_lets_the_instance_be_looked_at() -> None:
    async def scene() -> None:
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

    run(scene)


def test_nothing_is_sent_before_an_instance_has_answered_a_poll_after_a_failure() -> None:
    async def scene() -> None:
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

    run(scene)


def test_what_the_scheduler_refuses_its_client_hears_of() -> None:
    async def scene() -> None:
        async with Stage(1) as stage:
            caller = stage.ask()
            refused = type(caller)()
            stage.fronts[0].remote.calls.submit(refused, -1, 9)
            await until(lambda: refused.heard)
            assert refused.heard[0][0] == "failed"
            await stage.instance.answer(0, [7])
            await until(lambda: caller.heard)

    run(scene)


def test_an_answer_to_who_has_gone_goes_nowhere() -> None:
    async def scene() -> None:
        async with Stage(1) as stage:
            caller = stage.ask()
            await stage.instance.answer(0, [7])
            await until(lambda: caller.heard)
            stage.fronts[0].remote.calls.withdraw(stage.request)
            await asyncio.sleep(0.01)
            assert not stage.scheduler.books.anomalies

    run(scene)
