"""GRPOTrainer with nothing of ours in it: the gateway as its `vllm_server_base_url`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.neighbours.fleet import fleet
from tests.neighbours.trl import fixtures, nccl


def test_it_trains_through_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[dict[str, Any]] = []
    sent: list[int] = []
    nccl.replace(monkeypatch, joined.append, lambda _, tensors: sent.append(len(list(tensors))))
    model = fixtures.write_model(tmp_path / "model")
    with fleet(2, policy="round_robin_sync", fake=fixtures.FAKE) as ours:
        args = fixtures.config(
            tmp_path,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=ours.url,
            # Simulated log-probs are far from the model's: a whole sequence's ratio would be 0.
            vllm_importance_sampling_mode="token_truncate",
        )
        trainer = fixtures.trainer(model, args)
        before = fixtures.copy_of(trainer.model)
        trainer.train()
        assert trainer.state.global_step == 2
        assert fixtures.moved(before, trainer.model)
        assert [info["world_size"] for info in joined] == [3], "both instances and the trainer"
        assert sent == [len(list(trainer.model.named_parameters()))] * 2
        assert all(instance.metric("vllm:request_success_total") for instance in ours.instances)
        state = ours.gateway.get("/admin/state")
        assert state["version"] == state["fleet_version"] == 2, "versions move with its updates"
        assert state["anomalies"] == {}
