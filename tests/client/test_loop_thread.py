"""An event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rollout_sched.client.blocking import LoopThread
from rollout_sched.core.errors import CallerError


async def name_of_thread() -> str:
    return threading.current_thread().name


def test_work_runs_in_the_thread_and_errors_reach_the_caller() -> None:
    async def fails() -> None:
        raise ValueError("no")

    thread = LoopThread()
    thread.open("ours")
    assert thread.run(name_of_thread()) == "ours"
    with pytest.raises(ValueError, match="no"):
        thread.run(fails())
    thread.stop()
    assert "ours" not in {thread.name for thread in threading.enumerate()}


def test_stop_cancels_running_work() -> None:
    cancelled = threading.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    thread = LoopThread()
    thread.open("ours")
    thread.start(endless())
    thread.run(name_of_thread())  # so that it has begun
    thread.stop()
    assert cancelled.is_set()


def test_work_outside_its_run_is_refused() -> None:
    thread = LoopThread()
    with pytest.raises(CallerError, match="is not running"):
        thread.run(name_of_thread())
