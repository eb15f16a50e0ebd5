"""Bursts are timed, and what would spoil their times is told with what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollout_sched.calibration.bursts import Burst, BurstTime
from rollout_sched.calibration.prober import IDS, Prober
from rollout_sched.core.errors import CallerError
from rollout_sched.live.ports import InstanceError, Order, Output, RequestRejected
from rollout_sched.simulators.fake_instance.instance import RealtimeInstance
from rollout_sched.simulators.instance.step_time import StepTime
from tests.calibration import virtual
from tests.calibration.virtual import COST

Answer = Callable[[Order], Awaitable[Output]]


def probed(burst: Burst, answer: Answer | None = None, before: Any = None) -> list[BurstTime]:
    async def scene() -> list[BurstTime]:
        server = virtual.instance()
        if answer is not None:
            server.generate = answer  # type: ignore[method-assign, assignment]
        if before is not None:
            before(server)
        return await Prober([server], 1).burst(burst)

    return virtual.in_virtual_time(scene)


def test_a_burst_takes_what_its_steps_take() -> None:
    time = StepTime(COST)
    by_hand = time.step(0, 3 * 40, 0, 3 * 40 * 40 / 2, 3) + time.jump(4, 3, 3 * 41)
    assert [list(time[:3]) for time in probed(Burst(3, 40, 5))] == [[pytest.approx(by_hand)] * 3]


def test_the_first_answer_and_the_last() -> None:
    async def answer(order: Order) -> Output:
        number = int(order.id.rpartition("-")[2])
        await asyncio.sleep(1.0 + number)
        return Output([1] * order.max_new_tokens, None, "length")

    (time,) = probed(Burst(4, 20, 2), answer)
    assert time[:3] == (pytest.approx(2.0), pytest.approx(5.0), pytest.approx(3.5))


def test_no_two_prompts_are_alike() -> None:
    seen: list[tuple[int, ...]] = []

    async def answer(order: Order) -> Output:
        seen.append(tuple(order.token_ids))
        return Output([1] * order.max_new_tokens, None, "length")

    probed(Burst(8, 20, 2), answer)
    assert len(set(seen)) == 8
    assert {token for prompt in seen for token in prompt} <= set(IDS)


def test_a_response_that_ends_by_itself() -> None:
    async def answer(order: Order) -> Output:
        return Output([1] * 3, None, "stop")

    with pytest.raises(CallerError, match="does not honour ignore_eos"):
        probed(Burst(1, 20, 5), answer)


def test_aborted_request_is_an_error() -> None:
    async def answer(order: Order) -> Output:
        return Output([1], None, "abort")

    with pytest.raises(InstanceError, match="aborts"):
        probed(Burst(1, 20, 5), answer)


def test_lost_request_is_an_error() -> None:
    async def answer(order: Order) -> Output:
        if order.id.endswith("-2"):
            await asyncio.Event().wait()
        return Output([1] * order.max_new_tokens, None, "length")

    with pytest.raises(InstanceError, match="has lost requests"):
        probed(Burst(3, 20, 5), answer)


def test_slow_server_is_waited_for() -> None:
    (time,) = probed(Burst(1, 20, 5), before=lambda server: server.clocked.set_speed(1e-4))
    assert time.last_s > 60


def test_a_server_that_takes_no_token_ids() -> None:
    async def answer(order: Order) -> Output:
        raise RequestRejected("prompt: a text is expected")

    with pytest.raises(CallerError, match="vLLM's own address"):
        probed(Burst(1, 20, 5), answer)


def test_others_who_are_served_meanwhile_spoil_a_time() -> None:
    others: list[asyncio.Task[Output]] = []

    def before(server: RealtimeInstance) -> None:
        async def theirs() -> Output:
            await asyncio.sleep(0.02)
            return await server.generate(Order("x", [1], 4, "", {"ignore_eos": True}))

        others.append(asyncio.ensure_future(theirs()))

    assert probed(Burst(1, 20, 50), before=before) == []


def test_others_who_end_soon_are_waited_for() -> None:
    async def scene() -> list[BurstTime]:
        server = virtual.instance()
        order = Order("x", [1], 400, "", {"ignore_eos": True})
        theirs = asyncio.ensure_future(server.generate(order))
        await asyncio.sleep(0.01)
        times = await Prober([server], 1).burst(Burst(1, 20, 5))
        assert theirs.done()
        return times

    assert len(virtual.in_virtual_time(scene)) == 1


def test_the_others_of_a_burst_are_not_left_behind_when_one_fails() -> None:
    left = 0

    async def answer(order: Order) -> Output:
        nonlocal left
        if order.id.endswith("-1"):
            raise InstanceError("it broke")
        left += 1
        try:
            await asyncio.sleep(1000)
        finally:
            left -= 1
        raise AssertionError

    with pytest.raises(InstanceError, match="it broke"):
        probed(Burst(3, 20, 5), answer)
    assert left == 0


def test_a_cache_is_told_by_time_where_nothing_is_counted() -> None:
    async def scene(seconds: list[float]) -> bool | None:
        server = virtual.instance()
        idle = await server.gauges()

        async def gauges() -> object:
            return idle

        async def answer(order: Order) -> Output:
            await asyncio.sleep(seconds.pop(0))
            return Output([1], None, "length")

        server.gauges = gauges  # type: ignore[method-assign, assignment]
        server.generate = answer  # type: ignore[method-assign, assignment]
        return await Prober([server], 1).finds_prefixes(server, 1000)

    assert virtual.in_virtual_time(lambda: scene([0.5, 0.02])) is True
    assert virtual.in_virtual_time(lambda: scene([0.5, 0.45])) is None
