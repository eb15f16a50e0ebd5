"""Who waits for a pause hears of it once, and the gauges stand still meanwhile."""

from __future__ import annotations

import pytest

from rollout_sched.live.ports import InstanceError
from rollout_sched.simulators.fake_instance.instance import Pauses
from rollout_sched.simulators.instance.model import SimRequest
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.replay import virtual_loop
from tests.simulators.fake_instance.served import SPEC


def running(attempt: int) -> SimRequest:
    return SimRequest(attempt, 4, 100, 100, "prompt", 4, attempt)


def test_gauges_stand_still_from_when_a_pause_is_asked_for() -> None:
    async def scene() -> None:
        engine = SimInstance(SPEC)
        engine.submit(running(1), 0.0)
        engine.advance(2.5)
        pauses = Pauses(engine)
        asked = pauses.ask("keep")
        engine.submit(running(2), 2.5)
        engine.advance(9.5)
        assert pauses.gauges().running == 1
        assert not asked.done()
        pauses.confirm("keep")
        assert asked.done()
        assert pauses.gauges().running == 1
        pauses.end()
        assert pauses.gauges().running == 2

    virtual_loop.run(scene())


def test_those_who_let_requests_finish_see_the_gauges_move_until_then() -> None:
    async def scene() -> None:
        engine = SimInstance(SPEC)
        pauses = Pauses(engine)
        pauses.ask("wait")
        engine.submit(running(1), 0.0)
        engine.advance(2.5)
        assert pauses.gauges().running == 1

    virtual_loop.run(scene())


def test_pauses_of_two_modes_are_told_apart_and_all_fail_at_the_end() -> None:
    async def scene() -> None:
        pauses = Pauses(SimInstance(SPEC))
        wait, keep, other = pauses.ask("wait"), pauses.ask("keep"), pauses.ask("keep")
        pauses.confirm("keep")
        assert [asked.done() for asked in (wait, keep, other)] == [False, True, False]
        pauses.fail(InstanceError("closed"))
        for asked in (wait, other):
            with pytest.raises(InstanceError):
                await asked
        await keep

    virtual_loop.run(scene())
