"""CI skips a step only if nothing has changed that it concerns."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
CI = ROOT / ".ci"

if not CI.exists():
    pytest.skip("the tree is not here", allow_module_level=True)

SCRIPT = runpy.run_path(str(CI / "steps.py"))
TABLE: dict[str, Any] = tomllib.loads((CI / "steps.toml").read_text())
LANES: dict[str, list[str]] = TABLE["lanes"]
CONCERNS: dict[str, list[str]] = TABLE["concerns"]


def test_a_path_concerns_the_steps_of_its_longest_prefix() -> None:
    concerns = {"docs/": [], "docs/a": ["b"], "x/": ["c"]}
    lane = ["c", "b", "test"]
    assert SCRIPT["steps"](lane, concerns, []) == ["test"]
    assert SCRIPT["steps"](lane, concerns, ["docs/b"]) == ["test"]
    assert SCRIPT["steps"](lane, concerns, ["docs/a.md", "docs/b"]) == ["b", "test"]
    assert SCRIPT["steps"](lane, concerns, ["docs/a.md", "x/y"]) == lane


def test_a_path_without_a_row_and_an_unknown_last_run_concern_every_step() -> None:
    lane = ["b", "test"]
    assert SCRIPT["steps"](lane, {"docs/": []}, ["docs/a", "core/a"]) == lane
    assert SCRIPT["steps"](lane, {"docs/": []}, None) == lane


def test_rows_name_paths_of_the_tree_and_steps_of_a_lane() -> None:
    steps = {step for lane in LANES.values() for step in lane}
    assert {step for row in CONCERNS.values() for step in row} <= steps
    assert [prefix for prefix in CONCERNS if not (ROOT / prefix).exists()] == []


def test_every_test_target_of_the_makefile_is_a_step() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^(test[\w-]*):", makefile, re.M)) - {"test-all", "test-neighbours"}
    rooms = (path.parent.name for path in ROOT.glob("tests/neighbours/*/requirements.txt"))
    targets |= {f"test-{room}" for room in rooms}
    steps = [step for lane in LANES.values() for step in lane]
    assert sorted(steps) == sorted(
        {*targets, "check", "simulate", "demo", "demo-vllm", "docs", "newcomer"}
    )


def test_a_release_runs_what_is_here() -> None:
    """Its make targets, the scripts that it names, and no Python that the package refuses."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = {word for run in commands if run.startswith("make ") for word in run.split()[1:]}
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {word for run in commands for word in run.split() if (ROOT / word).suffix == ".py"}
    assert [path for path in named if not (ROOT / path).exists()] == []
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())
    oldest = tools["project"]["requires-python"].removeprefix(">=3.")
    assert tools["tool"]["cibuildwheel"]["build"].split()[0] == f"cp3{oldest}-*"
    assert "{project}/tests/newcomer/installed.py" in tools["tool"]["cibuildwheel"]["test-command"]
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish", "image"}, "all must be well"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    commit(tmp_path, "a")
    return tmp_path


def git(tree: Path, *command: str) -> str:
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *name, *command], cwd=tree, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(tree: Path, name: str) -> str:
    (tree / name).write_text(name)
    git(tree, "add", name)
    git(tree, "commit", "-qm", name)
    return git(tree, "rev-parse", "HEAD")


def test_changed_are_files_that_differ_from_the_last_whole_run(tree: Path) -> None:
    last = tree / "last"
    assert SCRIPT["changed"](tree, last) is None
    last.write_text(commit(tree, "b") + "\n")
    assert SCRIPT["changed"](tree, last) == []
    commit(tree, "c")
    git(tree, "mv", "b", "d")
    (tree / "new").touch()
    assert SCRIPT["changed"](tree, last) == ["b", "c", "d", "new"]


def test_nothing_is_known_of_a_commit_that_is_no_ancestor(tree: Path) -> None:
    last = tree / "last"
    last.write_text("0" * 40)
    assert SCRIPT["changed"](tree, last) is None
    git(tree, "checkout", "-qb", "other")
    last.write_text(commit(tree, "b"))
    git(tree, "checkout", "-q", "-")
    assert SCRIPT["changed"](tree, last) is None
