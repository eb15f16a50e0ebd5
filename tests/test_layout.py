"""The tree: three rooms at the top, linked into the package, and what holds for every room."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from pathlib import Path

import pytest

from tests import doors

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("policies", "simulators", "integrations")
#: Their doors import the neighbour.
NEED_A_NEIGHBOUR = {"rollout_sched.integrations.torch", "rollout_sched.integrations.trl"}


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


def test_a_door_names_what_is_there():
    for room in filter(doors.is_room, doors.modules()):
        if room in NEED_A_NEIGHBOUR:
            continue
        module = importlib.import_module(room)
        assert [name for name in doors.door(room) if not hasattr(module, name)] == [], room


def test_a_door_gives_what_it_shows_to_type_checkers():
    """A lazy door says both where a name comes from and where a type checker finds it."""
    for room in filter(doors.is_room, doors.modules()):
        if room not in NEED_A_NEIGHBOUR:
            door = importlib.import_module(room)
            named = {name: module for module, name in doors.named_at(room)}
            for name in doors.door(room).intersection(named):
                source = importlib.import_module(named[name])
                assert getattr(door, name) is getattr(source, name), f"{room}.{name}"


def test_a_room_has_at_most_sixteen_files():
    files = Counter(
        module.rpartition(".")[0] for module in doors.modules() if not doors.is_room(module)
    )
    assert {room: count for room, count in files.items() if count > 16} == {}


def test_a_file_has_at_most_six_hundred_lines():
    lines = {
        module: path.read_text("utf-8").count("\n") for module, path in doors.modules().items()
    }
    assert {module: count for module, count in lines.items() if count > 600} == {}


#: Kinds of two roles, which a policy file names alike: `use = "by_cost"`, `use = "unbounded"`.
KINDS = {"ByCost", "Unbounded"}


def test_a_class_name_is_unique_in_its_room():
    places: dict[tuple[str, str], list[str]] = {}
    for module, path in doors.modules().items():
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name not in KINDS:
                places.setdefault((module.rpartition(".")[0], node.name), []).append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_each_room_is_tested_where_tests_mirror_it():
    """Those that need their neighbour to be imported are tested beside it."""
    untested = []
    for house in {doors.house(room) for room in doors.modules()} - {"rollout_sched.integrations"}:
        mirror = ROOT / "tests" / house.removeprefix("rollout_sched").lstrip(".").replace(".", "/")
        folders = mirror, ROOT / "tests/neighbours" / mirror.name
        if not any(path for folder in folders for path in folder.glob("**/test_*.py")):
            untested.append(house)
    assert untested == []


def readme_of(folder):
    """The text that describes the files of a folder: its README, or that of the room around it."""
    while not (folder / "README.md").exists():
        folder = folder.parent
    return (folder / "README.md").read_text("utf-8")


def test_a_readme_names_the_files_of_its_room():
    """Each module by its name, or a folder as a whole: `formats/`."""
    missing = []
    for module, path in doors.modules().items():
        named = rf"[`/]{path.stem}\b|`{path.parent.name}/`"
        if doors.is_room(module) or doors.house(module) in ("", "rollout_sched"):
            continue
        if not re.search(named, readme_of(path.parent)):
            missing.append(module)
    assert missing == []


def test_a_readme_names_no_file_that_is_gone():
    gone = []
    for room in filter(doors.is_room, doors.modules()):
        folder = doors.modules()[room].parent
        if (folder / "README.md").exists():
            _, _, text = (folder / "README.md").read_text("utf-8").partition("## In reading order")
            here = {path.stem for path in folder.rglob("*")}
            names = re.findall("`([a-z_]+)`", text.partition("\n## ")[0])
            gone += [(room, name) for name in names if name not in here]
    assert gone == []
