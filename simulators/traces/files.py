"""Read trace files as numbered lines of text, compressed or not, and write them atomically."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from rollout_sched.simulators.traces.model import TraceError
from rollout_sched.simulators.traces.sources import TraceSource, unreadable
from rollout_sched.whole_file import whole_file

Lines = Iterator[tuple[int, str]]

#: Maximum bytes of one line: more than any row has (sessions of agents, with a hash for each block
#: of each call, have tens of megabytes), but less than a decompression bomb.
LONGEST_LINE = 512 * 2**20

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


#: What the decompressors raise for a file that is invalid or truncated.
_Damage = tuple[type[Exception], ...]
_GZIP_DAMAGE: _Damage = (EOFError, zlib.error, gzip.BadGzipFile)


@contextmanager
def unpacked(source: TraceSource) -> Iterator[IO[bytes]]:
    """The bytes of a file; gzip and zstd are recognised by content.

    Raises TraceError if it cannot be opened, or if it is damaged (found while reading).
    """
    with source.open() as file:
        magic = file.read(4)
        file.seek(0)
        stream, kind, damage = _stream(source.where, file, magic)
        try:
            yield stream
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
        remedy = "pip install 'rollout-sched[zstd]', or unpack it first: zstd -d"
        raise TraceError(where, "compressed with zstd", remedy) from error
    return cast(IO[bytes], zstd.open(file, "rb")), "zstd", (EOFError, zstd.ZstdError)


def numbered_lines(where: str, stream: IO[bytes]) -> Lines:
    """(line number from 1, text without its line end) of every line that is not blank.

    A byte order mark is dropped. Raises TraceError if the text is not UTF-8, and what `unpacked`
    raises.
    """
    number = 0
    while raw := stream.readline(LONGEST_LINE):
        number += 1
        if len(raw) == LONGEST_LINE:
            found = f"a line of {LONGEST_LINE} bytes or more"
            raise TraceError(where, found, "write one row per line", line=number)
        text = _decoded(where, number, raw)
        if text.strip():
            yield number, text


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
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(
            where,
            f"byte {raw[error.start]:#04x} at column {error.start + 1} is not UTF-8",
            "convert the file first, for example with iconv -t UTF-8",
            line=number,
        ) from error
    return text.rstrip("\r\n")
