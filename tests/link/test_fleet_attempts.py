"""A supervisor's calls for the attempts of its instance reach them at every front."""

from __future__ import annotations

from rollout_sched.core.model.events import InstanceLost, TokensArrived
from rollout_sched.link.host import LOSING
from rollout_sched.live.requests.token_payload import TokenPayload
from tests.link.stage import PROMPT, Stage, run
from tests.live.scripted import until


def test_attempts_of_all_fronts_are_under_way_there() -> None:
    async def scene() -> None:
        async with Stage(2) as stage:
            stage.driver.submit(TokenPayload(PROMPT, {}), 3, 9)
            stage.ask(0)
            stage.ask(1)
            await stage.instance.order(2)
            attempts = stage.driver.fleet.attempts
            assert [one.dispatch.attempt for one in attempts.on("i0")] == [1, 2, 3]
            assert all(one.reads for one in attempts.on("i0"))
            assert attempts.on("i1") == []

    run(scene)


def test_one_is_stopped_where_it_is() -> None:
    async def scene() -> None:
        async with Stage(1) as stage:
            stage.driver.submit(TokenPayload(PROMPT, {}), 3, 9)
            stage.ask()
            await stage.instance.order(1)
            for one in stage.driver.fleet.attempts.on("i0"):
                stage.driver.fleet.attempts.stop(one.dispatch.attempt, "it stands still")
            await until(lambda: len([c for c in stage.instance.calls if c[0] == "abort"]) >= 2)
            aborted = [call for call in stage.instance.calls if call[0] == "abort"]
            assert {call[1] for call in aborted} == {"run-1", "run-2"}

    run(scene)


def test_a_pause_that_aborts_waits_for_all_fronts() -> None:
    async def scene() -> None:
        async with Stage(2) as stage:
            stage.ask(0)
            stage.ask(1)
            await stage.instance.order(1)
            await stage.driver.fleet.attempts.answered("i0")
            assert {call[1] for call in stage.instance.calls if call[0] == "abort"} == {
                "run-1",
                "run-2",
            }
            assert not stage.driver.fleet.attempts.on("i0") or len(stage.instance.orders) > 2

    run(scene)


def test_a_loss_is_told_when_all_have_said_what_their_streams_brought() -> None:
    async def scene() -> None:
        async with Stage(2) as stage:
            seen: list[object] = []
            stage.driver.pump.observers.append(lambda now, event, actions: seen.append(event))
            stage.ask(0)
            stage.ask(1)
            await stage.instance.order(1)
            await stage.instance.stream(0, [7, 8])
            await stage.instance.stream(1, [7])
            stage.driver.fleet.lose("i0", "it died")
            stage.driver.fleet.lose("i0", "it died again")
            assert stage.driver.versions.gate("i0") == LOSING
            await until(lambda: any(isinstance(event, InstanceLost) for event in seen))
            assert stage.driver.versions.gate("i0") == ""
            brought = [event.tokens for event in seen if isinstance(event, TokensArrived)]
            assert sorted(brought) == [1, 2]
            assert sum(isinstance(event, InstanceLost) for event in seen) == 1
            assert not stage.scheduler.books.fleet.attempts

    run(scene)


def test_a_front_that_dies_meanwhile_is_not_waited_for() -> None:
    async def scene() -> None:
        async with Stage(1) as stage:
            stage.ask(0)
            await stage.instance.order()
            stage.fronts[0].dead = True  # it receives nothing from now on
            stage.driver.fleet.lose("i0", "it died")
            assert stage.driver.view.instance("i0") is not None
            stage.host.disconnect(stage.fronts[0].connected)
            assert stage.driver.view.instance("i0") is None

    run(scene)


def test_what_has_streamed_before_a_restart_was_noticed_is_not_gone_on_from() -> None:
    async def scene() -> None:
        async with Stage(1) as stage:
            caller = stage.ask()
            await stage.instance.order()
            await stage.instance.stream(0, [7, 8])
            (one,) = stage.driver.fleet.attempts.on("i0")
            stage.driver.fleet.attempts.disbelieve(one.dispatch.attempt)
            await stage.instance.answer(1, [9])
            await until(lambda: caller.heard)
            assert caller.response_ids == [9]

    run(scene)
