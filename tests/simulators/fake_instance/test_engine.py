"""The engine behind the server, on a virtual loop."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.live.ports import Order
from rollout_sched.simulators.fake_instance.engine import Engine, EngineSettings
from rollout_sched.simulators.fake_instance.protocol import Refusal
from rollout_sched.simulators.replay import virtual_loop
from tests.simulators.fake_instance.served import SPEC

ORDER = Order("a", [1, 2, 3], 100, "", {"temperature": 0, "ignore_eos": True})


def test_a_restart_is_a_new_life() -> None:
    async def scene() -> None:
        engine = Engine(EngineSettings(SPEC))
        started = engine.started_at
        await engine.weights.set_label("7")
        task = asyncio.create_task(engine.generate(ORDER))
        await asyncio.sleep(5.5)
        engine.weights.tear("on purpose")
        await engine.restart()
        with pytest.raises(Refusal):
            await task
        assert engine.unanswered == 0
        assert engine.started_at > started
        assert engine.weights.label == "default"
        assert len((await engine.generate(ORDER)).token_ids) == 100
        assert engine.finished["length"] == 1

    virtual_loop.run(scene())


def test_one_that_has_ended_says_so_though_it_stands_still() -> None:
    async def scene() -> None:
        engine = Engine(EngineSettings(SPEC))
        answer = asyncio.create_task(engine.generate(ORDER))
        await asyncio.sleep(1)
        await engine.weights.init_transfer()
        engine.weights.start_update()
        await engine.resume()
        assert engine.dead
        with pytest.raises(Refusal):
            await answer
        await engine.get_stuck()
        with pytest.raises(Refusal):
            await engine.generate(ORDER)

    virtual_loop.run(scene())
