"""Constants from recorded steps."""

from __future__ import annotations

import random

import pytest

from rollout_sched.simulators.instance.cost_fit import (
    EngineSteps,
    Fit,
    MeasuredSpan,
    fit_spans,
)
from rollout_sched.simulators.instance.model import CostModel
from rollout_sched.simulators.instance.step_time import StepTime
from tests.simulators.instance.by_hand import H100_7B


def one(
    sequences: int, prefill: int, context: float, attention: float, seconds: float
) -> MeasuredSpan:
    return MeasuredSpan([EngineSteps(1, sequences, prefill, context, attention, 0)], seconds)


def fit(spans: list[MeasuredSpan]) -> Fit:
    return fit_spans(spans, leave_out=("prefill_s",))


def recorded(cost: CostModel, count: int, noise: float = 0.0) -> list[MeasuredSpan]:
    rng = random.Random(0)
    rows, time = [], StepTime(cost)
    for _ in range(count):
        sequences = rng.randrange(0, 257)
        prefill = rng.choice([0, 0, 300, 2048, 8000]) or (0 if sequences else 100)
        context = sequences * rng.randrange(100, 9000)
        attention = prefill * prefill / 2
        step_s = time.step(sequences, sequences + prefill, context, attention, 0)
        rows.append(
            one(sequences, prefill, context, attention, step_s * (1 + rng.uniform(-noise, noise)))
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
    for (row,), seconds, _ in recorded(H100_7B, 300):
        sequences, tokens = int(row.sequences), int(row.sequences + row.prefill_tokens)
        step_s = StepTime(found.cost).step(sequences, tokens, int(row.context), row.attention, 0)
        assert step_s == pytest.approx(seconds, rel=0.05)


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
        one(batch, 0, batch * context, 0, ms / 1e3)
        for context, row in decode_ms.items()
        for batch, ms in zip(batches, row, strict=True)
    ]
    rows += [one(0, n, 0, n * n / 2, ms / 1e3) for n, ms in prefill_ms.items()]
    found = fit(rows)
    assert found.mean_error < 0.10
    assert found.max_error < 0.30
    assert found.cost.context_s == pytest.approx(1.0e-7, rel=0.1)


@pytest.mark.parametrize(
    "rows",
    [[], [(1, 0, 1, 0, 0.0)], [(1, 0, 1, 0, float("nan"))], [(-1, 0, 1, 0, 1.0)]],
)
def test_fit_refuses_nonsense(rows: list[tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match="fit needs"):
        fit([one(*row) for row in rows])


def test_overhead_outside_the_engine_is_not_in_the_constants() -> None:
    """A round trip, of bursts of which some come in waves."""
    rng, spans = random.Random(0), []
    cost = CostModel(1e-3, 4e-3, 20e-6, sequence_s=50e-6, request_s=1e-3, prefill_s=2e-3)
    time = StepTime(cost)
    for batch in (1, 2, 4, 8):
        for new in (1, 17, 65, 1, 30):
            prefills, tokens = rng.choice((1, 6)), rng.choice((64, 300, 1500))
            steps = [
                EngineSteps(prefills, 0, tokens, 0, 0, prefills),
                EngineSteps(new, batch, 0, batch * new * rng.choice((50, 400)), 0, 0),
            ]
            prefill_s, decode_s = time.step(0, tokens, 0, 0, 1), time.step(batch, batch, 0, 0, 0)
            seconds = prefills * prefill_s + new * decode_s
            spans.append(MeasuredSpan(steps, seconds + 3e-3, 1))
    found = fit_spans(spans)
    assert found.max_error < 1e-4
    assert found.call_s == pytest.approx(3e-3, rel=0.05)
    assert found.cost.sequence_s == pytest.approx(50e-6, rel=0.05)


def test_a_constant_that_is_left_out_is_nothing() -> None:
    spans = [
        MeasuredSpan([EngineSteps(1, 0, n, 0, 0, 1)], 1e-3 + n * 1e-5, 1) for n in (10, 100, 1000)
    ]
    left_out = fit_spans(spans, leave_out=("request_s", "call_s"))
    assert (left_out.cost.request_s, left_out.call_s) == (0.0, 0.0)
    assert left_out.max_error < 1e-3


@pytest.mark.parametrize(
    "spans", [[], [MeasuredSpan([], 1.0)], [MeasuredSpan([EngineSteps(1, 1, 0, 1, 0, 0)], 0.0)]]
)
def test_spans_that_say_nothing_are_refused(spans: list[MeasuredSpan]) -> None:
    with pytest.raises(ValueError, match="fit needs"):
        fit_spans(spans)
