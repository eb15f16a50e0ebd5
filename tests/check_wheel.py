"""The wheel holds the modules and data files of the tree, no more and no less; the sdist has the C
sources too, of which a compiled wheel is built."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = (".py", ".typed", ".toml", ".gz", ".md", ".html", ".css", ".js", ".txt")


def in_tree(kinds: str | tuple[str, ...]) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "rollout_sched", "policies", "simulators", "integrations"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return {
        path if path.startswith("rollout_sched/") else f"rollout_sched/{path}"
        for path in listed
        if path.endswith(kinds) and not is_readme_of_room(path)
    }


def is_readme_of_room(path: str) -> bool:
    """Whether a file is for those who change the room: the wheel does without."""
    file = ROOT / path
    return file.name == "README.md" and (file.parent / "__init__.py").exists()


def built() -> tuple[set[str], set[str]]:
    """The files of the sdist and of the wheel that is built from it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "build", "--outdir", folder, str(ROOT)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wheel = next(Path(folder).glob("*.whl"))
        names = zipfile.ZipFile(wheel).namelist()
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as sdist:
            sources = {name.partition("/")[2] for name in sdist.getnames()}
    return sources, {name for name in names if ".dist-info/" not in name}


def main() -> int:
    tree, sources = in_tree(DATA), in_tree(".c")
    sdist, wheel = built()
    for name in sorted(sources - sdist):
        print(f"missing in the sdist: {name}")
    for name in sorted(tree - wheel):
        print(f"missing in the wheel: {name}")
    for name in sorted(wheel - tree):
        print(f"only in the wheel: {name}")
    print(f"wheel: {len(wheel)} files, tree: {len(tree)} files")
    return int(tree != wheel or not sources <= sdist)


if __name__ == "__main__":
    sys.exit(main())
