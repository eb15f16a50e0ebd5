"""How long steps take, many at once, and the inverse of that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.simulators.instance.model import CostModel, StepTime
from tests.simulators.instance.by_hand import H100_7B

seconds = st.floats(1e-6, 0.1)
costs = st.builds(
    CostModel,
    step_s=seconds,
    weights_s=st.just(0.0) | seconds,
    token_s=st.just(0.0) | st.floats(1e-9, 1e-3),
    sequence_s=st.just(0.0) | st.floats(1e-9, 1e-4),
    context_s=st.just(0.0) | st.floats(1e-12, 1e-5),
)


def test_a_step_is_the_sum_of_its_parts() -> None:
    cost = CostModel(
        0.5,
        3.0,
        4.0,
        exponent=2.0,
        sequence_s=0.25,
        context_s=0.125,
        attention_s=2.0,
        request_s=0.75,
        prefill_s=0.625,
    )
    time = StepTime(cost)
    decode_s = time.step(sequences=2, tokens=2, context=8, attention=0.0, admitted=0)
    assert decode_s == pytest.approx(0.5 + (3.0**2 + 8.0**2) ** 0.5 + 2 * 0.25 + 8 * 0.125)
    mixed_s = time.step(sequences=2, tokens=3, context=8, attention=3.0, admitted=4)
    matmul_s = (3.0**2 + 12.0**2) ** 0.5
    prefill_s = 3.0 * 2.0 + 4 * 0.75 + 0.625
    assert mixed_s == pytest.approx(0.5 + matmul_s + 2 * 0.25 + 8 * 0.125 + prefill_s)


def test_published_speed_of_a_7b_model_on_an_h100() -> None:
    """150 tokens/s alone, 4,530 with 64 sequences of 4k context (simulated constants)."""
    assert 1 / StepTime(H100_7B).step(1, 1, 100, 0.0, 0) == pytest.approx(150, rel=0.03)
    assert 64 / StepTime(H100_7B).step(64, 64, 64 * 4096, 0.0, 0) == pytest.approx(4530, rel=0.03)


@given(costs, st.integers(1, 60), st.integers(1, 300), st.integers(0, 10**6))
def test_a_jump_is_the_sum_of_its_steps(
    cost: CostModel, steps: int, sequences: int, context: int
) -> None:
    time = StepTime(cost)
    one_by_one = sum(
        time.step(sequences, sequences, context + i * sequences, 0.0, 0) for i in range(steps)
    )
    assert time.jump(steps, sequences, context) == pytest.approx(one_by_one, rel=1e-12)


@given(costs, st.integers(0, 10**6), st.integers(1, 1024), st.integers(0, 10**8))
def test_steps_within_inverts_jump(
    cost: CostModel, steps: int, sequences: int, context: int
) -> None:
    time = StepTime(cost)
    exact = time.jump(steps, sequences, context)
    assert time.steps_within(exact, sequences, context) == steps
    half = (exact + time.jump(steps + 1, sequences, context)) / 2
    assert time.steps_within(half, sequences, context) == steps
    assert time.steps_within(-1.0, sequences, context) == 0


def test_no_model_runs_in_an_empty_step() -> None:
    assert StepTime(H100_7B).step(0, 0, 0, 0.0, 0) == H100_7B.step_s
