"""Which replicas of Ray Serve are running, and which of them have an address of their own."""

from __future__ import annotations

from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

from rollout_sched.integrations.ray.servers import ActorName, pattern_of, ports, running


def replica(name: str, state: str) -> dict[str, Any]:
    return {
        "replica_id": name,
        "actor_name": f"SERVE_REPLICA::llm#VLLM#{name}",
        "state": state,
        "node_ip": "10.0.0.1",
    }


def test_those_count_that_run() -> None:
    states = ["STARTING", "UPDATING", "RECOVERING", "RUNNING", "STOPPING", "PENDING_MIGRATION"]
    replicas = [replica(state.lower(), state) for state in states]
    details = {"applications": {"llm": {"deployments": {"VLLM": {"replicas": replicas}}}}}
    here = ActorName("serve", "llm/VLLM/running")
    assert running(details) == {here: "SERVE_REPLICA::llm#VLLM#running"}
    assert not running({"applications": {}})


def test_the_ports_that_serve_opened_are_http_and_behind_the_applications_route() -> None:
    def group(protocol: str, route: str, name: str) -> Any:
        target = SimpleNamespace(ip="10.0.0.1", port=30000, name=name)
        return SimpleNamespace(protocol=protocol, route_prefix=route, targets=[target])

    groups = [group("HTTP", "/", "a"), group("HTTP", "/llm", "b"), group("gRPC", "/", "c")]
    assert ports(groups) == {"a": "http://10.0.0.1:30000", "b": "http://10.0.0.1:30000/llm"}


def test_a_pattern_means_an_application_or_one_of_its_deployments() -> None:
    name = "llm-7b/VLLM/x1"
    for pattern in ("llm-7b", "llm-*", "*", "llm-7b/VLLM", "*/VLLM"):
        assert fnmatchcase(name, pattern_of(pattern)), pattern
    for pattern in ("llm", "VLLM", "llm-7b/Router", "llm-7b/V"):
        assert not fnmatchcase(name, pattern_of(pattern)), pattern
