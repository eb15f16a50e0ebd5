"""Trace files as numbered lines of text, and back: gzip, encoding, nothing half-written."""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, cast

from rollout_sched.simulators.traces.model import TraceError
from rollout_sched.whole_file import whole_file

Lines = Iterator[tuple[int, str]]

_GZIP_MAGIC = b"\x1f\x8b"


def numbered_lines(path: Path) -> Lines:
    """(line number from 1, text without its line end) of every line that is not blank.

    Gzip is recognised by content, a byte order mark is dropped. TraceError if the file cannot
    be opened, is not UTF-8 or is damaged gzip.
    """
    try:
        with _opened(path) as stream:
            for number, raw in enumerate(stream, start=1):
                text = _decoded(path, number, raw)
                if text.strip():
                    yield number, text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(str(path), f"damaged gzip ({error})", "copy the file again") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise TraceError(str(path), f"cannot be read ({reason})", _remedy(path)) from error


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Write lines (without line ends) to `path`, gzip if it ends in .gz; all or nothing.

    The same lines give the same bytes: gzip's time stamp and file name are left out.
    """
    with whole_file(path) as file:
        if path.suffix == ".gz":
            with gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
                packed.writelines(line + b"\n" for line in lines)
        else:
            file.writelines(line + b"\n" for line in lines)


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP_MAGIC
    return cast(IO[bytes], gzip.open(path, "rb")) if packed else path.open("rb")


def _decoded(path: Path, number: int, raw: bytes) -> str:
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(
            str(path),
            f"byte {raw[error.start]:#04x} at column {error.start + 1} is not UTF-8",
            "convert the file first, for example with iconv -t UTF-8",
            line=number,
        ) from error
    return text.rstrip("\r\n")


def _remedy(path: Path) -> str:
    if path.is_dir():
        return "give one file; put the files of a folder together with cat"
    return "check the path and its permissions"
