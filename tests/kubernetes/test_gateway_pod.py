"""The gateway with the arguments of its manifest, in folders that kubelet might have mounted."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kubernetes.manifests import FOLDER, containers, objects, pod_templates
from tests.kubernetes.mount import Mount
from tests.neighbours.fleet import Program, fake_instance, program

KEYS = ("clients", "trainers", "administrators", "instances")
PATIENCE_S = 60.0


def endpoints(*servers: Program) -> str:
    ports = [int(server.url.rpartition(":")[2]) for server in servers]
    return json.dumps({"endpoints": [{"address": "127.0.0.1", "port": port} for port in ports]})


def arguments(root: Path) -> list[str]:
    """Of the manifest, with its folders below `root`, on a loopback port, logging text."""
    (container,) = [
        container
        for thing in objects("gateway")
        for _, template in pod_templates(thing)
        for container in containers(template)
        if container["name"] == "gateway"
    ]
    given = dict(arg.split("=", 1) for arg in container["args"][1:])
    given = {name: str(root) + v if v.startswith("/") else v for name, v in given.items()}
    given |= {"--host": "127.0.0.1", "--port": "0", "--log-format": "text"}
    return ["serve", *(f"{name}={value}" for name, value in given.items())]


def ask(gateway: Program, path: str, key: str = "") -> tuple[int, bytes]:
    """Status and body of the answer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(gateway.url + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def status(gateway: Program, path: str, key: str = "") -> int:
    return ask(gateway, path, key)[0]


def instances(gateway: Program) -> list[str]:
    """Their URLs, in order."""
    _, body = ask(gateway, "/admin/instances", "key-of-administrators")
    return sorted(told["url"] for told in json.loads(body))


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    configuration = tmp_path / "etc/rollout-sched"
    configuration.mkdir(parents=True)
    policy = (FOLDER / "fleet/policy.toml").read_text()
    Mount(configuration / "policy", **{"policy.toml": policy})
    Mount(configuration / "keys", **{name: f"key-of-{name}" for name in KEYS})
    (tmp_path / "weights").mkdir()
    (tmp_path / "var/lib/rollout-sched").mkdir(parents=True)
    return tmp_path


def test_a_pod_serves_follows_its_config_map_and_goes_on_with_its_store(root: Path) -> None:
    with fake_instance() as one, fake_instance() as two:
        folder = root / "etc/rollout-sched/endpoints"
        mount = Mount(folder, **{"endpoints.yaml": endpoints(one)})
        with program(arguments(root), "listening on ") as gateway:
            assert status(gateway, "/liveness") == 200
            assert status(gateway, "/v1/models") == 401
            assert status(gateway, "/v1/models", "key-of-clients") == 200
            assert status(gateway, "/rollout/v1/state", "key-of-clients") == 401
            assert status(gateway, "/rollout/v1/state", "key-of-trainers") == 200
            assert instances(gateway) == [one.url]
            mount.update(**{"endpoints.yaml": endpoints(one, two)})
            until(lambda: instances(gateway) == sorted([one.url, two.url]))
            mount.update(**{"endpoints.yaml": endpoints(two)})
            until(lambda: instances(gateway) == [two.url])
        with program(arguments(root), "listening on ") as gateway:
            _, state = ask(gateway, "/rollout/v1/state", "key-of-trainers")
            assert json.loads(state)["store"]["epoch"] == 2


def test_a_pod_starts_before_any_server(root: Path) -> None:
    folder = root / "etc/rollout-sched/endpoints"
    Mount(folder, **{"endpoints.yaml": (FOLDER / "fleet/endpoints.yaml").read_text()})
    with program(arguments(root), "listening on ") as gateway:
        assert status(gateway, "/liveness") == 200, "it is ready"
        assert status(gateway, "/health") == 503, "and says that nobody is here"
        assert instances(gateway) == ["http://vllm-0.vllm:8000", "http://vllm-1.vllm:8000"]
