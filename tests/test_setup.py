"""What is compiled is what the compiler gets right."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WAITS = (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncWith, ast.AsyncFor)


def compiled() -> Iterator[Path]:
    """The modules that setup.py names."""
    for statement in ast.parse((ROOT / "setup.py").read_text("utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "HOT":
            for folder, names in ast.literal_eval(statement.value).items():
                for name in names.split():
                    yield ROOT / "rollout_sched" / folder / f"{name}.py"


def handlers(tree: ast.AST) -> Iterator[ast.stmt]:
    """What is done when something was raised."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from handler.body
            yield from node.finalbody


def test_compiled_modules_exist() -> None:
    modules = list(compiled())
    assert len(modules) > 50
    assert all(module.is_file() for module in modules)


def test_compiled_exceptions_have_no_plain_attributes() -> None:
    """A class that inherits from one of the interpreter's is made without their values: refusals of
    calls were AttributeErrors. A ClassVar is kept."""
    for module in compiled():
        exceptions = {"Exception"}
        for cls in ast.walk(ast.parse(module.read_text("utf-8"))):
            if isinstance(cls, ast.ClassDef) and exceptions & {ast.unparse(b) for b in cls.bases}:
                exceptions.add(cls.name)
                plain = [each for each in cls.body if isinstance(each, ast.Assign | ast.AnnAssign)]
                assert all("ClassVar" in ast.unparse(each) for each in plain), (module, cls.name)


def test_nothing_compiled_waits_while_it_handles_an_exception() -> None:
    """`LiveFleet.add` did, and raised it again: compiled by mypyc 2.4 it crashed the process."""
    for module in compiled():
        for statement in handlers(ast.parse(module.read_text("utf-8"))):
            waits = [node for node in ast.walk(statement) if isinstance(node, WAITS)]
            assert not waits, f"{module}:{waits[0].lineno}"


def test_nothing_compiled_waits_as_it_leaves_a_context() -> None:
    """Likewise; to leave a timeout is not to wait."""
    for module in compiled():
        for node in ast.walk(ast.parse(module.read_text("utf-8"))):
            if isinstance(node, ast.AsyncWith):
                entered = [ast.unparse(item.context_expr) for item in node.items]
                assert all(name.startswith("asyncio.timeout") for name in entered), module


#: What changes no attribute: functions of Python, and constructors.
HARMLESS = re.compile(
    r"[A-Z_]*[A-Z]\w*|len|isinstance|min|max|bool|int|bytes|sum|list|cast|partial"
)


def optional(cls: ast.ClassDef) -> set[str]:
    """The attributes of a class that may be None, by their annotations or those of parameters."""
    found: set[str] = set()
    for node in ast.walk(cls):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).endswith("| None"):
            found.add(ast.unparse(node.target).removeprefix("self."))
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            parameters = [*node.args.args, *node.args.kwonlyargs]
            may_be = {p.arg for p in parameters if "None" in ast.unparse(p.annotation or p)}
            for each in ast.walk(node):
                if isinstance(each, ast.Assign) and ast.unparse(each.value) in may_be:
                    found |= {ast.unparse(target).removeprefix("self.") for target in each.targets}
    return found


def trusted(function: ast.AST, attributes: set[str]) -> Iterator[tuple[int, str]]:
    """(line, attribute) of each that is read again after a test of it and a call."""
    tests = [node.test for node in ast.walk(function) if isinstance(node, TESTS)]
    tested = {place(node) for test in tests for node in ast.walk(test)}
    steps: list[tuple[tuple[int, int], str, str]] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and not HARMLESS.fullmatch(ast.unparse(node.func)):
            steps.append(((node.end_lineno or 0, node.end_col_offset or 0), "call", ""))
        elif isinstance(node, ast.ExceptHandler):
            steps.append((place(node), "anew", ""))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            kind = "anew" if isinstance(node.ctx, ast.Store) else "test"
            kind = kind if kind == "anew" or place(node) in tested else "read"
            steps += [(place(node), kind, node.attr)] * (node.attr in attributes)
    stale: dict[str, bool] = {}  # the attributes tested so far: whether a call came after that
    for (line, _), kind, attribute in sorted(steps):
        if kind == "call":
            stale = dict.fromkeys(stale, True)
        elif kind == "anew":
            for name in [attribute] if attribute else list(stale):
                stale.pop(name, None)
        else:
            if stale.get(attribute):
                yield line, attribute
            if kind == "test":
                stale[attribute] = False


def place(node: Any) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


TESTS = (ast.If, ast.While, ast.IfExp, ast.Assert)


def test_nothing_compiled_reads_an_attribute_again_that_was_tested_before_a_call() -> None:
    """mypy takes it for unchanged, and mypyc believes that: a receiver that cancelled within
    `on_data` made `_read_head` raise. Keep what was read in a local variable, or ask a method."""
    for module in compiled():
        for cls in ast.walk(ast.parse(module.read_text("utf-8"))):
            if isinstance(cls, ast.ClassDef):
                functions = [each for each in cls.body if isinstance(each, ast.FunctionDef)]
                found = [x for each in functions for x in trusted(each, optional(cls))]
                assert not found, (module, found)


def test_such_a_read_is_found() -> None:
    bad = """
class C:
    def __init__(self):
        self.x: C | None = None
    def f(self):
        if self.x is not None:
            self.g()
            self.x.f()
    def g(self):
        if self.x is not None:
            x = self.x
            self.f()
            x.f()
"""
    (cls,) = ast.parse(bad).body
    assert isinstance(cls, ast.ClassDef)
    _, bad_one, good_one = cls.body
    assert list(trusted(bad_one, optional(cls))) == [(8, "x")]
    assert not list(trusted(good_one, optional(cls)))
