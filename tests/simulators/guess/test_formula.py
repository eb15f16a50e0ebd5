"""The first guess gives what is shipped, and the published tables."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.simulators.guess import formula
from rollout_sched.simulators.guess.architecture import dense_model, model_named, usual_shape
from rollout_sched.simulators.guess.formula import Layout, Precision, gpu_named, gpus
from rollout_sched.simulators.replay.scenario import load_scenario, parse_scenario

#: Of the shipped scenarios: the constants, and the KV cache, which was rounded by hand there.
WITHIN = 0.03
KV_WITHIN = 0.08


@pytest.mark.parametrize(
    ("name", "model", "layout"),
    [
        ("qwen7b-8xh100", "qwen2.5-7b", Layout(8, 1)),
        ("qwen7b-8xh100-disaggregated", "qwen2.5-7b", Layout(8, 1, 2)),
        ("qwen32b-16xh100", "qwen2.5-32b", Layout(16, 2)),
        ("qwen32b-16xh100-disaggregated", "qwen2.5-32b", Layout(16, 2, 4)),
    ],
)
def test_the_shipped_scenarios_come_out(name: str, model: str, layout: Layout) -> None:
    tables = formula.scenario(gpu_named("h100"), model_named(model), layout)
    guessed, shipped = parse_scenario("guess", tables), load_scenario(name)
    assert guessed.fleet.instances == shipped.fleet.instances
    assert guessed.fleet.kv_tokens == pytest.approx(shipped.fleet.kv_tokens, rel=KV_WITHIN)
    told = msgspec.structs.asdict(shipped.cost)
    assert msgspec.structs.asdict(guessed.cost) == pytest.approx(told, rel=WITHIN)
    assert guessed.trainer.placement == shipped.trainer.placement
    per_token = shipped.trainer.seconds_per_token
    assert guessed.trainer.seconds_per_token == pytest.approx(per_token, rel=WITHIN)
    assert guessed.weights.seconds == pytest.approx(shipped.weights.seconds, rel=WITHIN)


@pytest.mark.parametrize(
    ("gpu", "model", "tp", "step_ms", "weights_ms", "token_us", "context_ns"),
    [
        ("h200", "qwen2.5-7b", 1, 0.60, 4.15, 23.1, 18.4),
        ("a100", "qwen2.5-7b", 1, 0.60, 10.2, 68.7, 43.2),
        ("h20", "qwen2.5-7b", 1, 0.60, 4.98, 127, 22.1),
        ("h800", "qwen3-8b", 1, 0.73, 6.30, 24.7, 67.7),
        ("h100", "qwen3-14b", 1, 0.80, 10.9, 45.6, 75.2),
        ("h100", "qwen2.5-32b", 4, 3.13, 6.61, 27.4, 30.1),
        ("a100", "qwen2.5-32b", 2, 3.2, 21.7, 155, 99),
        ("h100", "llama-3.1-70b", 4, 3.87, 13.3, 59.7, 37.6),
    ],
)
def test_fits_to_public_profiles_come_out(
    gpu: str,
    model: str,
    tp: int,
    step_ms: float,
    weights_ms: float,
    token_us: float,
    context_ns: float,
) -> None:
    cost = formula.cost(gpu_named(gpu), model_named(model), Layout(8, tp))
    found = (cost.step_s * 1e3, cost.weights_s * 1e3, cost.token_s * 1e6, cost.context_s * 1e9)
    assert found == pytest.approx((step_ms, weights_ms, token_us, context_ns), rel=0.03)


@pytest.mark.parametrize("weights", ["fp8", "int8"])
def test_eight_bits_are_half_the_bytes_of_what_is_quantised(weights: Any) -> None:
    gpu, model, layout = gpu_named("h100"), model_named("qwen2.5-32b"), Layout(16, 2, 4)
    precision = Precision(weights, "fp8", requantise_s=0.5)
    plain, small = (
        parse_scenario("guess", formula.scenario(gpu, model, layout, each))
        for each in (formula.BF16, precision)
    )
    assert small.cost.context_s == plain.cost.context_s / 2
    assert 0.5 < small.cost.weights_s / plain.cost.weights_s < 0.6, "small reads are less efficient"
    assert small.cost.token_s == plain.cost.token_s
    assert small.fleet.kv_tokens > 2 * plain.fleet.kv_tokens, "and the weights leave more room"
    assert (small.weights.bytes, small.trainer) == (plain.weights.bytes, plain.trainer)
    assert small.weights.seconds == plain.weights.seconds + 0.5


def test_a_model_of_which_little_is_known() -> None:
    little = dense_model(32.76e9, 64, usual_shape(32.76e9, 64, {}))
    known = model_named("qwen2.5-32b")
    assert little.params == 32.76e9
    assert little.hidden == pytest.approx(known.hidden, rel=0.3)
    assert formula.kv_bytes(little) == formula.kv_bytes(known)
    guessed, told = (
        formula.cost(gpu_named("h100"), model, Layout(8, 2)) for model in (little, known)
    )
    assert guessed.weights_s == pytest.approx(told.weights_s, rel=0.03)


def test_given_facts_of_a_model_are_kept() -> None:
    given = {"hidden": 2048, "heads": None, "kv_heads": 2, "head_dim": 64}
    shape = usual_shape(1e9, 16, given)
    assert shape == {**given, "heads": 32, "vocabulary": shape["vocabulary"]}
    assert dense_model(1e9, 16, shape).kv_values == 2 * 16 * 2 * 64


@pytest.mark.parametrize(
    ("model", "layout", "says"),
    [
        ("qwen2.5-72b", Layout(8, 1), "larger --tp"),
        ("qwen2.5-7b", Layout(2, 4), "increase --gpus"),
        ("qwen2.5-7b", Layout(8, 1, 8), "leave none"),
        ("qwen2.5-7b", Layout(9, 3), "--tp 3"),
    ],
)
def test_impossible_values_are_refused(model: str, layout: Layout, says: str) -> None:
    with pytest.raises(CallerError, match=says):
        formula.scenario(gpu_named("h100"), model_named(model), layout)


# ------------------------------------------------------------------------------------------
# The tables hold what the formulas need.


def test_every_gpu_has_all_figures() -> None:
    for name, gpu in gpus().items():
        assert gpu.flops_share[1] > 0, name
        assert gpu.like in ("", *gpus()), name


def test_unfitted_hardware_uses_a_fitted_one() -> None:
    assert gpu_named("H800").bandwidth_share == gpu_named("h100").bandwidth_share


def test_a_name_with_a_typo() -> None:
    with pytest.raises(CallerError, match='did you mean "h100"'):
        gpu_named("h10")
    with pytest.raises(CallerError, match=r'did you mean "qwen2\.5-7b"'):
        model_named("qwen2-7b")
