"""Prints the steps of a lane of CI, make targets, that have to run: `steps.py LANE`.

All of them, unless `last_whole_run` names an ancestor of HEAD for which all have passed: then those
that the files changed since it concern (`steps.toml`).
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

CI = Path(__file__).parent

#: Steps that run whatever has changed.
ALWAYS = {"test", "check"}


def changed(tree: Path, last_whole_run: Path) -> list[str] | None:
    """Paths of files that differ from the last whole run's; None if that run is not known."""
    if not last_whole_run.exists():
        return None
    commit = last_whole_run.read_text().strip()
    if _git(tree, "merge-base", "--is-ancestor", commit, "HEAD").returncode:
        return None  # of another branch, or the clone has not its history
    differ = _git(tree, "diff", "--name-only", "--no-renames", commit)
    new = _git(tree, "ls-files", "--others", "--exclude-standard")
    if differ.returncode or new.returncode:
        return None
    own = last_whole_run.relative_to(tree).as_posix()
    return [path for path in (differ.stdout + new.stdout).splitlines() if path != own]


def steps(lane: list[str], concerns: dict[str, list[str]], changed: list[str] | None) -> list[str]:
    """The steps of the lane that changed files concern, in its order."""
    if changed is None:
        return lane
    wanted = set(ALWAYS)
    for path in changed:
        prefixes = [prefix for prefix in concerns if path.startswith(prefix)]
        if not prefixes:
            return lane
        wanted.update(concerns[max(prefixes, key=len)])
    return [step for step in lane if step in wanted]


def _git(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *command], cwd=tree, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    table = tomllib.loads((CI / "steps.toml").read_text())
    files = changed(CI.resolve().parent, CI.resolve() / "last_whole_run")
    print(*steps(table["lanes"][sys.argv[1]], table["concerns"], files))
