"""Lines for people and for programs."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rollout_sched import process as log_lines


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


def test_who_has_seen_to_it_is_left_alone(log: logging.Logger) -> None:
    with logged("info", "text") as first:
        second = io.StringIO()
        log_lines.set_up("info", "text", second)
        log.warning("to the first")
    assert (first.getvalue() == "", second.getvalue() == "") == (False, True)


def test_as_json_its_figures_are_fields(log: logging.Logger) -> None:
    with logged("debug", "json") as out:
        log.info("step %d ended\nat last", 3, extra={"fields": {"step": 3, "idle": 0.25}})
        try:
            raise ValueError("torn")
        except ValueError:
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
    assert "ValueError: torn" in second["exception"]
