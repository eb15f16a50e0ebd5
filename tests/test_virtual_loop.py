"""An event loop that never waits."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests import virtual_loop
from tests.virtual_loop import Stuck


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> float:
        await asyncio.sleep(1000.0)
        await asyncio.sleep(0.5)
        return asyncio.get_running_loop().time()

    before = time.monotonic()
    assert virtual_loop.run(main()) == 1000.5
    assert time.monotonic() - before < 10


def test_equal_times_go_in_order_of_scheduling() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        seen: list[int] = []
        for number in range(50):
            loop.call_at(3.0, seen.append, number)
        await asyncio.sleep(4.0)
        return seen

    assert virtual_loop.run(main()) == list(range(50))


def test_work_set_off_by_a_timer_precedes_the_next_timer() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        seen: list[str] = []

        def first() -> None:
            seen.append("first")
            loop.call_soon(loop.call_soon, seen.append, "set off")

        loop.call_at(1.0, first)
        loop.call_at(1.0, seen.append, "second")
        await asyncio.sleep(2.0)
        return seen

    assert virtual_loop.run(main()) == ["first", "set off", "second"]


def test_cancelled_timers_do_not_move_time() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(50.0, pytest.fail, "it was cancelled").cancel()
        async with asyncio.timeout(100.0):
            await asyncio.sleep(1.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3.0):
                await loop.create_future()
        return loop.time()

    assert virtual_loop.run(main()) == 4.0


def test_tasks_events_queues_and_gather_work() -> None:
    async def main() -> list[Any]:
        queue: asyncio.Queue[int] = asyncio.Queue()

        async def produce() -> None:
            for number in range(3):
                await asyncio.sleep(1.0)
                await queue.put(number)

        async def consume() -> list[int]:
            return [await queue.get() for _ in range(3)]

        return await asyncio.gather(consume(), produce())

    assert virtual_loop.run(main()) == [[0, 1, 2], None]


def test_a_standstill_is_an_error() -> None:
    async def main() -> None:
        await asyncio.sleep(2.0)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stuck, match=r"at 2\.0 s"):
        virtual_loop.run(main())


def test_callback_errors_are_raised() -> None:
    async def main() -> None:
        def fail() -> None:
            raise ZeroDivisionError

        asyncio.get_running_loop().call_later(1.0, fail)
        await asyncio.sleep(2.0)

    with pytest.raises(ZeroDivisionError):
        virtual_loop.run(main())


def test_running_tasks_are_cancelled_at_the_end() -> None:
    ends: list[str] = []

    async def linger() -> None:
        try:
            await asyncio.sleep(1000.0)
        finally:
            ends.append("cancelled")

    async def main() -> None:
        task = asyncio.create_task(linger())
        await asyncio.sleep(1.0)
        assert not task.done()

    virtual_loop.run(main())
    assert ends == ["cancelled"]
