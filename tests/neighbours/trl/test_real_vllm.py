"""GRPOTrainer before a real vLLM server on the CPU: what it has learnt arrives there."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from rollout_sched.client import RolloutScheduler
from rollout_sched.integrations.trl import CheckpointTransfer, RolloutFunc
from tests.neighbours.fleet import gateway
from tests.neighbours.trl import fixtures, nccl, tcp_transfer
from tests.vllm import disk_transfer, servers

TEXT = "what comes after this"
TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """With what TRL asks for."""
    plugin, logs = tmp_path_factory.mktemp("plugin"), tmp_path_factory.mktemp("logs")
    disk_transfer.install(plugin, Path(tcp_transfer.__file__), tcp_transfer.NAME)
    flags = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    flags += ["--weight-transfer-config", f'{{"backend": "{tcp_transfer.NAME}"}}']
    path = {"PYTHONPATH": str(plugin)}
    with servers.serving(model, logs, *flags, dev_mode=True, core=0, **path) as server:
        yield server.wait()


def test_weights_by_the_disk(model: Path, url: str, tmp_path: Path) -> None:
    """Completions in groups, weights by checkpoints: nothing of TRL's own vLLM client."""
    scheduler = RolloutScheduler.from_toml("round_robin_sync", [url], prompts_per_step=2)
    with scheduler.blocking() as rollouts:
        weights = CheckpointTransfer(rollouts, tmp_path / "weights")
        func = RolloutFunc(rollouts, weights=weights)
        trainer = fixtures.trainer(model, fixtures.config(tmp_path), rollout_func=func)
        before = greedy(trainer.model, model)
        trainer.train()
        weights.send_weights(trainer.model.named_parameters())
        fixtures.wait_until(lambda: rollouts.state()["loaded"])
        assert rollouts.state()["anomalies"] == {}
    learnt = greedy(trainer.model, model)
    assert learnt != before
    assert completion(url) == learnt


def test_weights_through_the_gateway(
    model: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL as it is: its client, its four calls, one group of the trainer and the server."""
    nccl.replace(monkeypatch, tcp_transfer.join, tcp_transfer.send)
    version = weight_version(url)
    with gateway([url], "--start-version", str(version), policy="round_robin_sync") as ours:
        args = fixtures.config(
            tmp_path,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=ours.url,
            vllm_group_port=free_port(),
        )
        trainer = fixtures.trainer(model, args)
        before = greedy(trainer.model, model)
        trainer.train()
        trainer.vllm_generation.sync_weights()
        learnt = greedy(trainer.model, model)
        assert learnt != before
        assert completion(url) == learnt
        state = ours.get("/admin/state")
        assert state["version"] == version + 3, "one for each step, and the last one"
        assert state["anomalies"] == {}


def greedy(trained: Any, folder: Path) -> list[int]:
    """What the trainer's own weights make of the text."""
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")
    with torch.no_grad():
        out = trained.eval().generate(
            **ids, do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS
        )
    tokens: list[int] = out[0, ids["input_ids"].shape[1] :].tolist()
    return tokens


def completion(url: str) -> list[int]:
    """What a server's weights make of it; what it remembers was made by older ones."""
    asked = {
        "model": "tiny",
        "prompt": TEXT,
        "max_tokens": TOKENS,
        "min_tokens": TOKENS,
        "temperature": 0.0,
        "return_token_ids": True,
        "cache_salt": "test",
    }
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return tokens


def weight_version(url: str) -> int:
    with urllib.request.urlopen(f"{url}/weight_info", timeout=120) as answer:
        return int(json.load(answer)["weight_version"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
