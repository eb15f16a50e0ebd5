"""What every process needs: an event loop, blocking work beside it, logs, files written whole, and
the command for a part of the package that is not installed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from threading import Thread
from typing import IO, Any, Literal, TextIO, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

import msgspec

_T = TypeVar("_T")


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine in a new event loop, on uvloop if the platform has it."""
    make_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):  # uvloop does not exist for Windows
        import uvloop

        make_loop = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(main)


#: Seconds between two collections after `spare_the_collector`.
COLLECT_S = 60.0


def spare_the_collector() -> None:
    """Run the garbage collector once a minute, not every few hundred objects.

    Objects that exist now stay alive, and requests create almost no reference cycles. A collection
    frees little, and every request waits for it.
    """
    loop = asyncio.get_running_loop()
    gc.collect()
    gc.freeze()
    gc.disable()

    def look() -> None:
        gc.collect()
        loop.call_later(COLLECT_S, look)

    loop.call_later(COLLECT_S, look)


async def off_loop(work: Callable[[], _T], limit_s: float) -> _T:
    """The result or exception of `work()`; TimeoutError if it takes longer than `limit_s` seconds.

    It has its own daemon thread. On a mount that does not answer the thread hangs forever; neither
    the event loop nor the exit of the program waits for it.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except Exception as error:
            tell(done.set_exception, error)
        else:
            tell(done.set_result, result)

    def tell(settle: Callable[..., None], what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits any more
            loop.call_soon_threadsafe(lambda: None if done.done() else settle(what))

    Thread(target=run, name="off-loop", daemon=True).start()
    async with asyncio.timeout(limit_s):
        return await done


# ------------------------------------------------------------------------------------------
# Logs for operators: one line per event, with time and level.
#
# A record may carry `extra={"fields": {...}}`: the content of the line, for programs.

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]


def set_up(level: Level, form: Format, stream: TextIO | None = None) -> None:
    """Log in this form from this level on, to `stream` or else stderr. If logging is configured
    already, as by a test, nothing is changed."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _time(record: logging.LogRecord) -> str:
    """The time in UTC, to the millisecond, in the format of RFC 3339."""
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Lines(logging.Formatter):
    """Of an exception it shows where it was raised. Its message only if it is one of our own, the
    system's, or of a check: that of another, as of a failed conversion, may quote a prompt or a
    response."""

    def formatException(self, ei: Any) -> str:
        return "".join(_shown(ei[1])).rstrip()


def _shown(error: BaseException | None) -> Iterator[str]:
    if error is None:
        return
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if earlier is not None:
        yield from _shown(earlier)
        yield "\nand after that:\n\n"
    yield "Traceback (most recent call last):\n"
    yield from traceback.format_tb(error.__traceback__)
    message = str(error) if isinstance(error, OSError | RuntimeError | AssertionError) else ""
    yield f"{type(error).__qualname__}: {getattr(error, 'unquoted', message)}\n"


class TextLines(_Lines):
    """Lines of time, level, logger and message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time(record)


class JsonLines(_Lines):
    """One object per line: time, level, logger, message, the record's fields, and any exception."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def check_writable(path: Path) -> None:
    """Check before the work that gives its content. Raises OSError if no file can be written."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: folder {path.parent} does not exist; create it first")
    draft = _draft(path)
    draft.touch()
    draft.unlink()


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which replaces `path` at the end of the block, after all of it is on the
    disk. If the block raises, the old file stays. Raises OSError."""
    draft = _draft(path)
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.draft")


def install_extra(extra: str) -> str:
    """The command that adds an extra to this package where it came from: an index, or a folder or
    file, which the installer has noted (PEP 610)."""
    name, flag = "rollout-sched", ""
    with contextlib.suppress(PackageNotFoundError):
        noted = json.loads(distribution(name).read_text("direct_url.json") or "{}")
        if "dir_info" in noted:
            name = url2pathname(urlsplit(noted["url"]).path)
            flag = "-e " if noted["dir_info"].get("editable") else ""
        elif noted:
            return f"pip install '{name}[{extra}] @ {noted['url']}'"
    return f"pip install {flag}'{name}[{extra}]'"
