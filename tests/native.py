"""The parts in C of the compiled build, also for the tests of a checkout."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
DATA_PLANE = "rollout_sched.integrations.gateway.data_plane"

#: Flags for the compiler, e.g. `CFLAGS="-fsanitize=address,undefined"`.
FLAGS = os.environ.get("CFLAGS", "-O2").split()


@cache
def answer_scan() -> Any:
    """The module `answer_scan`: that of the build, or compiled here. Skips without a C compiler."""
    try:
        return importlib.import_module(f"{DATA_PLANE}.answer_scan")
    except ImportError:
        return _compiled(ROOT / "integrations/gateway/data_plane/answer_scan.c")


def _compiled(source: Path) -> Any:
    compiler = shutil.which("cc")
    if compiler is None or not source.exists():
        pytest.skip("needs a C compiler and the source")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / f"{source.stem}.so"
        include = f"-I{sysconfig.get_paths()['include']}"
        command = [compiler, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", include, *FLAGS]
        subprocess.run([*command, str(source), "-o", str(library)], check=True)
        spec = importlib.util.spec_from_file_location(source.stem, library)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
