"""What is compiled is what the compiler gets right."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

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
