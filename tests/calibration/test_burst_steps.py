"""The steps of a burst are those that the simulated instance makes."""

from __future__ import annotations

from rollout_sched.calibration.bursts import Burst, steps_of
from rollout_sched.simulators.instance.cost_fit import EngineSteps


def test_a_prefill_in_one_step_and_decodes() -> None:
    assert steps_of(Burst(2, 10, 4), 8, 100) == [
        EngineSteps(1, 0, 20, 0, 2 * 10 * 10 / 2, 2),
        EngineSteps(3, 2, 0, 2 * (11 + 12 + 13), 0, 0),
    ]


def test_a_prefill_in_chunks_beside_a_decode() -> None:
    found = steps_of(Burst(2, 10, 2), 8, 15)
    assert found == [
        EngineSteps(1, 0, 15, 0, 10 * 5 + 5 * 2.5, 2),
        EngineSteps(1, 1, 5, 11, 5 * (5 + 2.5), 0),
        EngineSteps(1, 1, 0, 11, 0, 0),
    ]


def test_one_token_is_the_prefill_alone() -> None:
    assert steps_of(Burst(1, 64, 1), 8, 2048) == [EngineSteps(1, 0, 64, 0, 64 * 32, 1)]


def test_more_than_run_at_once_come_and_go_one_by_one() -> None:
    burst = Burst(2, 10, 8, waves=3)
    found = steps_of(burst, 2, 100)
    assert sum(run.requests for run in found) == 6
    made = sum(run.number * run.sequences + run.requests for run in found)
    assert made == sum(burst.lengths)
    assert sum(run.number for run in found if run.prefill_tokens) > 3
