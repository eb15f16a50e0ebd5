"""The clock of a run: nothing is early, nothing goes back."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.live.event_pump import RunClock
from rollout_sched.simulators.replay import virtual_loop


def test_it_counts_from_its_making() -> None:
    async def scene() -> None:
        await asyncio.sleep(3.0)
        clock, told = RunClock(), list[str]()
        clock.call_at(0.5, told.append, "half")
        await asyncio.sleep(0.25)
        assert (clock.now, told) == (0.25, [])
        await asyncio.sleep(0.5)
        assert told == ["half"]

    virtual_loop.run(scene())


@pytest.mark.parametrize(("began", "earlier"), [(5.8, 0.43), (18.03, 0.61), (0.0, 7.0)])
def test_it_goes_on_from_just_where_an_earlier_run_has_ended(began: float, earlier: float) -> None:
    """Not from a rounding before it, at which that run could not be restored."""

    async def scene() -> None:
        await asyncio.sleep(began)
        clock, times = RunClock(), list[float]()
        clock.go_on_from(earlier)
        assert clock.now == earlier
        clock.call_at(earlier + 0.13, lambda: times.append(clock.now))
        await asyncio.sleep(0.2)
        assert len(times) == 1
        assert times[0] >= earlier + 0.13, "a scheduler would ask to be woken again, without end"

    virtual_loop.run(scene())
