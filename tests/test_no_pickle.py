"""Nothing that is read can run: no module unpickles, evaluates or loads what others wrote as code.

What a parent sends its own worker processes over a pipe is another matter: `multiprocessing` does
that, and only the modules that are named here start any.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("rollout_sched", "policies", "simulators", "integrations", "examples", "benchmarks")

#: Modules whose readers run what they read.
UNSAFE = frozenset(
    (
        "pickle",
        "_pickle",
        "cPickle",
        "cloudpickle",
        "dill",
        "joblib",
        "marshal",
        "shelve",
        "jsonpickle",
    )
)
#: Calls that do.
UNSAFE_CALLS = frozenset(("eval", "exec", "compile", "__import__"))

#: Who starts processes and talks to them over pipes of their own.
HAVE_WORKERS = {
    "benchmarks/lab.py",
    "benchmarks/tune_coverage.py",
    "rollout_sched/workers.py",
    "benchmarks/cells.py",
}

SOURCES = [
    path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
    if not any(part.is_symlink() for part in path.parents)
]


def imported(tree: ast.AST) -> set[str]:
    """The top names of all modules, wherever they are imported."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "pickle" and {alias.name for alias in node.names} == {"dumps"}:
                continue  # it only writes, for who reads nothing else
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def unsafe(source: str) -> list[str]:
    """What a module does that it must not."""
    tree = ast.parse(source)
    found = [name for name in imported(tree) if name.partition(".")[0] in UNSAFE]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
            found.append(f"{node.func.id}()")
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg == "allow_pickle" and value is not False:
                found.append("allow_pickle")
            if keyword.arg == "weights_only" and value is not True:
                found.append("weights_only")
        if _named(node.func) == "torch.load" and "weights_only" not in {
            k.arg for k in node.keywords
        }:
            found.append("torch.load")
        if _named(node.func) in ("yaml.load", "yaml.unsafe_load", "pandas.read_pickle"):
            found.append(_named(node.func))
    return found


def _named(func: ast.expr) -> str:
    return ast.unparse(func) if isinstance(func, ast.Attribute) else ""


def workers(source: str) -> bool:
    names = imported(ast.parse(source))
    starts = ("multiprocessing", "concurrent.futures.ProcessPoolExecutor")
    return any(name.startswith(starts) for name in names)


def test_nothing_that_is_read_can_run():
    assert len(SOURCES) > 300
    found = {str(path.relative_to(ROOT)): unsafe(path.read_text("utf-8")) for path in SOURCES}
    assert not {path: what for path, what in found.items() if what}


def test_only_those_named_have_worker_processes():
    having = {str(p.relative_to(ROOT)) for p in SOURCES if workers(p.read_text("utf-8"))}
    assert having == HAVE_WORKERS


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "from pickle import dumps, loads",
        "from pickle import dumps\nimport pickle",
        "def f():\n    import cloudpickle as c",
        "from ray import cloudpickle\nimport dill",
        "np.load(x, allow_pickle=True)",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "eval(x)",
        "import yaml\nyaml.load(x)",
    ],
)
def test_forbidden_calls_are_found(source):
    assert unsafe(source)


def test_allowed_calls_pass():
    assert not unsafe("torch.load(x, weights_only=True)\nnp.load(x)\nast.literal_eval(x)")
    assert workers("from concurrent.futures import ProcessPoolExecutor")
    assert not workers("from concurrent.futures import ThreadPoolExecutor")
