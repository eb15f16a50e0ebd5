"""Labels of weights and their updates, on a virtual loop."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.live.ports import Order
from rollout_sched.simulators.fake_instance.engine import Engine, EngineSettings
from rollout_sched.simulators.fake_instance.protocol import Refusal
from rollout_sched.simulators.replay import virtual_loop
from tests.simulators.fake_instance.served import SPEC

ORDER = Order("a", [1, 2, 3], 100, "", {"temperature": 0, "ignore_eos": True})


def test_loading_weights_takes_simulated_time() -> None:
    async def scene() -> None:
        engine = Engine(EngineSettings(SPEC, speed=4.0, update_s=10.0))
        await engine.weights.reload(None)
        assert asyncio.get_running_loop().time() == 2.5

    virtual_loop.run(scene())


def test_labels_make_other_text_if_wanted() -> None:
    async def scene() -> None:
        texts = {}
        for versioned in (False, True):
            engine = Engine(EngineSettings(SPEC, versioned_text=versioned))
            seen = []
            for label in ("1", "2", "step-3", "1"):
                await engine.weights.set_label(label)
                output = await engine.generate(ORDER)
                assert [engine.weights.label_of(version) for version, _ in output.spans] == [label]
                seen.append(tuple(output.token_ids))
            assert seen[0] == seen[3]
            texts[versioned] = len(set(seen))
        assert texts == {False: 1, True: 3}

    virtual_loop.run(scene())


def test_weights_are_half_loaded_while_an_update_lasts_and_after_one_that_failed() -> None:
    async def scene() -> None:
        weights = Engine(EngineSettings(SPEC)).weights
        with pytest.raises(Refusal, match="not configured"):
            weights.start_update()
        await weights.init_transfer()
        with pytest.raises(Refusal, match="not started"):
            await weights.update()
        assert not weights.half_loaded
        weights.start_update()
        with pytest.raises(Refusal, match="already started"):
            weights.start_update()
        await weights.update()
        assert weights.half_loaded
        await weights.finish_update("17")
        assert (weights.label, weights.half_loaded) == ("17", False)
        with pytest.raises(Refusal, match="no weights at"):
            await weights.reload("/nowhere/at/all")
        assert weights.half_loaded

    virtual_loop.run(scene())
