"""Paths of vLLM's server."""

from __future__ import annotations

from rollout_sched.integrations.vllm.protocol import endpoints


def test_every_path_that_generates_is_told_apart():
    assert {path.decode(): spoken for path, spoken in endpoints.ENDPOINTS.items()} == {
        "/v1/completions": "completions",
        "/v1/chat/completions": "chat",
        "/inference/v1/generate": "generate",
    }


def test_what_holds_an_instance_and_what_releases_it_are_control_of_the_fleet():
    assert endpoints.HOLDING | endpoints.RELEASING <= endpoints.CONTROL_PATHS
    assert not endpoints.HOLDING & endpoints.RELEASING
    assert all(path.startswith("/") for path in endpoints.CONTROL_PATHS)


def test_nothing_that_generates_goes_to_the_whole_fleet():
    assert not endpoints.CONTROL_PATHS & {path.decode() for path in endpoints.ENDPOINTS}
