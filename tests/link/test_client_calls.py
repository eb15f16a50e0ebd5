"""Clients' requests at a front: the scheduler's answer reaches the waiting client once."""

from __future__ import annotations

from rollout_sched.core.model.actions import Answer
from rollout_sched.core.model.records import DeliveredSample
from rollout_sched.link.protocol import Refused
from tests.link.stage import Stage, run
from tests.live.scripted import until


def test_each_has_an_id_of_its_own_and_is_gone_when_it_has_ended() -> None:
    async def scene() -> None:
        async with Stage(1) as stage:
            calls = stage.fronts[0].remote.calls
            first, second = stage.ask(), stage.ask()
            assert [call.name for call in calls.every()] == ["run.f0.1", "run.f0.2"]
            assert calls["run.f0.1"].payload is first
            await stage.instance.answer(0, [7])
            await until(lambda: first.heard)
            assert [call.payload for call in calls.every()] == [second]
            calls.withdraw("run.f0.2")
            await until(lambda: second.heard)
            assert not len(calls)
            calls.withdraw("run.f0.2")

    run(scene)


def test_what_is_refused_is_told_and_what_is_over_is_not_answered_again() -> None:
    async def scene() -> None:
        async with Stage(1) as stage:
            front = stage.fronts[0]
            caller = stage.ask()
            await stage.instance.order(0)
            front.connected.order(Refused(stage.request, "there is no room"))
            late = DeliveredSample(stage.request, "g", 0, 3, 0, (), 0, "stop")
            front.connected.order(Answer(late))
            await until(lambda: caller.heard)
            assert caller.heard == [("failed", "there is no room")]
            assert not len(front.remote.calls)
            assert not front.broken

    run(scene)
