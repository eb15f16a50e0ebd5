"""The Helm chart is the kustomization, and its values change what they name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest

from rollout_sched.integrations.gateway.endpoints_file import parse_endpoints
from tests.kubernetes.manifests import FOLDER, Object, containers, of_kind
from tests.neighbours.kubernetes.conftest import Build


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("chart"))


def made(folder: Path, *image: str) -> Path:
    subprocess.run([sys.executable, FOLDER / "chart.py", folder, *image], check=True)
    return folder


def by_name(things: list[Object]) -> list[Object]:
    return sorted(things, key=lambda thing: (thing["kind"], thing["metadata"]["name"]))


def test_without_values_it_is_what_kustomize_builds(build: Build, chart: Path) -> None:
    build("helm", "lint", "--strict", "--quiet", chart)
    templates = by_name(build("helm", "template", "x", chart))
    assert templates == by_name(build("kubectl", "kustomize", FOLDER / "gateway"))


def test_each_value_changes_what_it_names(build: Build, chart: Path, tmp_path: Path) -> None:
    policy = tmp_path / "mine.toml"
    policy.write_text('about = "a < b"\n\n[routing]\nuse = "round_robin"\n')
    values = {
        "gateway.image": "here/gateway:1",
        "gateway.promptsPerStep": "128",
        "keys.secret": "my-keys",
        "store.size": "7Gi",
        "store.storageClass": "fast",
        "vllm.args[0]": "--tensor-parallel-size=2",
        "vllm.gpus": "2",
        "vllm.image": "here/vllm:1",
        "vllm.memory": "9Gi",
        "vllm.replicas": "3",
        "weights.size": "8Gi",
        "weights.storageClass": "shared",
    }
    given = [f"--set={name}={value}" for name, value in values.items()]
    found = build("helm", "template", "x", chart, *given, f"--set-file=policy={policy}")
    for thing in found:
        kubernetes_validate.validate(thing, "1.37", strict=True)
    files = {name: one["data"] for name, one in of_kind("ConfigMap", found).items()}
    assert files["rollout-sched-policy"] == {"policy.toml": policy.read_text()}
    text = files["rollout-sched-endpoints"]["endpoints.yaml"]
    endpoints = parse_endpoints(Path("endpoints.yaml"), text)
    assert [one.url for one in endpoints] == [f"http://vllm-{n}.vllm:8000" for n in range(3)]
    sets = of_kind("StatefulSet", found)
    (gateway,) = containers(sets["rollout-sched"]["spec"]["template"])
    assert gateway["image"] == "here/gateway:1"
    assert "--prompts-per-step=128" in gateway["args"]
    (vllm,) = containers(sets["vllm"]["spec"]["template"])
    assert vllm["image"] == "here/vllm:1"
    assert vllm["args"][-1] == "--tensor-parallel-size=2"
    assert vllm["resources"]["limits"] == {"memory": "9Gi", "nvidia.com/gpu": "2"}
    assert sets["vllm"]["spec"]["replicas"] == 3
    (store,) = sets["rollout-sched"]["spec"]["volumeClaimTemplates"]
    weights = of_kind("PersistentVolumeClaim", found)["weights"]
    claims = [(c["spec"]["storageClassName"], c["spec"]["resources"]) for c in (store, weights)]
    sizes = [("fast", "7Gi"), ("shared", "8Gi")]
    assert claims == [(name, {"requests": {"storage": size}}) for name, size in sizes]
    assert "rollout-sched-keys" not in str(found)
    assert str(found).count("my-keys") == 2


def test_a_value_that_is_misspelt_is_refused(build: Build, chart: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        build("helm", "template", "x", chart, "--set=vllm.replica=3")
    assert "replica" in refused.value.stderr


def test_a_release_has_its_own_image_and_version(build: Build, tmp_path: Path) -> None:
    chart = made(tmp_path, "ghcr.io/me/rollout-sched:1.2.3")
    sets = of_kind("StatefulSet", build("helm", "template", "x", chart))
    (gateway,) = containers(sets["rollout-sched"]["spec"]["template"])
    assert gateway["image"] == "ghcr.io/me/rollout-sched:1.2.3"
    (shown,) = build("helm", "show", "chart", chart)
    assert (shown["version"], shown["appVersion"]) == ("1.2.3", "1.2.3")
