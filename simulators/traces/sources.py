"""Resolve a trace's name: a file, the files of a folder or a pattern, standard input, or a shipped
trace.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, cast

from rollout_sched.simulators.traces.model import TraceError

DATA = Path(__file__).with_name("data")
SHIPPED_SUFFIX = ".jsonl.gz"

#: The name of standard input.
STDIN = "-"

#: The files taken from a folder; others, such as READMEs, are not traces.
ENDINGS = (".jsonl", ".ndjson", ".csv", ".parquet")
_PACKED = (".gz", ".zst")

#: Bytes of standard input that are kept in memory; more goes to a temporary file.
_SPOOLED = 64 * 2**20


class TraceSource(NamedTuple):
    """One file: its name in errors, and how it is opened, in binary, at its beginning."""

    where: str
    open: Callable[[], IO[bytes]]


class Sources(NamedTuple):
    """The files of one trace, in order, and its name if the files have none."""

    name: str
    files: list[TraceSource]


def sources_of(name: str | os.PathLike[str]) -> Sources:
    """The files that the name stands for. Raises TraceError if there are none."""
    told = os.fspath(name)
    path = Path(told)
    if told == STDIN:
        return Sources("stdin", [TraceSource("<stdin>", _stdin)])
    if path.is_dir():
        return Sources(path.resolve().name, _of_files(_within(path)))
    if path.exists():
        return Sources(stem(path), _of_files([path]))
    packed = DATA / f"{path.name}{SHIPPED_SUFFIX}"
    if told == path.name and packed.exists():
        return Sources(stem(packed), _of_files([packed]))
    if glob.has_magic(told):
        return Sources(path.parent.name or "traces", _of_files(_matching(told)))
    names = ", ".join(stem(shipped) for shipped in shipped_files())
    raise TraceError(told, "no such file", f"check the path, or name a shipped trace: {names}")


def shipped_files() -> list[Path]:
    return sorted(DATA.glob(f"*{SHIPPED_SUFFIX}"))


def stem(path: Path) -> str:
    """A file's name without the endings that tell its format."""
    name = path.name
    for ending in _PACKED:
        name = name.removesuffix(ending)
    return name.rsplit(".", 1)[0]


def _of_files(paths: Iterable[Path]) -> list[TraceSource]:
    return [TraceSource(str(path), partial(_opened, path)) for path in paths]


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise unreadable(str(path), error) from error


def unreadable(where: str, error: OSError) -> TraceError:
    """The error for an unreadable file, for the caller to raise."""
    reason = error.strerror or str(error)
    return TraceError(where, f"cannot be read ({reason})", "check the path and its permissions")


def _stdin() -> IO[bytes]:
    """All of standard input, because a compressed file is read twice. The reader closes it."""
    spooled = tempfile.SpooledTemporaryFile(max_size=_SPOOLED)  # noqa: SIM115
    shutil.copyfileobj(sys.stdin.buffer, spooled)
    spooled.seek(0)
    return cast(IO[bytes], spooled)


def _within(folder: Path) -> list[Path]:
    files = [
        path
        for path in folder.rglob("*")
        if _is_trace(path) and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    ]
    if not files:
        endings = ", ".join(f"*{ending}" for ending in ENDINGS)
        raise TraceError(
            str(folder), "no trace in this folder", f"name the files by a pattern, or as {endings}"
        )
    return sorted(files, key=_by_number)


def _is_trace(path: Path) -> bool:
    suffixes = [suffix for suffix in path.suffixes if suffix not in _PACKED]
    return bool(suffixes) and suffixes[-1] in ENDINGS and path.is_file()


def _matching(pattern: str) -> list[Path]:
    files = [Path(name) for name in glob.glob(pattern, recursive=True)]
    files = [path for path in files if path.is_file()]
    if not files:
        raise TraceError(pattern, "no file matches", "check the pattern, quoted for the shell")
    return sorted(files, key=_by_number)


def _by_number(path: Path) -> list[tuple[int, str]]:
    """2.jsonl before 10.jsonl, because trainers write a file for each step."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]
