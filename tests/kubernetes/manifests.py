"""The manifests of docs/kubernetes, as objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import rollout_sched

FOLDER = Path(rollout_sched.__file__).parents[1] / "docs/kubernetes"
NAME = "app.kubernetes.io/name"

Object = dict[str, Any]


def objects(folder: str) -> list[Object]:
    """Those that a kustomization takes in, with those of the folders that it builds on."""
    kustomization = yaml.safe_load((FOLDER / folder / "kustomization.yaml").read_text())
    found: list[Object] = []
    for name in kustomization["resources"]:
        path = (FOLDER / folder / name).resolve()
        found += objects(path.name) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for generated in kustomization.get("configMapGenerator", ()):
        files = {name: (FOLDER / folder / name).read_text() for name in generated["files"]}
        metadata = {"name": generated["name"]}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files})
    return found


def patch(path: str) -> Object:
    loaded: Object = yaml.safe_load((FOLDER / path).read_text())
    return loaded


def of_kind(kind: str, found: list[Object]) -> dict[str, Object]:
    """By their names."""
    return {thing["metadata"]["name"]: thing for thing in found if thing["kind"] == kind}


def pod_templates(thing: Object) -> Iterator[tuple[str, Object]]:
    """What an object makes pods of, each with a name for it."""
    name, spec = thing["metadata"]["name"], thing.get("spec", {})
    if "template" in spec:
        yield name, spec["template"]
    if "headGroupSpec" in spec:
        yield f"{name}-head", spec["headGroupSpec"]["template"]
    for group in spec.get("workerGroupSpecs", ()):
        yield f"{name}-{group['groupName']}", group["template"]


def containers(template: Object) -> Iterator[Object]:
    spec = template["spec"]
    yield from spec.get("initContainers", ())
    yield from spec.get("containers", ())
