"""The journal: the ordered record of (now, event) from which everything else follows.

Replaying it through a scheduler of the same policy, prompts per step, version and seed gives the
same actions and the same state: that is recovery after a crash, and the proof that nothing else
goes in. JSON lines: a header with `schema`, then one `{"now": seconds, "event": {...}}` a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec

from rollout_sched.core.actions import Action
from rollout_sched.core.errors import CallerError
from rollout_sched.core.events import Event
from rollout_sched.core.scheduler import Scheduler

SCHEMA = "rollout-sched-journal/1"


class JournalError(CallerError):
    """A journal cannot be read; the text names the file and the line."""


class Header(msgspec.Struct, frozen=True):
    """What a journal was recorded under."""

    schema: str
    policy: str
    prompts_per_step: int
    version: int = 0
    seed: int = 0


class Entry(msgspec.Struct, frozen=True):
    """One event and the time it was handled, in seconds."""

    now: float
    event: Event


class JournalWriter:
    """Appends events to a file; use it as a context manager."""

    def __init__(self, path: str | Path, header: Header) -> None:
        self._file: BinaryIO = Path(path).open("wb")  # noqa: SIM115 (closed by close)
        self._encoder = msgspec.json.Encoder()
        self._file.write(self._encoder.encode(header) + b"\n")

    def record(self, now: float, event: Event) -> None:
        self._file.write(self._encoder.encode(Entry(now, event)) + b"\n")

    def flush(self) -> None:
        """What is recorded so far survives this process."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read(path: str | Path) -> tuple[Header, Iterator[Entry]]:
    """The header and the entries of a journal. Raises JournalError naming the line."""
    lines = _lines(path)
    header = _decode(path, *next(lines, (1, b"")), Header)
    if header.schema != SCHEMA:
        raise JournalError(f"{path}:1: schema is {header.schema!r}, this version reads {SCHEMA!r}")
    return header, (_decode(path, number, line, Entry) for number, line in lines)


def replay(scheduler: Scheduler, entries: Iterable[Entry]) -> Iterator[tuple[Entry, list[Action]]]:
    """Handle every entry; yields it with the actions the scheduler answered."""
    for entry in entries:
        yield entry, scheduler.handle(entry.event, entry.now)


def _lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    with Path(path).open("rb") as file:
        yield from enumerate(file, start=1)


def _decode(path: str | Path, number: int, line: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise JournalError(f"{path}:{number}: not a journal line: {error}") from error
