"""Keeps the response lengths of prompts from run to run: a fold over deliveries, in a file.

The core learns the lengths of a run from its events alone. What was learnt in earlier runs reaches
it as the `history` of each group that is submitted, and so it is in the journal, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.core.events import GroupSubmitted
from rollout_sched.core.length_history import LengthHistory
from rollout_sched.whole_file import whole_file

log = logging.getLogger(__name__)

#: Between two times that what is new is written. A crash costs no more than that.
SAVE_S = 60.0

#: Seconds that the last write may take.
CLOSE_S = 10.0


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """The file: response lengths by prompt."""

    schema: Literal["rollout-sched-lengths/1"] = "rollout-sched-lengths/1"
    lengths: dict[str, list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]]]


class LengthStore:
    """The lengths in one file, which is read at the start, where it is there, and then written
    whole every minute and at the end. Make it inside a running event loop; one run at a time.

    A thread writes, so that a slow disk keeps nobody waiting. `broken` says why the last try to
    write failed, as does the log; the next one is a minute later. Raises CallerError for a file
    that cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken = ""
        self._history = LengthHistory()
        for prompt, lengths in _read(path).items():
            self._history.of(prompt, lengths)
        try:
            _write(path, self._encoded())
        except OSError as error:
            text = f"length history {path} cannot be written: {error}; name a file that can"
            raise CallerError(text) from error
        self._changed = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(SAVE_S, self._save)
        self._saving: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        """Prompts that are known."""
        return len(self._history)

    def complete(self, submitted: GroupSubmitted) -> GroupSubmitted:
        """With the lengths that are known, where its trainer named the prompt and knows none."""
        prompt = submitted.prompt
        if submitted.history or prompt not in self._history:
            return submitted
        known = tuple(self._history.of(prompt).ascending)
        return msgspec.structs.replace(submitted, history=known)

    def delivered(self, submitted: GroupSubmitted, lengths: Sequence[int]) -> None:
        """Its samples came to these lengths. A prompt without a name is not met again."""
        if submitted.prompt:
            self._history.of(submitted.prompt, submitted.history).note(lengths)
            self._changed = True

    def state(self) -> dict[str, Any]:
        """ "broken": why it could not be written when that was last tried."""
        return {"path": str(self.path), "prompts": len(self), "broken": self.broken}

    async def close(self) -> None:
        """Write what is left. The file is complete unless `broken`."""
        try:
            async with asyncio.timeout(CLOSE_S):
                if self._saving is not None:
                    await asyncio.wait({self._saving})
                self._save()
                if self._saving is not None:
                    await asyncio.wait({self._saving})
        except TimeoutError:
            self._fail(f"the disk did not take it within {CLOSE_S:g} s")
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
    """Nothing if there is no such file. Raises CallerError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Lengths).lengths
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallerError(
            f"length history {path} cannot be read: {error}; move it away to begin anew"
        ) from error


def _write(path: Path, text: bytes) -> None:
    with whole_file(path) as file:
        file.write(text)
