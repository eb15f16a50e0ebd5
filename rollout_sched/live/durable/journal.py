"""Writes the journal of a live scheduler: every event to a file, on disk within two seconds."""

from __future__ import annotations

import asyncio
import gzip
import logging
import shutil
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.actions import Action
from rollout_sched.core.model.events import Event
from rollout_sched.journal import Entry, JournalHeader, LineFile, earlier, line_of

log = logging.getLogger(__name__)

#: Seconds between two writes, each of which ends with an fsync.
SYNC_S = 1.0

#: Seconds that the last write may take.
CLOSE_S = 10.0

#: Most bytes that may wait for a slow disk.
MAX_WAITING_BYTES = 2**28


class JournalRecorder:
    """An observer of the driver that records every event. Create it inside a running event loop.

    A thread writes, so a slow disk blocks nothing. A disk failure does not stop the rollouts: the
    journal ends with a complete line, and `broken` and the log say why. Raises CallerError if the
    file exists, because it may be the only record of a crash.

    `bound`: bytes after which a new file begins and the full one is compressed to `<path>.1.gz`,
    which replaces the one before; None: it grows without limit. Replay needs the first event, so it
    is possible only until the second time, with both files.
    """

    def __init__(self, path: Path, header: JournalHeader, *, bound: int | None = None) -> None:
        try:
            self._file = LineFile(path, over=False)
        except FileExistsError:
            text = f"journal {path} already exists; move it away, or choose another file"
            raise CallerError(text) from None
        self.path = path
        self.broken = ""
        self._empty = True
        self._header = header
        self._bound = bound
        self._size = 0
        self._pending = bytearray(line_of(header))
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(SYNC_S, self._write)
        self._writing: asyncio.Future[None] | None = None
        self._full = False  # a full file has been renamed, and is not compressed yet
        self._packing: asyncio.Future[None] | None = None

    def observe(self, now: float, event: Event, actions: list[Action]) -> None:
        if self.broken:
            return
        try:
            self._pending += line_of(Entry(now, event))
            self._empty = False
        except Exception as error:  # without this event, later ones are useless
            self._give_up(error)
        if len(self._pending) > MAX_WAITING_BYTES:
            self._give_up(f"the disk does not keep up: {len(self._pending)} bytes wait for it")

    def state(self) -> dict[str, str]:
        """ "broken": why the journal has ended; "" while it is written."""
        return {"path": str(self.path), "broken": self.broken}

    async def close(self) -> None:
        """Write the rest. The file is complete unless `broken`, and deleted if it has no events."""
        self._timer.cancel()
        try:
            async with asyncio.timeout(CLOSE_S):
                while self._writing is not None or (self._pending and not self.broken):
                    if self._writing is None:
                        self._write()
                    assert self._writing is not None
                    await asyncio.wait({self._writing})
        except TimeoutError:
            self._give_up(f"the rest was not written within {CLOSE_S:g} s")
            return  # a thread still holds the file
        finally:
            self._timer.cancel()
        if self._packing is not None:
            await asyncio.wait({self._packing})
        try:
            self._file.close()
            if self._empty:
                self.path.unlink()
        except OSError as error:
            self._give_up(error)

    def _write(self) -> None:
        lines, self._pending = bytes(self._pending), bytearray()
        self._writing = self._loop.run_in_executor(None, partial(self._append, lines))
        self._writing.add_done_callback(self._written)

    def _append(self, lines: bytes) -> None:
        """Called in a thread."""
        if self._bound is not None and self._size > self._bound and not self._full:
            self._full = True
            self._file.close()
            self.path.replace(earlier(self.path))
            self._file = LineFile(self.path, over=False)
            self._header = replace(self._header, part=self._header.part + 1)
            lines, self._size = line_of(self._header) + lines, 0
        self._file.append(lines, sync=True)
        self._size += len(lines)

    def _written(self, writing: asyncio.Future[None]) -> None:
        self._writing = None
        error = None if writing.cancelled() else writing.exception()
        if error is not None:
            self._give_up(error)
        elif not self.broken:
            self._timer = self._loop.call_later(SYNC_S, self._look)
        if self._full and self._packing is None:
            self._packing = self._loop.run_in_executor(None, _compress, earlier(self.path))
            self._packing.add_done_callback(self._packed)

    def _packed(self, packing: asyncio.Future[None]) -> None:
        self._full, self._packing = False, None
        error = None if packing.cancelled() else packing.exception()
        if error is not None:
            log.error("%s stays as it is: compressing it failed: %s", earlier(self.path), error)

    def _look(self) -> None:
        if self._pending:
            self._write()
        else:
            self._timer = self._loop.call_later(SYNC_S, self._look)

    def _give_up(self, why: object) -> None:
        if not self.broken:
            self.broken = str(why) or type(why).__name__
            self._pending.clear()
            log.error("journal %s ends here: %s", self.path, self.broken)


def _compress(path: Path) -> None:
    """Replace a file by `<path>.gz`. Called in a thread, besides the one that writes."""
    part = Path(f"{path}.gz.part")
    with path.open("rb") as file, gzip.open(part, "wb", compresslevel=3) as packed:
        shutil.copyfileobj(file, packed, 2**20)
    part.replace(f"{path}.gz")
    path.unlink()
