"""Lines for people and for programs."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest

from rollout_sched import process as log_lines
from rollout_sched.core.errors import CallerError
from rollout_sched.process import off_loop, whole_file


@contextmanager
def logged(level: log_lines.Level, form: log_lines.Format) -> Iterator[io.StringIO]:
    """What a process writes that has set up nothing before."""
    root, out = logging.getLogger(), io.StringIO()
    before, root.handlers = (root.level, root.handlers), []
    try:
        log_lines.set_up(level, form, out)
        yield out
    finally:
        root.setLevel(before[0])
        root.handlers = before[1]


@pytest.fixture
def log() -> logging.Logger:
    return logging.getLogger("rollout_sched.example")


def test_a_line_has_time_and_level(log: logging.Logger) -> None:
    with logged("info", "text") as out:
        log.debug("too small")
        log.warning("instance %s lost: %s", "a", "it hangs")
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(
        rf"{time} WARNING rollout_sched\.example: instance a lost: it hangs\n", out.getvalue()
    )


def test_configured_logger_is_left_alone(log: logging.Logger) -> None:
    with logged("info", "text") as first:
        second = io.StringIO()
        log_lines.set_up("info", "text", second)
        log.warning("to the first")
    assert (first.getvalue() == "", second.getvalue() == "") == (False, True)


def test_as_json_its_figures_are_fields(log: logging.Logger) -> None:
    with logged("debug", "json") as out:
        log.info("step %d ended\nat last", 3, extra={"fields": {"step": 3, "idle": 0.25}})
        try:
            int(f"a {'prompt'}")
        except ValueError as error:
            try:
                raise CallerError("ask for less") from error
            except CallerError:
                log.exception("it failed")
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "info",
        "logger": "rollout_sched.example",
        "message": "step 3 ended\nat last",
        "step": 3,
        "idle": 0.25,
    }
    assert second["level"] == "error"
    shown = second["exception"]
    assert shown.index("in test_as_json") < shown.index("ValueError") < shown.index("CallerError")
    assert shown.endswith("CallerError: ask for less")
    assert "a prompt" not in shown, "the message of a conversion quotes it"


# -- Files that are there whole or not at all --


def test_old_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(b"old")
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_interrupted_write_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(b"old")

    def write() -> None:
        with whole_file(path) as file:
            file.write(b"ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_new_file_is_synced_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: (done.append("fsync"), sync(number))[1])
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (done.append("replace"), replace(self, to))
    )
    with whole_file(tmp_path / "a") as file:
        file.write(b"x")
    assert done == ["fsync", "replace"]


def test_others_may_read_it_as_they_may_any_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with whole_file(tmp_path / "whole") as file:
        file.write(b"x")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"), whole_file(tmp_path / "nowhere" / "a"):
        pass


# -- Work off the loop: its result, its error, its limit, and nobody who waits for what hangs --


def test_thread_call_returns_results_and_raises_errors():
    def fail():
        raise KeyError("x")

    assert asyncio.run(off_loop(threading.get_ident, 5.0)) != threading.get_ident()
    with pytest.raises(KeyError):
        asyncio.run(off_loop(fail, 5.0))


def test_hanging_call_is_abandoned_at_exit():
    hanging, over = threading.Event(), threading.Event()

    def hang():
        hanging.wait(60)
        over.set()

    with pytest.raises(TimeoutError):
        asyncio.run(off_loop(hang, 0.05))
    assert not over.is_set()
    hanging.set()  # it answers into a loop that is closed, which does no harm
    time.sleep(0.05)


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        (None, "pip install 'rollout-sched[zstd]'"),
        ({"url": "file:///src/a%20b", "dir_info": {}}, "pip install '/src/a b[zstd]'"),
        ({"url": "file:///src", "dir_info": {"editable": True}}, "pip install -e '/src[zstd]'"),
        (
            {"url": "https://host/it.whl", "archive_info": {}},
            "pip install 'rollout-sched[zstd] @ https://host/it.whl'",
        ),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, noted: dict[str, Any] | None, command: str
) -> None:
    if noted is not None:
        (tmp_path / "direct_url.json").write_text(json.dumps(noted))
    monkeypatch.setattr(log_lines, "distribution", lambda name: PathDistribution(tmp_path))
    assert log_lines.install_extra("zstd") == command
