"""A calibration by the steps of an engine in this process, here of one that is simulated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rollout_sched.calibration.bursts import Burst, steps_of
from rollout_sched.calibration.calibration import StepCalibrator
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.vllm import EngineLimits
from rollout_sched.integrations.vllm.in_process import EngineStep
from rollout_sched.simulators.instance.step_time import StepTime
from tests.calibration.virtual import COST


class Engine:
    """Says of each burst which steps it takes, with the times of known constants."""

    slots = 16
    max_model_len = 2048
    kv_tokens = 16_384
    limits = EngineLimits(16, True, 2048, "0.32.0")

    def __init__(self, bursts: int = 1000) -> None:
        self._left = bursts

    def burst(
        self, prompts: list[list[int]], new: list[int], sampling: Mapping[str, Any]
    ) -> list[EngineStep]:
        if not self._left:
            raise KeyboardInterrupt
        self._left -= 1
        time, found = StepTime(COST), []
        waves = max(1, len(prompts) // self.slots)
        burst = Burst(len(prompts) // waves, len(prompts[0]), round(sum(new) / len(new)), waves)
        for run in steps_of(burst, self.slots, 2048):
            for _ in range(int(run.number)):
                sequences, prefill = int(run.sequences), int(run.prefill_tokens)
                context, attention = run.context / run.number, run.attention / run.number
                requests = int(run.requests / run.number)
                tokens = sequences + prefill
                took = time.step(sequences, tokens, int(context), attention, requests)
                found.append(
                    EngineStep(sequences, prefill, int(context), attention, requests, took)
                )
        return found


def test_the_constants_of_the_steps_are_found() -> None:
    found = StepCalibrator(Engine(), 1, lambda *_: None).run(60, "tiny")
    for name in ("token_s", "context_s", "attention_s", "sequence_s", "request_s", "prefill_s"):
        assert getattr(found.fit.cost, name) == pytest.approx(getattr(COST, name), rel=0.05), name
    assert found.whole
    assert found.in_process
    assert (found.room.slots, found.limits.block_size, found.fit.call_s) == (16, 16, 0.0)


def test_an_interrupt_leaves_what_is_known() -> None:
    found = StepCalibrator(Engine(bursts=20), 1, lambda *_: None).run(60, "tiny")
    assert not found.whole
    assert found.fit.max_error < 0.01


def test_an_interrupt_before_anything_is_known_is_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        StepCalibrator(Engine(bursts=2), 1, lambda *_: None).run(60, "tiny")


def test_no_time_at_all() -> None:
    with pytest.raises(CallerError, match="--minutes"):
        StepCalibrator(Engine(), 1, lambda *_: None).run(0, "tiny")
