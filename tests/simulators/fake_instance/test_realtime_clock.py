"""Simulated time on a loop, and the alarm that rings when it is due."""

from __future__ import annotations

import asyncio
import math

from rollout_sched.simulators.fake_instance.instance import Alarm, RealtimeClock
from rollout_sched.simulators.replay import virtual_loop


def test_time_runs_as_fast_as_told_and_never_back() -> None:
    async def scene() -> None:
        clock = RealtimeClock(4.0)
        await asyncio.sleep(2.0)
        assert clock.tick() == 8.0
        assert clock.reach(9.0) == 9.0  # a timer that came early
        assert clock.tick() == 9.0
        await asyncio.sleep(1.0)
        assert clock.reach(9.0) == 12.0

    virtual_loop.run(scene())


def test_another_speed_goes_on_from_where_it_is() -> None:
    async def scene() -> None:
        clock = RealtimeClock(4.0)
        await asyncio.sleep(2.0)
        clock.set_speed(0.5)
        assert clock.tick() == 8.0
        await asyncio.sleep(2.0)
        assert clock.tick() == 9.0
        clock.set_speed(10.0)
        await asyncio.sleep(1.0)
        assert clock.tick() == 19.0

    virtual_loop.run(scene())


def test_an_alarm_rings_when_due_and_not_once_it_is_closed() -> None:
    async def scene() -> None:
        due = [math.inf]
        rung: list[float] = []
        alarm = Alarm(RealtimeClock(2.0), lambda: due[0], rung.append)
        alarm.change()
        await asyncio.sleep(1.0)
        assert rung == []
        due[0] = 10.0
        alarm.change()
        await asyncio.sleep(1.0)
        due[0] = 6.0  # earlier than planned
        alarm.change()
        await asyncio.sleep(1.5)
        assert rung == [6.0]
        await asyncio.sleep(9.0)
        assert rung == [6.0]
        due[0] = 40.0
        alarm.change()
        await asyncio.sleep(0.0)
        alarm.close()
        alarm.change()
        await asyncio.sleep(30.0)
        assert rung == [6.0]

    virtual_loop.run(scene())
