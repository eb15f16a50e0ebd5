"""Mutants of a tiny tree: one is caught, an equivalent one survives, one never ends."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import mutation

TINY = '''\
"""Nothing of 1 + 1 here is a mutant."""


import logging

log = logging.getLogger("tiny")


class Most:
    limit: int = 3

    def __init__(self) -> None:
        self.seen = []

    def add(self, value: int = 2) -> bool:
        log.info("more than %d", 4)
        self.seen.append(value)
        return len(self.seen) < self.limit


def size(items):
    return len(items) if len(items) > 0 else 0


def drained(items):
    rest = list(items)
    while rest:
        rest.pop()
    return True
'''

TEST = """\
from rollout_sched.core.tiny import Most, drained, size


def test_fewer_than_the_limit():
    most = Most()
    assert [most.add(1) for _ in range(3)] == [True, True, False]


def test_size():
    assert [size([]), size([1, 2])] == [0, 2]


def test_drained():
    assert drained([1, 2])
"""


def tree_of(folder: Path, module: str) -> Path:
    texts = {
        "rollout_sched/__init__.py": "",
        f"rollout_sched/core/{module}.py": TINY,
        "tests/core/test_tiny.py": TEST,
    }
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, "utf-8")
    return folder


@pytest.fixture
def found(tmp_path: Path) -> dict[tuple[str, str], mutation.Mutant]:
    mutants = mutation.mutants(tree_of(tmp_path, "tiny"))
    return {(key.function, key.kind): mutant for key, mutant in mutants.items()}


def test_mutants_are_of_what_functions_do(found) -> None:
    assert set(found) == {
        *(("Most.add", kind) for kind in ("dropped", "comparison", "none returned")),
        *(("size", kind) for kind in ("negated", "comparison", "one more", "none returned")),
        *(("drained", kind) for kind in ("negated", "dropped", "boolean", "none returned")),
    }


def test_a_mutant_changes_one_place(found) -> None:
    was = ast.unparse(ast.parse(TINY)).splitlines()
    became = found["Most.add", "comparison"].source().splitlines()
    assert [new for old, new in zip(was, became, strict=True) if old != new] == [
        "        return len(self.seen) <= self.limit"
    ]


def test_tests_judge_mutants(tmp_path: Path, monkeypatch, found) -> None:
    monkeypatch.setitem(mutation.TESTS, "core", ("tests/core",))
    monkeypatch.setattr(mutation, "MORE_CPU_S", 1.0)
    tried = mutation.Copy(tmp_path, tmp_path / "copy")
    assert tried.outcome(found["Most.add", "comparison"]) == "caught"
    assert tried.outcome(found["size", "comparison"]) == "survived"
    assert tried.outcome(found["drained", "dropped"]) == "timed out"


def test_two_trees_have_the_same_mutants_in_other_files(tmp_path: Path) -> None:
    one = mutation.mutants(tree_of(tmp_path / "one", "tiny"))
    other = mutation.mutants(tree_of(tmp_path / "other", "small"))
    assert list(one) == list(other)
    assert mutation.chosen(set(one), 4, 0) == mutation.chosen(set(other), 4, 0)
    assert mutation.chosen(set(one), 4, 0) != mutation.chosen(set(one), 4, 1)


def test_a_renamed_mutant_is_the_same_mutant(tmp_path: Path) -> None:
    one, other = (tree_of(tmp_path / name, "tiny") for name in ("one", "other"))
    file = other / "rollout_sched/core/tiny.py"
    file.write_text(TINY.replace("drained", "emptied").replace("rest", "left"), "utf-8")
    assert mutation.mutants(one).keys() != mutation.mutants(other).keys()
    names = {"emptied": "drained", "left": "rest"}
    assert mutation.mutants(one, names).keys() == mutation.mutants(other, names).keys()


def test_a_function_has_few_mutants(tmp_path: Path) -> None:
    keys = mutation.chosen(set(mutation.mutants(tree_of(tmp_path, "tiny"))), 100, 0)
    assert [key.function for key in keys].count("drained") == mutation.AT_MOST_OF_A_FUNCTION
