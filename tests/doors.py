"""Import contracts of the rooms, for import-linter and for the tests of the layout.

A room is a folder of the product. Its door is what its `__init__` names in `__all__`: names, or
modules whose names are all public. Rooms that share a house (`core` and the rooms in it, `live` and
the rooms in it, each folder of `simulators` and `integrations`) see each other's modules. All
others come in through a door.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from importlinter import Contract, ContractCheck, fields, output

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "rollout_sched"
#: The rooms at the top of the tree, which are linked into the package.
TOP = ("policies", "simulators", "integrations")


class Import(NamedTuple):
    importer: str
    line: int
    module: str
    name: str


@cache
def modules() -> dict[str, Path]:
    """The file of each module of the product; a package's is its `__init__`."""
    found = {}
    for top in (PACKAGE, *TOP):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names = parts if parts[0] == PACKAGE else (PACKAGE, *parts)
            if names[0] == PACKAGE and names[1:2] and names[1] in TOP and parts[0] == PACKAGE:
                continue  # through the link
            found[".".join(names).removesuffix(".__init__")] = path
    return found


def is_room(module: str) -> bool:
    return modules()[module].name == "__init__.py"


def house(module: str) -> str:
    """The outermost room that the module is in; of simulators and integrations, the one below."""
    parts = module.split(".")
    depth = 3 if parts[1:2] and parts[1] in ("simulators", "integrations") else 2
    room = ".".join(parts[:depth])
    return room if room in modules() and is_room(room) else room.rpartition(".")[0]


@cache
def door(room: str) -> frozenset[str]:
    """What the room's `__init__` names in `__all__`, without a `__version__`."""
    for node in ast.parse(modules()[room].read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value)) - {"__version__"}
    return frozenset()


def public_modules() -> Iterator[str]:
    """The modules that doors name."""
    for room in filter(is_room, modules()):
        for module, name in named_at(room):
            if name in door(room) and f"{module}.{name}" in modules():
                yield f"{module}.{name}"


def named_at(room: str) -> Iterator[tuple[str, str]]:
    """Module and name of each import of the room's `__init__`, also of those that only a type
    checker follows: a lazy door names there what it imports when it is asked."""
    for node in ast.walk(ast.parse(modules()[room].read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in modules():
            for alias in node.names:
                yield node.module, alias.name


def imports() -> Iterator[Import]:
    """Each name that a module of the product imports from another house of the product."""
    for importer, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.module not in modules():
                continue
            if house(node.module) != house(importer):
                for alias in node.names:
                    yield Import(importer, node.lineno, node.module, alias.name)


def trespassers() -> Iterator[Import]:
    """Imports past a door. The package's own files (config, journal) are rooms of one file."""
    public = set(public_modules())
    for found in imports():
        if found.module in public or house(found.module) == PACKAGE:
            continue
        if is_room(found.module) and found.name in door(found.module):
            continue
        target = f"{found.module}.{found.name}"
        if target in public or (target in modules() and is_room(target)):
            continue
        yield found


class Doors(Contract):  # type: ignore[misc]
    """No import goes past a door, and no door names more than `most`."""

    most = fields.IntegerField()

    def check(self, graph: object, verbose: bool) -> ContractCheck:
        past = list(trespassers())
        wide = [room for room in modules() if is_room(room) and len(door(room)) > int(self.most)]
        return ContractCheck(kept=not past and not wide, metadata={"past": past, "wide": wide})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for found in check.metadata["past"]:
            output.print_error(
                f"{found.importer}:{found.line} imports {found.name} from {found.module}: name it "
                f"in the __all__ of a room of {house(found.module)}"
            )
        for room in check.metadata["wide"]:
            output.print_error(f"{room}: its door names {len(door(room))} things")
