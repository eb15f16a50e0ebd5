"""Servers run on the fastest loop that the platform has."""

from __future__ import annotations

import asyncio
import sys

import pytest
import uvloop

from rollout_sched import process as event_loop


async def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_uvloop_is_used_when_installed() -> None:
    assert isinstance(event_loop.run(_loop()), uvloop.Loop)


def test_asyncio_loop_is_used_without_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)  # importing it fails
    assert not isinstance(event_loop.run(_loop()), uvloop.Loop)


def test_errors_of_the_coroutine_propagate() -> None:
    async def fail() -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        event_loop.run(fail())
