"""What is missing where a trainer waits for what does not come by itself."""

from __future__ import annotations

import asyncio
from typing import Any

from rollout_sched.live import live_scheduler as wait_reasons
from tests.live.scripted import until
from tests.live.test_trainer_session import Stage, load, prompt, run


def test_nobody_has_joined() -> None:
    async def scene() -> None:
        async with Stage() as stage:
            assert wait_reasons.weights(stage.driver) == ""
            stage.driver.fleet.lose("i0", "it was restarted")
            assert wait_reasons.batch(stage.driver).startswith("no instance has joined: i0")
            assert wait_reasons.weights(stage.driver) == wait_reasons.batch(stage.driver)
            await stage.driver.remove_instance("i0")
            assert "add_instance" in wait_reasons.batch(stage.driver)

    run(scene())


def test_prompts_are_missing_until_they_are_here() -> None:
    async def scene() -> None:
        async with Stage(prompts_per_step=2) as stage:
            stage.trainer.submit([prompt("a")])
            asking = stage.ask()
            await asyncio.sleep(0)
            said = wait_reasons.batch(stage.driver)
            assert said.startswith("a batch needs 2 groups, 1 are here")
            assert said.endswith("more prompts, or close_submissions()")
            stage.trainer.submit([prompt("b")])
            await stage.instance.order(1)
            assert wait_reasons.batch(stage.driver) == "", "it is being made"
            await stage.instance.answer(0, [7])
            await stage.instance.answer(1, [7])
            await asking
            stage.trainer.close_submissions()
            assert wait_reasons.batch(stage.driver) == "", "nothing is left"

    run(scene())


def test_weights_may_be_what_is_missing() -> None:
    async def scene() -> None:
        async with Stage() as stage:
            stage.trainer.submit([prompt("a")])
            asking = stage.ask()
            await stage.instance.answer(0, [7])
            await asking
            assert "weights after version 0" in wait_reasons.batch(stage.driver)
            await stage.trainer.publish_weights(1, load, wait=True)
            assert wait_reasons.weights(stage.driver) == ""

    run(scene())


def test_a_tool_that_does_not_return() -> None:
    async def scene() -> None:
        async def tool(trajectory: Any) -> None:
            await asyncio.Event().wait()

        async with Stage() as stage:
            stage.trainer.submit([prompt("a")], tool)
            asking = stage.ask()
            await stage.instance.answer(0, [7])
            await until(lambda: len(stage.driver.front.tools) == 1)
            assert wait_reasons.batch(stage.driver) == "tools of 1 trajectories have not returned"
            asking.cancel()

    run(scene())
