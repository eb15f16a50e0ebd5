"""The engine behind the server, on a virtual loop."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.live.ports import Order
from rollout_sched.simulators.fake_instance.engine import Engine, EngineSettings
from rollout_sched.simulators.fake_instance.errors import Refusal
from rollout_sched.simulators.replay import virtual_loop
from tests.simulators.fake_instance.served import SPEC

ORDER = Order("a", [1, 2, 3], 100, "", {"temperature": 0, "ignore_eos": True})


def test_loading_weights_takes_simulated_time() -> None:
    async def scene() -> None:
        engine = Engine(EngineSettings(SPEC, speed=4.0, update_s=10.0))
        await engine.reload_weights(None)
        assert asyncio.get_running_loop().time() == 2.5

    virtual_loop.run(scene())


def test_labels_make_other_text_if_wanted() -> None:
    async def scene() -> None:
        texts = {}
        for versioned in (False, True):
            engine = Engine(EngineSettings(SPEC, versioned_text=versioned))
            seen = []
            for label in ("1", "2", "step-3", "1"):
                await engine.set_label(label)
                output = await engine.generate(ORDER)
                assert [engine.label_of(version) for version, _ in output.spans] == [label]
                seen.append(tuple(output.token_ids))
            assert seen[0] == seen[3]
            texts[versioned] = len(set(seen))
        assert texts == {False: 1, True: 3}

    virtual_loop.run(scene())


def test_a_restart_is_a_new_life() -> None:
    async def scene() -> None:
        engine = Engine(EngineSettings(SPEC))
        started = engine.started_at
        await engine.set_label("7")
        task = asyncio.create_task(engine.generate(ORDER))
        await asyncio.sleep(5.5)
        engine.tear("on purpose")
        await engine.restart()
        with pytest.raises(Refusal):
            await task
        assert engine.unanswered == 0
        assert engine.started_at > started
        assert engine.label == "default"
        assert len((await engine.generate(ORDER)).token_ids) == 100
        assert engine.finished["length"] == 1

    virtual_loop.run(scene())
