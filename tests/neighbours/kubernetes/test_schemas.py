"""What docs/kubernetes holds, by the schemas of Kubernetes: no field that it does not know."""

from __future__ import annotations

import kubernetes_validate
import msgspec
import pytest

from tests.kubernetes.manifests import (
    FOLDER,
    Object,
    containers,
    objects,
    of_kind,
    pod_templates,
)
from tests.neighbours.kubernetes.conftest import Build

#: Sidecars (`restartPolicy` of an initContainer) and `preStop.sleep` are there since 1.30.
VERSIONS = ("1.31", "1.37")
FOLDERS = ("gateway", "elastic", "ray")


def valid(thing: Object, version: str) -> None:
    kubernetes_validate.validate(thing, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_objects(build: Build, folder: str, version: str) -> None:
    for thing in build("kubectl", "kustomize", FOLDER / folder):
        if not thing["apiVersion"].startswith("ray.io/"):
            valid(thing, version)


class Group(msgspec.Struct, forbid_unknown_fields=True):
    """The pods of one kind in a RayCluster (KubeRay, ray.io/v1), as far as we use it."""

    template: Object
    rayStartParams: dict[str, str]
    groupName: str = ""
    replicas: int = 1
    minReplicas: int = 1
    maxReplicas: int = 1


class Cluster(msgspec.Struct, forbid_unknown_fields=True):
    rayVersion: str
    headGroupSpec: Group
    workerGroupSpecs: list[Group]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_pods_of_a_ray_cluster(version: str) -> None:
    """KubeRay's own schema is in no package: structure here, and pods by Kubernetes's."""
    (cluster,) = [thing for thing in objects("ray") if thing["kind"] == "RayCluster"]
    spec = msgspec.convert(cluster["spec"], Cluster)
    for group in spec.workerGroupSpecs:
        assert group.groupName
        assert group.minReplicas <= group.replicas <= group.maxReplicas
    for name, template in pod_templates(cluster):
        metadata = {"name": name, **template["metadata"]}
        valid({"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata}, version)


@pytest.mark.parametrize("folder", FOLDERS)
def test_kubectl_builds_what_the_other_tests_read(build: Build, folder: str) -> None:
    built = build("kubectl", "kustomize", FOLDER / folder)
    names = sorted((thing["kind"], thing["metadata"]["name"]) for thing in built)
    assert names == sorted((t["kind"], t["metadata"]["name"]) for t in objects(folder))
    if folder == "elastic":
        template = of_kind("StatefulSet", built)["rollout-sched"]["spec"]["template"]
        assert {"name": "endpoints", "emptyDir": {}} in template["spec"]["volumes"]
        assert [c["name"] for c in containers(template)] == ["follow-service", "gateway"]


def test_a_field_that_is_misspelt_is_found() -> None:
    thing = next(thing for thing in objects("gateway") if thing["kind"] == "Service")
    thing["spec"]["selektor"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="selektor"):
        valid(thing, VERSIONS[-1])
