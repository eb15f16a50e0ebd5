"""Paths of vLLM's server."""

from __future__ import annotations

from rollout_sched.integrations.vllm.protocol import endpoints


def test_every_path_that_generates_is_told_apart():
    assert {path.decode(): spoken for path, spoken in endpoints.ENDPOINTS.items()} == {
        "/v1/completions": "completions",
        "/v1/chat/completions": "chat",
        "/inference/v1/generate": "generate",
    }
