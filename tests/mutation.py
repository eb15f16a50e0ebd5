"""How many small errors in core, policies and live the tests catch: `python -m tests.mutation`.

A mutant is one small error: another comparison, an integer one too large, `and` for `or`, `+` for
`-`, True for False, a negated condition, a call or an assignment to an attribute dropped, None
returned. Each is written into a copy of a tree, and the tests of its room run against it, those
files first that speak of it most. A mutant is keyed by what it changes (class, function, statement,
kind), not by where that stands, and chosen by a hash of its key: so two trees in which the same
code stands in other files get the same mutants. `--against` leaves out those that the other tree
does not have; `--renamed` names a file of what is called otherwise there, a line of words each.

A failure counts if it comes again in a second run of the test alone: a test may fall by chance. A
mutant is stopped, and counts as caught, once it takes several times the CPU or the time of the
tests of the tree as it is.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent

_OF_POLICIES = ("tests/core", "tests/policies", "tests/laws/test_scheduler_laws.py")
#: By room of `rollout_sched`.
TESTS = {"core": _OF_POLICIES, "policies": _OF_POLICIES, "live": ("tests/live",)}

AT_MOST_OF_A_FUNCTION = 3

#: A mutant may take this many times as long as the tests of the unchanged tree, and this much more:
#: of CPU little, but of time much, for the machine may have become busier since.
TIMES = 4
MORE_CPU_S = 10.0
MORE_S = 60.0

#: Tests that take longer are left out.
SLOW_S = 30.0

#: So many may fail by chance in the unchanged tree, on a busy machine; they are left out as well.
MAX_FAILED = 3
FAILED = re.compile(r"^FAILED (\S+(?:\[.*?\])?)(?: - |$)", re.MULTILINE)

MEMORY_BYTES = 4 << 30

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
NOT_RUN = (ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom, ast.arguments)
ANNOTATIONS = {"annotation", "returns", "decorator_list", "type_params"}
LOGS = {"log", "logger"}


class Key(msgspec.Struct, frozen=True, order=True):
    """`number` counts the changes of one kind in equal statements of a function."""

    room: str
    function: str
    statement: str
    kind: str
    number: int

    def called(self, names: Mapping[str, str]) -> Key:
        """The key in other words."""

        def text(words: str) -> str:
            return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), words)

        return msgspec.structs.replace(
            self, function=text(self.function), statement=text(self.statement)
        )


@dataclass(frozen=True)
class Change:
    """`node` in place of what stands at `owner.field`, or there at index `at` of a list."""

    function: str
    statement: str
    kind: str
    node: ast.AST
    owner: ast.AST
    field: str
    at: int | None


@dataclass(frozen=True)
class Mutant:
    key: Key
    file: Path
    line: int
    module: ast.Module
    change: Change

    @property
    def words(self) -> set[str]:
        """What tests that know of it would say."""
        return {*self.key.function.split("."), self.file.stem}

    def source(self) -> str:
        change = self.change
        held = getattr(change.owner, change.field)
        new: object = change.node
        if change.at is not None:
            new = [*held[: change.at], change.node, *held[change.at + 1 :]]
        setattr(change.owner, change.field, new)
        try:
            return ast.unparse(self.module) + "\n"
        finally:
            setattr(change.owner, change.field, held)


class Result(msgspec.Struct, frozen=True):
    key: Key
    place: str
    outcome: str
    seconds: float


# Mutants of a tree.


def mutants(tree: Path, names: Mapping[str, str] | None = None) -> dict[Key, Mutant]:
    """All of them, by their keys in these names.

    Without those of one key, for nothing says which of them is another tree's.
    """
    found: dict[Key, list[Mutant]] = {}
    for room in TESTS:
        for file in sorted((tree / "rollout_sched" / room).rglob("*.py")):
            for mutant in _of_file(room, file, tree):
                found.setdefault(mutant.key.called(names or {}), []).append(mutant)
    return {key: one for key, [one, *more] in found.items() if not more}


def chosen(keys: set[Key], count: int, seed: int) -> list[Key]:
    """The first `count` by hash, of a function the first few."""

    def place(key: Key) -> bytes:
        return hashlib.sha256(f"{seed} {key}".encode()).digest()

    of_function: Counter[tuple[str, str]] = Counter()
    result: list[Key] = []
    for key in sorted(keys, key=place):
        of_function[key.room, key.function] += 1
        if of_function[key.room, key.function] <= AT_MOST_OF_A_FUNCTION:
            result.append(key)
    return result[:count]


def _of_file(room: str, file: Path, tree: Path) -> Iterator[Mutant]:
    module = ast.parse(file.read_text("utf-8"))
    numbers: Counter[tuple[str, str, str]] = Counter()
    for change in _changes(module, (), ""):
        same = change.function, change.statement, change.kind
        key = Key(room, *same, numbers[same])
        numbers[same] += 1
        held = getattr(change.owner, change.field)
        line = (held if change.at is None else held[change.at]).lineno
        yield Mutant(key, file.relative_to(tree), line, module, change)


def _changes(owner: ast.AST, scope: tuple[str, ...], statement: str) -> Iterator[Change]:
    """`scope`: names of classes and functions around `owner`, and "()" after that of a function."""
    is_block = hasattr(owner, "body") and not isinstance(owner, ast.expr)
    function = ".".join(name for name in scope if name != "()")
    for field, at, node in _children(owner):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from _changes(node, (*scope, node.name, "()"), "")
            case ast.ClassDef():
                yield from _changes(node, (*scope, node.name), "")
            case _ if "()" in scope:
                around = ast.unparse(_head(node)) if is_block else statement
                for kind, changed in _changed(node):
                    if not (kind == "dropped" and scope[-2] == "__init__"):
                        yield Change(function, around, kind, changed, owner, field, at)
                yield from _changes(node, scope, around)


def _children(owner: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    """field, index, node; of what a run does, and no text, check of types or line of the log."""
    for field, value in ast.iter_fields(owner):
        if field in ANNOTATIONS:
            continue
        for at, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(node, ast.AST) and not isinstance(node, NOT_RUN) and not _logs(node):
                yield field, at, node


def _head(node: ast.AST) -> ast.AST:
    """A statement without the statements in it, for its key."""
    if isinstance(node, ast.If | ast.While):
        return node.test
    if not hasattr(node, "body") or isinstance(node, ast.expr):
        return node
    return ast.Pass()


def _logs(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in LOGS
    return False


def _changed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Compare(ops=[first, *more]):
            ops = [COMPARISONS[type(first)](), *more]
            yield "comparison", _with(node, ops=ops)
        case ast.BoolOp(op=op):
            yield "and/or", _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.BinOp(op=ast.Add() | ast.Sub() as op) if not _is_text(node):
            yield "+/-", _with(node, op=ast.Sub() if isinstance(op, ast.Add) else ast.Add())
        case ast.Constant(value=bool() as value):
            yield "boolean", ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield "one more", ast.Constant(value + 1)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if not isinstance(test, ast.Constant):
                yield "negated", _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Return(value=ast.expr() as value):
            if not (isinstance(value, ast.Constant) and value.value is None):
                yield "none returned", ast.Return(ast.Constant(None))
        case (
            ast.Expr(value=ast.Call() | ast.Await(value=ast.Call()))
            | ast.Assign(targets=[ast.Attribute()])
            | ast.AugAssign(target=ast.Attribute())
            | ast.AnnAssign(target=ast.Attribute(), value=ast.expr())
        ):
            yield "dropped", ast.Pass()


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _is_text(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.JoinedStr)
        or (isinstance(each, ast.Constant) and isinstance(each.value, str))
        for each in ast.walk(node)
    )


# Tests of a mutant.


class Copy:
    """A copy of a tree, in which one file at a time is changed."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self._tree = folder / "tree"
        ignored = shutil.ignore_patterns(".*", "build", "out", "*.egg-info", "__pycache__")
        shutil.copytree(tree, self._tree, symlinks=True, ignore=ignored)
        self._baselines: dict[tuple[str, ...], tuple[float, float, list[str]]] = {}

    def outcome(self, mutant: Mutant) -> str:
        """ "caught", "timed out" or "survived"."""
        tests = TESTS[mutant.key.room]
        limit_s, cpu_s, slow = self._baseline(tests)
        files = sorted(self._files(tests), key=lambda file: -self._relevance(file, mutant))
        file = (self._tree / mutant.file).resolve()
        original = file.read_text("utf-8")
        # A compiled file is told from its source by second and size, which may both be the same.
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
        file.write_text(mutant.source(), "utf-8")
        try:
            return self._judged(files, list(slow), limit_s, cpu_s)
        finally:
            file.write_text(original, "utf-8")

    def _judged(self, files: list[str], without: list[str], limit_s: float, cpu_s: float) -> str:
        while True:
            status, out = self._run(files, without, limit_s, cpu_s)
            if status is None:
                return "timed out"
            failed = FAILED.findall(out)
            if status == 0:
                return "survived"
            if not failed or self._run(failed, [], limit_s, cpu_s)[0] != 0:
                return "caught"
            without += failed

    def _baseline(self, tests: tuple[str, ...]) -> tuple[float, float, list[str]]:
        """Seconds and CPU seconds that a mutant may take, and the tests to leave out."""
        if tests not in self._baselines:
            began, cpu = time.monotonic(), _cpu_s()
            everything = ("--maxfail=0", "--durations=0")
            _, out = self._run(self._files(tests), [], 3600.0, 3600.0, *everything, write=True)
            took, used = time.monotonic() - began, _cpu_s() - cpu
            calls = re.findall(r"^ *([\d.]+)s call +(.+)$", out, re.MULTILINE)
            slow = {test: float(seconds) for seconds, test in calls if float(seconds) > SLOW_S}
            failed = FAILED.findall(out)
            if " passed" not in out or len(failed) > MAX_FAILED:
                raise SystemExit(f"{', '.join(tests)} fail without any change:\n{out[-3000:]}")
            took -= sum(slow.values())
            self._baselines[tests] = (
                TIMES * took + MORE_S,
                TIMES * used + MORE_CPU_S,
                [*slow, *failed],
            )
            without = f", without {', '.join([*slow, *failed])}" if slow or failed else ""
            print(f"{', '.join(tests)}: {took:.0f} s, {used:.0f} s of CPU{without}", flush=True)
        return self._baselines[tests]

    def _files(self, tests: tuple[str, ...]) -> list[str]:
        found: list[str] = []
        for each in tests:
            path = self._tree / each
            files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
            found += [str(file.relative_to(self._tree)) for file in files]
        return found

    def _relevance(self, file: str, mutant: Mutant) -> int:
        words = Counter(re.findall(r"\w+", (self._tree / file).read_text("utf-8")))
        return sum(words[word] for word in mutant.words) + 1000 * (
            Path(file).stem == f"test_{mutant.file.stem}"
        )

    def _run(
        self,
        tests: Sequence[str],
        without: Sequence[str],
        limit_s: float,
        cpu_s: float,
        *options: str,
        write: bool = False,
    ) -> tuple[int | None, str]:
        """pytest's status, None after a time-out; and its output."""

        def limits() -> None:
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), int(cpu_s)))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options]
        command += [f"--deselect={each}" for each in without]
        environment = {**os.environ, "CI": "1", "PYTHONPATH": str(self._tree)}
        if not write:
            environment["PYTHONDONTWRITEBYTECODE"] = "1"
        process = subprocess.Popen(
            [*command, *tests],
            cwd=self._tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=limits,
        )
        try:
            out, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return None, ""
        return (None if process.returncode < 0 else process.returncode), out


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# The command.


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--against", type=Path, help="only mutants that this tree has too")
    parser.add_argument("--renamed", type=Path, help="names that are one, a line of words each")
    parser.add_argument("--out", type=Path, help="results, a line each; those in it are not run")
    options = parser.parse_args(arguments)
    tree = options.tree.resolve()
    names = _names(options.renamed)
    found = mutants(tree, names)
    keys = set(found) & set(mutants(options.against.resolve(), names) if options.against else found)
    order = chosen(keys, options.count, options.seed)
    print(f"{len(order)} of {len(keys)} mutants ({len(found)} in {tree.name})", flush=True)
    known = {result.key.called(names): result for result in _read(options.out)}
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        tried = Copy(tree, Path(folder))
        for key in order:
            if (result := known.get(key)) is None:
                began = time.monotonic()
                mutant = found[key]
                outcome = tried.outcome(mutant)
                seconds = round(time.monotonic() - began, 1)
                result = Result(mutant.key, f"{mutant.file}:{mutant.line}", outcome, seconds)
                _write(options.out, result)
                print(f"{len(results) + 1} {result.place} {outcome} {seconds} s", flush=True)
            results.append(result)
    print(report(results))
    return 0


def report(results: Sequence[Result]) -> str:
    lines = [
        f"survived: {each.place} {each.key.function}: {each.key.kind} in `{each.key.statement}`"
        for each in results
        if each.outcome == "survived"
    ]
    for room in TESTS:
        of_room = Counter(each.outcome for each in results if each.key.room == room)
        lines.append(f"{room}: {_counts(of_room)}")
    return "\n".join([*lines, f"in all: {_counts(Counter(each.outcome for each in results))}"])


def _counts(outcomes: Counter[str]) -> str:
    caught, late, survived = (outcomes[each] for each in ("caught", "timed out", "survived"))
    return f"{caught + late} of {outcomes.total()} caught ({late} timed out), {survived} survived"


def _names(file: Path | None) -> dict[str, str]:
    """The first word of its line for each other word."""
    lines = [] if file is None else [line.split() for line in file.read_text("utf-8").splitlines()]
    return {word: first for first, *more in lines for word in more}


def _read(file: Path | None) -> list[Result]:
    if file is None or not file.exists():
        return []
    return [msgspec.json.decode(line, type=Result) for line in file.read_bytes().splitlines()]


def _write(file: Path | None, result: Result) -> None:
    if file is not None:
        with file.open("ab") as out:
            out.write(msgspec.json.encode(result) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
