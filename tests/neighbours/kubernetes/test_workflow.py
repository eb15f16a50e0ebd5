"""The workflow of a release, by the schema of GitHub's workflows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
WORKFLOW = ROOT / ".github/workflows/release.yml"


def valid(workflow: Path) -> bool:
    command = [sys.executable, "-m", "check_jsonschema", str(workflow)]
    command += ["--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0


def test_the_release(tmp_path: Path) -> None:
    assert valid(WORKFLOW)
    bad = tmp_path / "bad.yml"
    bad.write_text(WORKFLOW.read_text().replace("runs-on:", "run-on:", 1))
    assert not valid(bad)
