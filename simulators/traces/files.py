"""Read trace files as numbered lines of text, compressed or not, and write them atomically."""

from __future__ import annotations

import glob
import gzip
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, cast

from rollout_sched.process import install_extra, whole_file
from rollout_sched.simulators.traces.model import TraceError

# ------------------------------------------------------------------------------------------
# Resolve a trace's name: a file, the files of a folder or a pattern, standard input, or a shipped
# trace.

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


Lines = Iterator[tuple[int, str]]

#: Maximum bytes of one line: more than any row has (sessions of agents, with a hash for each block
#: of each call, have tens of megabytes), but less than a decompression bomb.
LONGEST_LINE = 512 * 2**20

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


#: What the decompressors raise for a file that is invalid or truncated.
_Damage = tuple[type[Exception], ...]
_GZIP_DAMAGE: _Damage = (EOFError, zlib.error, gzip.BadGzipFile)


#: A file may unpack to so many times its own bytes, and some more: real traces unpack to 20 times,
#: a decompression bomb to a thousand or a million. A row counts at least ROW_BYTES.
UNPACKED_TIMES = 100
UNPACKED_MORE = 2**20
ROW_BYTES = 64


class Unpacked(NamedTuple):
    """The content of a file, and the most bytes that it may have."""

    stream: IO[bytes]
    most: int

    def check(self, where: str, found: int) -> None:
        """Raises TraceError if `found` bytes of content are too many."""
        if found > self.most:
            raise TraceError(
                where,
                f"it unpacks to more than {self.most:,} bytes, over {UNPACKED_TIMES} times its own",
                "if you trust it, unpack it or convert it to JSON lines first",
            )


@contextmanager
def unpacked(source: TraceSource) -> Iterator[Unpacked]:
    """The bytes of a file; gzip and zstd are recognised by content.

    Raises TraceError if it cannot be opened, or if it is damaged (found while reading).
    """
    with source.open() as file:
        most = UNPACKED_MORE + UNPACKED_TIMES * file.seek(0, os.SEEK_END)
        file.seek(0)
        magic = file.read(4)
        file.seek(0)
        stream, kind, damage = _stream(source.where, file, magic)
        try:
            yield Unpacked(stream, most)
        except damage as error:
            found = f"damaged {kind} ({error})"
            raise TraceError(source.where, found, "copy the file again") from error
        except OSError as error:
            raise unreadable(source.where, error) from error


def _stream(where: str, file: IO[bytes], magic: bytes) -> tuple[IO[bytes], str, _Damage]:
    if magic.startswith(_GZIP_MAGIC):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file, mode="rb")), "gzip", _GZIP_DAMAGE
    if magic != _ZSTD_MAGIC:
        return file, "", ()
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as error:
        remedy = f"{install_extra('zstd')}, or unpack it first: zstd -d"
        raise TraceError(where, "compressed with zstd", remedy) from error
    return cast(IO[bytes], zstd.open(file, "rb")), "zstd", (EOFError, zstd.ZstdError)


def numbered_lines(where: str, file: Unpacked) -> Lines:
    """(line number from 1, text with its line end) of every line.

    A byte order mark is dropped. Raises TraceError if the text is not UTF-8, or if there is too
    much of it, and what `unpacked` raises.
    """
    number = size = 0
    while raw := file.stream.readline(min(LONGEST_LINE, file.most + 1)):
        number += 1
        size += max(len(raw), ROW_BYTES)
        file.check(where, size)
        if len(raw) == LONGEST_LINE:
            found = f"a line of {LONGEST_LINE} bytes or more"
            raise TraceError(where, found, "write one row per line", line=number)
        yield number, _decoded(where, number, raw)


def filled(lines: Lines) -> Lines:
    """The lines that are not blank, without their line ends."""
    for number, text in lines:
        if text.strip():
            yield number, text.rstrip("\r\n")


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


def _decoded(where: str, number: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(
            where,
            f"byte {raw[error.start]:#04x} at column {error.start + 1} is not UTF-8",
            "convert the file first, for example with iconv -t UTF-8",
            line=number,
        ) from error
