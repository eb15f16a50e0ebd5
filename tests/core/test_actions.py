"""Actions: both drivers carry out whatever the scheduler may order."""

from __future__ import annotations

import asyncio
from typing import get_args

from rollout_sched.core import actions as act
from rollout_sched.live.driver import Driver
from rollout_sched.simulators.replay.closed_loop import ClosedLoop
from tests.core.told import make_scheduler

EVERY_KIND = set(get_args(act.Action))

#: What a trace and a scenario hold no reason for: no simulated instance is told to leave, and
#: nobody waits for a single response.
LIVE_ONLY = {act.Release, act.Answer}


def test_every_action_of_the_module_is_one_that_may_be_ordered() -> None:
    made = {
        kind
        for kind in vars(act).values()
        if isinstance(kind, type) and issubclass(kind, act._Action) and kind is not act._Action
    }
    assert made == EVERY_KIND


def test_the_live_driver_carries_out_every_action() -> None:
    async def scene() -> None:
        driver = Driver(make_scheduler())
        assert set(driver._do) == EVERY_KIND
        await driver.close()

    asyncio.run(scene())


def test_the_closed_loop_carries_out_every_action_that_a_simulation_can_cause() -> None:
    assert set(ClosedLoop._DO) == EVERY_KIND - LIVE_ONLY


def test_a_discard_does_not_end_a_request_unless_it_says_so() -> None:
    assert act.Discard("a/0", 7, "surplus").ends is False
