"""The host judges the results of ordered attempts and reports each to the scheduler once."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from rollout_sched.core.model.actions import Interrupt
from rollout_sched.link.protocol import Dispatch, Reach, Serves
from tests.link.stage import PROMPT, Stage, run
from tests.live.scripted import until


def test_an_order_waits_until_its_instance_may_be_sent_something() -> None:
    async def scene() -> None:
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

    run(scene)


def test_one_that_was_never_sent_is_interrupted_here() -> None:
    async def scene() -> None:
        async with Stage(1) as stage:
            stage.driver.supervisors["i0"].health.verified.clear()
            stage.ask()
            ordered = stage.fronts[0].connected.ordered
            await until(lambda: len(ordered.attempts) == 1)
            (before,) = ordered.attempts.every()
            ordered.interrupt(Interrupt(stage.request, before.dispatch.attempt, "i0"))
            assert ordered.attempts.get(before.dispatch.attempt) is None
            assert not stage.scheduler.books.anomalies
            await asyncio.sleep(0.01)
            assert not stage.instance.orders

    run(scene)


def test_a_front_hears_of_an_instance_and_its_version_once() -> None:
    async def scene() -> None:
        async with Stage(1) as stage:
            connected = stage.fronts[0].connected
            said: list[object] = []
            connected.order = said.append  # type: ignore[method-assign,assignment]
            connected.ordered._order = said.append
            for _ in range(2):
                stage.ask()
            await until(lambda: len(said) == 4)
            assert said[:2] == [Reach("i0", ""), Serves("i0", 0)]
            assert [type(one) for one in said[2:]] == [Dispatch, Dispatch]

    run(scene)


def test_a_front_hears_of_one_that_has_joined_anew_and_of_its_key() -> None:
    async def scene() -> None:
        async with Stage(1) as stage:
            reached = stage.fronts[0].clients.reached
            stage.ask()
            await until(lambda: reached == [("i0", "")])
            stage.instance.api_key = "k"  # type: ignore[attr-defined]
            await stage.driver.remove_instance("i0")
            await stage.driver.add_instance(stage.instance)
            await until(lambda: reached == [("i0", ""), ("i0", "k")])

    run(scene)


def test_a_front_leaves_an_instance_that_is_gone_once_and_reaches_it_anew() -> None:
    async def scene() -> None:
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

    run(scene)


def test_an_answer_that_nobody_could_ask_about_is_not_gone_on_from() -> None:
    """Its front dies while the instance, whose versions the answer contradicts, is asked."""

    async def scene() -> None:
        async with Stage(2, batching={"use": "sync"}) as stage:
            supervisor = stage.driver.supervisors["i0"]
            assert supervisor.description is not None
            supervisor.admission.description = replace(
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

    run(scene)
