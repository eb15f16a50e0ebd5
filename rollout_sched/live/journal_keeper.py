"""Keeps the journal of a live scheduler: every event to a file, on disk within a second."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from rollout_sched.core.actions import Action
from rollout_sched.core.errors import CallerError
from rollout_sched.core.events import Event
from rollout_sched.journal import Header, JournalWriter

log = logging.getLogger(__name__)

FLUSH_S = 1.0


class JournalKeeper:
    """An observer of the driver that records what it sees. Make it inside a running event loop.

    A disk that fails does not stop the rollouts: the journal ends there, and the log says so.
    Raises CallerError for a file that is there already, which may be all that is left of a crash.
    """

    def __init__(self, path: Path, header: Header) -> None:
        if path.exists():
            raise CallerError(f"journal {path} exists; move it away, or name another file")
        self.path = path
        self.broken = False
        self._empty = True
        self._writer = JournalWriter(path, header)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(FLUSH_S, self._flush)

    def observe(self, now: float, event: Event, actions: list[Action]) -> None:
        if self.broken:
            return
        try:
            self._writer.record(now, event)
            self._empty = False
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write what is left. The file is complete unless `broken`, and gone if it is empty."""
        self._timer.cancel()
        try:
            self._writer.close()
            if self._empty:
                self.path.unlink()
        except OSError as error:
            self._give_up(error)

    def _flush(self) -> None:
        try:
            self._writer.flush()
        except OSError as error:
            self._give_up(error)
        else:
            self._timer = self._loop.call_later(FLUSH_S, self._flush)

    def _give_up(self, error: OSError) -> None:
        self.broken = True
        log.error("journal %s ends here: %s", self.path, error)
