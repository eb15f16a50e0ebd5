"""The cost model's formulas, their inverse, and fitting them to recorded steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.simulators.instance.cost_model import CostModel, Observation, fit

H100_7B = CostModel(
    step_s=0.6e-3,
    weights_s=5.95e-3,
    token_s=23.1e-6,
    sequence_s=4.4e-6,
    context_s=26.3e-9,
    attention_s=1.1e-10,
)

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
    cost = CostModel(0.5, 3.0, 4.0, exponent=2.0, sequence_s=0.25, context_s=0.125, attention_s=2.0)
    assert cost.step(sequences=2, tokens=1, context=8, attention=3.0) == pytest.approx(
        0.5 + 5.0 + 2 * 0.25 + 8 * 0.125 + 3.0 * 2.0
    )


def test_published_speed_of_a_7b_model_on_an_h100() -> None:
    """150 tokens/s alone, 4,530 with 64 sequences of 4k context (simulated constants)."""
    assert 1 / H100_7B.step(1, 1, 100, 0.0) == pytest.approx(150, rel=0.03)
    assert 64 / H100_7B.step(64, 64, 64 * 4096, 0.0) == pytest.approx(4530, rel=0.03)


@given(costs, st.integers(1, 60), st.integers(1, 300), st.integers(0, 10**6))
def test_a_jump_is_the_sum_of_its_steps(
    cost: CostModel, steps: int, sequences: int, context: int
) -> None:
    one_by_one = sum(
        cost.step(sequences, sequences, context + i * sequences, 0.0) for i in range(steps)
    )
    assert cost.jump(steps, sequences, context) == pytest.approx(one_by_one, rel=1e-12)


@given(costs, st.integers(0, 10**6), st.integers(1, 1024), st.integers(0, 10**8))
def test_steps_within_inverts_jump(
    cost: CostModel, steps: int, sequences: int, context: int
) -> None:
    exact = cost.jump(steps, sequences, context)
    assert cost.steps_within(exact, sequences, context) == steps
    half = (exact + cost.jump(steps + 1, sequences, context)) / 2
    assert cost.steps_within(half, sequences, context) == steps
    assert cost.steps_within(-1.0, sequences, context) == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"token_s": -1.0}, "token_s"),
        ({"context_s": float("nan")}, "context_s"),
        ({"exponent": 0.5}, "exponent"),
        ({"step_s": 0.0, "weights_s": 0.0}, "stands still"),
    ],
)
def test_nonsense_is_refused(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CostModel(**{"step_s": 1.0, "weights_s": 1.0, "token_s": 1.0, **wrong})


def recorded(cost: CostModel, count: int, noise: float = 0.0) -> list[Observation]:
    dice = random.Random(0)
    rows = []
    for _ in range(count):
        sequences = dice.randrange(0, 257)
        prefill = dice.choice([0, 0, 300, 2048, 8000]) or (0 if sequences else 100)
        context = sequences * dice.randrange(100, 9000)
        attention = prefill * prefill / 2
        step_s = cost.step(sequences, sequences + prefill, context, attention)
        rows.append(
            Observation(
                sequences, prefill, context, attention, step_s * (1 + dice.uniform(-noise, noise))
            )
        )
    return rows


def test_fit_recovers_the_constants_that_made_the_rows() -> None:
    found = fit(recorded(H100_7B, 300))
    for name in CostModel.__struct_fields__:
        assert getattr(found.cost, name) == pytest.approx(getattr(H100_7B, name), rel=1e-3), name
    assert found.max_error < 1e-5


def test_fit_reports_the_noise_it_met() -> None:
    found = fit(recorded(H100_7B, 300, noise=0.1))
    assert found.mean_error == pytest.approx(0.05, rel=0.2)
    for row in recorded(H100_7B, 300):
        sequences, tokens = int(row.sequences), int(row.sequences + row.prefill_tokens)
        step_s = found.cost.step(sequences, tokens, int(row.context), row.attention)
        assert step_s == pytest.approx(row.seconds, rel=0.05)


def test_fit_to_a_measured_engine() -> None:
    """Steps of real vLLM 0.32 on one CPU core, model of 0.9 M parameters, float32: milliseconds
    by context and batch, and whole prefills in one step. Measured on a shared machine: a fit of
    constant + batch + context alone has 9 % mean and 27 % maximal error."""
    batches = (1, 2, 4, 8, 16, 32, 64)
    decode_ms = {
        64: (1.67, 1.81, 1.81, 2.14, 2.50, 3.58, 5.30),
        1024: (1.71, 1.86, 2.21, 2.56, 3.60, 7.67, 12.49),
        4096: (1.96, 2.25, 2.78, 4.65, 9.88, 22.66, 31.86),
        7900: (2.20, 2.65, 3.87, 9.39, 17.09, 31.62, 58.64),
    }
    prefill_ms = {128: 3.4, 512: 9.5, 1024: 18.6, 2048: 55.0}
    rows = [
        Observation(batch, 0, batch * context, 0, ms / 1e3)
        for context, row in decode_ms.items()
        for batch, ms in zip(batches, row, strict=True)
    ]
    rows += [Observation(0, n, 0, n * n / 2, ms / 1e3) for n, ms in prefill_ms.items()]
    found = fit(rows)
    assert found.mean_error < 0.10
    assert found.max_error < 0.30
    assert found.cost.context_s == pytest.approx(1.0e-7, rel=0.1)


@pytest.mark.parametrize(
    "rows",
    [[], [(1, 2, 3)], [(1, 0, 1, 0, 0.0)], [(1, 0, 1, 0, float("nan"))], [(-1, 0, 1, 0, 1.0)]],
)
def test_fit_refuses_nonsense(rows: list[tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match="fit needs"):
        fit(rows)
