"""The tree is what the packaging needs: three rooms at the top, linked into the package."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("policies", "simulators", "integrations")


@pytest.mark.parametrize("room", ROOMS)
def test_each_link_leads_to_its_room(room):
    link = ROOT / "rollout_sched" / room
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == ROOT / room
    assert not (ROOT / room).is_symlink()


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_imports_from_the_package(room):
    module = importlib.import_module(f"rollout_sched.{room}")
    assert Path(module.__file__).resolve() == ROOT / room / "__init__.py"


def test_every_module_has_a_mirrored_test():
    rooms = ("fake_instance", "guess", "instance", "replay", "traces", "tune")
    simulators = [f"simulators/{room}" for room in rooms]
    simulators.append("simulators/traces/formats")
    gateway = [f"integrations/gateway/{room}" for room in (".", "data_plane", "control_plane")]
    vllm = ["integrations/vllm", "integrations/vllm/protocol"]
    names = ("http", "otel", "ray", "torch", "transfer_queue", "trl", "verl")
    neighbours = [f"integrations/{name}" for name in names]
    rooms = (".", "calibration", "client", "core", "inspection", "link", "live")
    ours = [f"rollout_sched/{room}" for room in (*rooms, "metrics", "page", "store", "top")]
    sources = [
        path.relative_to(ROOT)
        for room in ("examples", *ours, *ROOMS, *simulators, *gateway, *vllm, *neighbours)
        for path in sorted((ROOT / room).glob("*.py"))
        if path.name not in ("__init__.py", "errors.py")  # classes with nothing in them
    ]
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    missing = [str(path) for path in sources if f"test_{path.name}" not in tests]
    assert not missing


#: Kinds of two roles, which a policy file names alike: `use = "by_cost"`, `use = "unbounded"`.
KINDS = {"ByCost", "Unbounded"}


def test_a_class_name_means_one_thing():
    places: dict[str, list[str]] = {}
    for room in ("rollout_sched", *ROOMS):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {
        name: found for name, found in places.items() if len(found) > 1 and name not in KINDS
    } == {}
