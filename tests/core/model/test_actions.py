"""Actions: both drivers carry out whatever the scheduler may order."""

from __future__ import annotations

import asyncio
from typing import get_args

from rollout_sched.core.model import actions as act
from rollout_sched.live.driver import Driver
from rollout_sched.simulators.replay.closed_loop import ClosedLoop
from rollout_sched.simulators.replay.workload import Workload
from tests.core.told import make_scheduler
from tests.helpers import make_scenario, make_trace

EVERY_KIND = set(get_args(act.Action))


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
        assert set(driver.pump._carry_out) == EVERY_KIND
        await driver.close()

    asyncio.run(scene())


def test_the_closed_loop_carries_out_every_action() -> None:
    scenario = make_scenario()
    workload = Workload(make_trace({"a": [3]}), scenario.job)
    assert set(ClosedLoop(make_scheduler(), workload, scenario)._do) == EVERY_KIND


def test_a_discard_does_not_end_a_request_unless_it_says_so() -> None:
    assert act.Discard("a/0", 7, "surplus").ends is False
