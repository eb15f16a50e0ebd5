"""Rollouts of a quantised engine differ from the trainer's log-probs, and the figure shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.grpo import Learner, Settings
from examples.tiny_servers import MODEL
from rollout_sched.client import Prompt, RolloutScheduler
from rollout_sched.integrations.torch import mismatch, padded
from tests.vllm import tiny_model
from tests.vllm.servers import serving

BF16 = ("--dtype", "bfloat16", "--quantization")

#: An engine's flags, and bounds of its k3 with a random model, the worst case.
ENGINES = {
    "float": ((), 0.0, 1e-8),
    "int8-weights": ((*BF16, "int8_per_channel_weight_only"), 1e-5, 0.01),
    "fp8-kv": (("--kv-cache-dtype", "fp8"), 0.01, 0.5),
    "fp8-weights": ((*BF16, "fp8_per_channel"), 0.01, 0.5),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_mismatch_of_an_engine(tmp_path: Path, engine: str) -> None:
    supported = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
    if engine == "fp8-kv" and not supported:
        pytest.skip("vLLM's FP8 KV cache needs a processor with AVX-512 or AMX")
    flags, least, most = ENGINES[engine]
    model = tmp_path / "tiny"
    tiny_model.main([str(model), *MODEL])
    prompts = [
        Prompt(f"g{n}", [5 + n, 9, 30 + n, 7], 4, 40, {"logprobs": 0, "temperature": 1.0})
        for n in range(8)
    ]
    with serving(model, tmp_path, "--enable-scale-out", *flags, dev_mode=True, core=0) as server:
        scheduler = RolloutScheduler.from_toml(
            "round_robin_sync", [server.wait()], prompts_per_step=len(prompts)
        )
        with scheduler.blocking() as rollouts:
            rollouts.submit(prompts)
            rollouts.close_submissions()
            (batch,) = rollouts.batches()
            rows = padded(batch, pad_token_id=0)
            found = mismatch(rows, Learner(model, Settings()).log_probs(rows))
            rollouts.report_mismatch(found)
            assert rollouts.state()["mismatch"]["version"] == batch.version
    made = sum(len(sample.response_ids) for sample in batch.samples)
    assert sum(kind.tokens for kind in found.kinds) == made
    assert least <= found.k3() <= most
