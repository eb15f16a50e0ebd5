"""Keeps the response lengths of prompts from run to run: a fold over deliveries, in a file.

The core learns the lengths of a run only from its events. Lengths from earlier runs reach it as the
`history` of each submitted group, so they are in the journal, too.

The file holds the newest whole deliveries: cutting one would keep the longest responses, which
finish last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollout_sched.core.errors import CallerError, reason_of
from rollout_sched.core.model.events import GroupSubmitted
from rollout_sched.core.model.model import LengthHistory
from rollout_sched.core.model.records import Count
from rollout_sched.process import whole_file

log = logging.getLogger(__name__)

#: Seconds between two writes of new lengths; a crash loses at most that much.
SAVE_S = 60.0

#: Seconds that the last write may take.
CLOSE_S = 10.0


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """The file: response lengths by prompt."""

    schema: Literal["rollout-sched-lengths/1"] = "rollout-sched-lengths/1"
    lengths: dict[str, list[Count]]


class LengthStore:
    """The lengths in one file, which is read at the start, if it exists, and then written as a
    whole every minute and at the end. Create it inside a running event loop; only one run at a
    time may use the file.

    A thread writes, so a slow disk blocks nothing. `broken` and the log say why the last write
    failed; the next try is a minute later. Raises CallerError if the file cannot be read or
    written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken = ""
        self._history = LengthHistory()
        for prompt, lengths in _read(path).items():
            self._history.lengths_of(prompt, lengths)
        try:
            _write(path, self._encoded())
        except OSError as error:
            reason = f"cannot be written: {reason_of(error)}"
            text = f"length history {path} {reason}; choose a writable file"
            raise CallerError(text) from error
        self._changed = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(SAVE_S, self._save)
        self._saving: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        """Number of known prompts."""
        return len(self._history)

    def complete(self, submitted: GroupSubmitted) -> GroupSubmitted:
        """Add the known lengths if the trainer has named the prompt and gave no history."""
        prompt = submitted.prompt
        if submitted.history or prompt not in self._history:
            return submitted
        known = tuple(self._history.lengths_of(prompt).ascending)
        return msgspec.structs.replace(submitted, history=known)

    def delivered(self, submitted: GroupSubmitted, lengths: Sequence[int]) -> None:
        """Note the lengths of its samples. A prompt without a name cannot be recognised again."""
        if submitted.prompt:
            self._history.lengths_of(submitted.prompt, submitted.history).note(lengths)
            self._changed = True

    def state(self) -> dict[str, Any]:
        """ "broken": why the last write failed; "" if it did not."""
        return {"path": str(self.path), "prompts": len(self), "broken": self.broken}

    async def close(self) -> None:
        """Write the rest. The file is complete unless `broken`."""
        try:
            async with asyncio.timeout(CLOSE_S):
                if self._saving is not None:
                    await asyncio.wait({self._saving})
                self._save()
                if self._saving is not None:
                    await asyncio.wait({self._saving})
        except TimeoutError:
            self._fail(f"the write took longer than {CLOSE_S:g} s")
        finally:
            self._timer.cancel()

    def _save(self) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(SAVE_S, self._save)
        if not self._changed or self._saving is not None:
            return
        self._changed = False
        write = partial(_write, self.path, self._encoded())
        self._saving = self._loop.run_in_executor(None, write)
        self._saving.add_done_callback(self._saved)

    def _saved(self, saving: asyncio.Future[None]) -> None:
        self._saving = None
        error = None if saving.cancelled() else saving.exception()
        if error is None:
            self.broken = ""
        else:
            self._changed = True
            self._fail(error)

    def _fail(self, why: object) -> None:
        self.broken = str(why) or type(why).__name__
        log.error("length history %s was not written: %s", self.path, self.broken)

    def _encoded(self) -> bytes:
        return msgspec.json.encode(Lengths(lengths=self._history.lengths())) + b"\n"


def _read(path: Path) -> dict[str, list[int]]:
    """The lengths; empty if there is no file. Raises CallerError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Lengths).lengths
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallerError(
            f"length history {path} cannot be read: {error}; move it away to start a new one"
        ) from error


def _write(path: Path, text: bytes) -> None:
    with whole_file(path) as file:
        file.write(text)
