"""Models from their config.json: the published sizes come out, and the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.simulators.guess import formula
from rollout_sched.simulators.guess.architecture import (
    Model,
    configs,
    model_in,
    model_named,
    model_of,
)
from rollout_sched.simulators.guess.formula import Layout, Precision, gpu_named

MIXTURE = {**configs()["Qwen/Qwen3-30B-A3B"]}
LATENT = "deepseek-v3"


@pytest.mark.parametrize(
    ("name", "params", "active", "kv_bytes"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", 7.616e9, None, 57_344),
        ("qwen3-0.6b", 0.596e9, None, 114_688),
        ("Qwen3-32B", 32.76e9, None, 262_144),
        ("meta-llama/Llama-3.3-70B-Instruct", 70.55e9, None, 327_680),
        ("meta-llama/Llama-3.1-405B", 405.9e9, None, 516_096),
        ("Qwen/Qwen3-30B-A3B", 30.5e9, 3.3e9, 98_304),
        ("Qwen/Qwen3-235B-A22B", 235e9, 22e9, 192_512),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", 480e9, 35e9, 253_952),
        ("mistralai/Mixtral-8x7B-v0.1", 46.7e9, 12.9e9, 131_072),
        ("deepseek-ai/DeepSeek-R1", 671e9, 37e9, 70_272),
        ("moonshotai/Kimi-K2-Instruct", 1026e9, 32e9, 70_272),
        ("zai-org/GLM-4.6", 355e9, 32e9, 376_832),
        ("zai-org/GLM-4.5-Air", 106e9, 12e9, 188_416),
        ("MiniMaxAI/MiniMax-M2", 230e9, 10e9, 253_952),
        ("openai/gpt-oss-20b", 20.9e9, 3.6e9, 24_576),
        ("openai/gpt-oss-120b", 116.8e9, 5.1e9, 36_864),
    ],
)
def test_published_sizes_come_out(
    name: str, params: float, active: float | None, kv_bytes: int
) -> None:
    """Active parameters are published rounded, with or without the embedding and output layer."""
    model = model_named(name)
    assert model.params == pytest.approx(params, rel=0.01)
    assert 2 * model.kv_values == kv_bytes
    if active is None:
        assert model.routed == 0
    else:
        least, most = (model.active_params + n * model.looked_up for n in (-1, 1))
        assert 0.97 * least < active < 1.03 * most


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "qwen3_next", "linear_num_value_heads": 32}, "Gated DeltaNet.*calibrate"),
        ({"model_type": "nemotron_h", "mamba_num_heads": 64}, "Mamba"),
        ({"model_type": "deepseek_v32", "index_topk": 2048}, "sparse attention"),
        ({"model_type": "minimax", "attn_type_list": [0, 1]}, "lightning"),
        ({"model_type": "t5"}, "'t5' is not modelled.*llama"),
        ({"hidden_size": None}, "not a complete config.json"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"sliding_window": 4096}, "all layers have a sliding window"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'.*--weights"),
    ],
)
def test_what_is_not_modelled_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CallerError, match=says):
        model_of({**MIXTURE, **changes}, "it")


def test_a_file_a_folder_and_a_text_part_are_the_same(tmp_path: Path) -> None:
    expected = model_named("qwen3-30b-a3b")
    file = tmp_path / "config.json"
    for config in (MIXTURE, {"model_type": "seen", "vision_config": {}, "text_config": MIXTURE}):
        file.write_text(json.dumps(config))
        assert model_in(file) == model_in(tmp_path) == expected
    file.write_text("[")
    with pytest.raises(CallerError, match=r"config\.json"):
        model_in(tmp_path)
    with pytest.raises(FileNotFoundError, match="missing"):
        model_in(tmp_path / "missing")


def test_layers_without_experts_are_dense() -> None:
    every = model_of(MIXTURE, "it")
    half = model_of({**MIXTURE, "decoder_sparse_step": 2}, "it")
    without = model_of({**MIXTURE, "mlp_only_layers": [1, 3]}, "it")
    assert half.routed == every.routed / 2
    assert without.expert_layers == every.expert_layers - 2


def _cost(model: Model, layout: Layout, precision: Precision = formula.BF16) -> Any:
    return formula.cost(gpu_named("h200"), model, layout, precision)


def test_latent_attention_is_copied_unless_it_is_data_parallel() -> None:
    model = model_named(LATENT)
    alone, copied, split = (
        Layout(8),
        Layout(8, 8),
        Layout(8, 8, dp_attention=True),
    )
    assert _cost(model, copied).context_s == _cost(model, alone).context_s
    assert _cost(model, split).context_s == pytest.approx(_cost(model, alone).context_s / 8)
    assert _cost(model, split).weights_s > 4 * _cost(model, copied).weights_s
    fp8 = Precision("fp8")
    held = [formula.kv_tokens(gpu_named("b300"), model, each, fp8) for each in (copied, split)]
    assert held[1] > 4 * held[0]


def test_grouped_heads_are_split_only_as_far_as_there_are_any() -> None:
    model = model_named("qwen3-30b-a3b")
    four, eight = (_cost(model, Layout(8, tp)).context_s for tp in (4, 8))
    assert model.kv_parts == 4
    assert four == eight


def test_a_spread_expert_waits_for_the_fullest_gpu() -> None:
    model = model_named("qwen3-235b-a22b")
    sliced, spread = _cost(model, Layout(8, 8)), _cost(model, Layout(8, 8, ep=True))
    assert sliced.expert_share == 8 / 128
    assert sliced.expert_share < spread.expert_share < 4 * sliced.expert_share
    assert spread.experts_s == sliced.experts_s


def test_a_window_costs_by_sequence_and_not_by_context() -> None:
    hybrid = model_named("gpt-oss-120b")
    config = {**configs()["openai/gpt-oss-120b"], "sliding_window": None}
    full = model_of(config, "it")
    assert full.kv_values == 2 * hybrid.kv_values
    assert hybrid.window_values == 128 * hybrid.kv_values
    assert _cost(hybrid, Layout(8)).sequence_s > _cost(full, Layout(8)).sequence_s


def test_several_nodes_send_over_their_links() -> None:
    model, layout = model_named(LATENT), Layout(16, 16)
    within = formula.cost(gpu_named("gb200"), model, layout)
    between = formula.cost(gpu_named("b200"), model, layout)
    assert between.step_s - within.step_s == pytest.approx(2 * 61 * 30e-6)
    assert between.token_s > 1.2 * within.token_s
    wide = formula.cost(gpu_named("b200"), model, Layout(16, 16, dp_attention=True))
    assert within.token_s < wide.token_s < between.token_s


def test_weights_are_as_published_unless_given() -> None:
    model = model_named("gpt-oss-120b")
    assert model.published == "fp4"
    published, wide = (
        formula.weight_bytes(model, Layout(8), each) for each in (Precision(), Precision("bf16"))
    )
    assert published[0] == wide[0], "attention stays bf16"
    assert published[1] == pytest.approx(wide[1] * 0.53 / 2)
