"""The journal: the ordered record of (now, event) from which everything else follows.

A replay through a scheduler of the same policy, prompts per step, version and seed gives the same
actions and the same state: this is the recovery after a crash, and the proof that the scheduler has
no other input. JSON lines: a header with `schema`, then one `{"now": seconds, "event": {...}}` per
line.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.actions import Action
from rollout_sched.core.model.events import Event
from rollout_sched.core.model.records import Count, Serial, Signed, Size
from rollout_sched.core.scheduler import Scheduler

log = logging.getLogger(__name__)

SCHEMA = "rollout-sched-journal/2"

#: Bytes to write at once.
PORTION = 2**16

_GZIP = b"\x1f\x8b"

_ENCODER = msgspec.json.Encoder()


class JournalError(CallerError):
    """A journal cannot be read; the text names the file and the line."""


class JournalHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """The settings of the recorded run.

    `part`: how many files the run filled before this one. `tables`: of the policy file; empty:
    those of the preset.
    """

    schema: str
    policy: str
    prompts_per_step: Size
    version: Serial = 0
    seed: Signed = 0
    part: Count = 0
    tables: dict[str, Any] = {}


class Entry(msgspec.Struct, frozen=True):
    """One event and the time it was handled, in seconds."""

    now: float
    event: Event


class LineFile:
    """A new file that holds whole lines even after disk errors. Raises OSError.

    `over`: whether to overwrite an existing file.
    """

    def __init__(self, path: str | Path, *, over: bool) -> None:
        mode: Literal["wb", "xb"] = "wb" if over else "xb"
        self._file = Path(path).open(mode, buffering=0)  # noqa: SIM115 (closed by close)
        self._size = 0

    def append(self, lines: bytes, *, sync: bool = False) -> None:
        """Append lines; with `sync`, wait until they are on disk. After an error the file ends with
        its last whole line."""
        left = memoryview(lines)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            whole = lines.rfind(b"\n", 0, len(lines) - len(left)) + 1
            with contextlib.suppress(OSError):  # readers also know how to handle a cut line
                self._file.truncate(self._size + whole)
            raise
        self._size += len(lines)
        if sync:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class JournalWriter:
    """Writes events to a file; nothing is lost if it is closed."""

    def __init__(self, path: str | Path, header: JournalHeader) -> None:
        self._file = LineFile(path, over=True)
        self._pending = bytearray(line_of(header))

    def record(self, now: float, event: Event) -> None:
        self._pending += line_of(Entry(now, event))
        if len(self._pending) >= PORTION:
            self._write()

    def close(self) -> None:
        try:
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        lines, self._pending = bytes(self._pending), bytearray()
        self._file.append(lines)


def line_of(record: JournalHeader | Entry) -> bytes:
    """The record as a line. Raises ValueError or OverflowError for what JSON cannot hold."""
    return _ENCODER.encode(record) + b"\n"


def earlier(path: str | Path) -> Path:
    """Where a full file of a journal is moved when the journal continues in a new one."""
    return Path(f"{path}.1")


def read(path: str | Path) -> tuple[JournalHeader, Iterator[Entry]]:
    """The header and the entries of a journal, including those of the file that it filled before,
    if that is there. `part` of the header is the number of files that are missing.

    Raises JournalError that names the line. An incomplete last line, as after a crash, counts as
    the end, and is logged.
    """
    found = [_read(file) for file in files(path)]
    return found[0][0], chain.from_iterable(entries for _, entries in found)


def is_journal(path: str | Path) -> bool:
    """Whether the file begins as one, of any version."""
    try:
        _, line = next(_lines(path), (1, b""))
    except (JournalError, OSError):
        return False
    return line.startswith(b'{"schema":"rollout-sched-journal/')


def files(path: str | Path) -> list[Path]:
    """The files that `read` reads, in order: perhaps one that was filled before, and this one."""
    header, _ = _read(path)
    for name in dict.fromkeys((str(path), str(path).removesuffix(".gz"))):
        for before in (earlier(name), Path(f"{earlier(name)}.gz")):
            if header.part and before.exists():
                first, _ = _read(before)
                if first == msgspec.structs.replace(header, part=header.part - 1):
                    return [before, Path(path)]
    return [Path(path)]


def _read(path: str | Path) -> tuple[JournalHeader, Iterator[Entry]]:
    lines = _lines(path)
    header: JournalHeader = _decode(path, *next(lines, (1, b"")), JournalHeader)
    if header.schema != SCHEMA:
        raise JournalError(
            f"{path}:1: schema is {header.schema!r}, this version reads {SCHEMA!r}: read it "
            "with the version that wrote it"
        )
    return header, _entries(path, lines)


def replay(scheduler: Scheduler, entries: Iterable[Entry]) -> Iterator[tuple[Entry, list[Action]]]:
    """Handle every entry; yields it with the actions the scheduler returned."""
    for entry in entries:
        yield entry, scheduler.handle(entry.event, entry.now)


def _entries(path: str | Path, lines: Iterable[tuple[int, bytes]]) -> Iterator[Entry]:
    for number, line in lines:
        try:
            entry: Entry = _decode(path, number, line, Entry)
        except JournalError:
            if line.endswith(b"\n"):
                raise
            log.warning("%s:%d: cut in the middle: the journal ends before it", path, number)
            return
        yield entry


def _lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    with Path(path).open("rb") as file:
        zipped = file.read(2) == _GZIP
        file.seek(0)
        try:
            yield from enumerate(gzip.GzipFile(fileobj=file) if zipped else file, start=1)
        except (EOFError, zlib.error) as error:
            raise JournalError(f"{path}: its gzip stream is damaged: {error}") from error


def _decode(path: str | Path, number: int, line: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JournalError(f"{path}:{number}: not a journal line: {error}") from error
